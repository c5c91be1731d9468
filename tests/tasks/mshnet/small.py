"""An MSHNet that compiles in seconds."""

import dataclasses

from tpukit import MSHNet
from tpukit_tasks.mshnet.model import MSHNetModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class Narrow(MSHNet):
    """All levels, heads and both phases of MSHNet, with one block a level and few channels."""

    def model(self):
        return MSHNetModel(channels=(16, 16, 16, 16, 16), blocks=(1, 1, 1, 1, 1))
