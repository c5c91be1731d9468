"""The arithmetic of hand-written TPU kernels, for `tpukit plan`: the compiler counts a kernel's operands and
results, but cannot see what it computes."""

import contextlib
from collections.abc import Iterator

_open: list[list[dict]] = []  # the lists of `recorded`


def count_kernel(name: str, flops: float) -> None:
    """Record one call of a kernel, for one core. Does nothing unless a plan is being made."""
    for kernels in _open:
        kernels.append(dict(name=name, flops=flops))


@contextlib.contextmanager
def recorded() -> Iterator[list[dict]]:
    """Context manager: a list of the kernels that are called within it, dicts of name and flops."""
    kernels = []
    _open.append(kernels)
    try:
        yield kernels
    finally:
        _open.remove(kernels)
