"""The runtime of the host's processor."""

import ctypes
import os

import torch

from tpukit.devices.runtime import Runtime


class CPURuntime(Runtime):
    """Plain PyTorch on the host's processor, whose memory this process keeps."""

    def __init__(self, accelerator: str = "cpu", *arguments, **settings):
        super().__init__(accelerator, *arguments, **settings)

    def _open_device(self) -> torch.device:
        keep_freed_memory()
        return torch.device("cpu")


def keep_freed_memory() -> None:
    """Let glibc's malloc keep up to 2 GiB of freed memory in this process, instead of returning it to the
    system.

    By default malloc returns it to the system, and the next step waits while the system zeroes every page
    again. Does nothing where the environment configures malloc, or where malloc is not glibc's."""
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if "glibc.malloc" in tunables or any(name.startswith("MALLOC_") for name in os.environ):
        return
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return
    trim_threshold, mmap_threshold = -1, -3  # malloc.h
    libc.mallopt(trim_threshold, 2**31 - 1)
    if not libc.mallopt(mmap_threshold, 2**30):
        libc.mallopt(mmap_threshold, 2**25)  # all that older versions take
