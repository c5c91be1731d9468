"""A CDEIT that trains in seconds."""

from tpukit import CDEIT

TINY = dict(patch=16, width=16, heads=2, window=4, levels=1)
SMALL = dict(TINY, batch_size=8, lr=1e-2, objective="l2", log_every=2, num_workers=1)


def task_of(folder, **more):
    return CDEIT(dataset_dir=folder, **{**SMALL, "epochs": 2, **more})
