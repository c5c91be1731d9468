"""A small CDEIT for `plans`, in a module that the process which traces its step can import."""

from tpukit import CDEIT
from tpukit_tasks.cdeit.model import CDEITModel


class SmallCDEIT(CDEIT):
    def model(self):
        return CDEITModel(patch=16, width=64, heads=2, window=4, levels=1)
