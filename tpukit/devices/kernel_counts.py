"""What a compiler cannot see of hand-written TPU kernels, reported where they are called, for `tpukit plan`.

The compiler knows a kernel as one operation with operands and results: not how often it reads them again, nor
what it computes."""

import contextlib

_open = []  # the lists of `recorded`


def count_kernel(name, *, hbm_bytes, flops):
    """Report one call of a kernel, for one core. Does nothing unless a plan is being made.

    hbm_bytes: what it reads and writes in HBM beyond each operand and each result once, padded as they lie
    there."""
    for kernels in _open:
        kernels.append(dict(name=name, hbm_bytes=hbm_bytes, flops=flops))


@contextlib.contextmanager
def recorded():
    """Context manager: a list of the kernels that are called within it, as dicts."""
    kernels = []
    _open.append(kernels)
    try:
        yield kernels
    finally:
        _open.remove(kernels)
