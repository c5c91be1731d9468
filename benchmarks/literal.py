"""MSHNet taken literally, which `plans` and `steps` compare with the network as it is on XLA."""

import contextlib
import dataclasses
from unittest import mock

import torch

from tpukit import MSHNet
from tpukit_tasks import mshnet
from tpukit_tasks.mshnet import model
from tpukit_tasks.mshnet.tpu import upsampling


@dataclasses.dataclass(frozen=True, kw_only=True)
class LiteralMSHNet(MSHNet):
    """MSHNet on whole images by torch's own layers, with only what it needs to compile for a TPU at all."""

    def loss(self, model, batch, epoch):
        with literal_layers():
            return super().loss(model, batch, epoch)


@contextlib.contextmanager
def literal_layers():
    """Context manager: let MSHNet on XLA compute as elsewhere. What gathers or scatters there is replaced:
    interpolation, and the maxima of the attention."""

    def channel_attention(self, x):
        return self.from_pooled(x.mean((2, 3), keepdim=True), x.amax((2, 3), keepdim=True))

    def spatial_attention(self, x):
        return torch.sigmoid(self.conv1(torch.cat([x.mean(1, keepdim=True), x.amax(1, keepdim=True)], 1)))

    with contextlib.ExitStack() as stack:
        for owner, name, function in (
            (mshnet, "network_for", lambda image: model),
            (model, "upsample", lambda x, factor: upsampling.upsample(x, factor, 1)),
            (model.ChannelAttention, "forward", channel_attention),
            (model.SpatialAttention, "forward", spatial_attention),
        ):
            stack.enter_context(mock.patch.object(owner, name, function))
        yield
