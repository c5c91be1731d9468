"""A CDEIT that trains in seconds."""

from tpukit import CDEIT
from tpukit_tasks.cdeit.model import CDEITModel

TINY = dict(patch=16, width=16, heads=2, window=4, levels=1)
SMALL = dict(batch_size=8, lr=1e-2, objective="l2", log_every=2, num_workers=1)


class Tiny(CDEIT):
    def model(self):
        return CDEITModel(**TINY)


class Windowed(CDEIT):
    """Whose windows and token grids are large enough for the attention kernels of a TPU."""

    def model(self):
        return CDEITModel(patch=4, width=128, heads=4, window=16, levels=1)


def task_of(folder, **more):
    return Tiny(dataset_dir=folder, **{**SMALL, "epochs": 2, **more})
