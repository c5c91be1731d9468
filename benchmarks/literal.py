"""MSHNet taken literally, which `plans` compares with the network as it is."""

import dataclasses

from tpukit import MSHNet


@dataclasses.dataclass(frozen=True, kw_only=True)
class LiteralMSHNet(MSHNet):
    """MSHNet on whole images with plain convolutions: with only what it needs to compile for a TPU at all."""

    def loss(self, model, batch, epoch):
        from benchmarks.steps import tiling_as

        with tiling_as(False):
            return super().loss(model, batch, epoch)
