"""Collectives over the processes of one training run, through host memory (torch.distributed's gloo).

Gradients alone cross the accelerator's own links: GPUs' by NCCL in `all_reduce`, and TPUs' in
`xla.XLARuntime`."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

if TYPE_CHECKING:
    from tpukit.devices.watchdog import Watchdog


class World:
    """This process among the processes of a training run. The default is a world of one.

    All methods but `heartbeat` are collective: all ranks call them, in the same order."""

    rank: int
    """From 0 to size - 1; rank 0 records, saves and prints."""
    size: int
    """Number of processes."""
    step: int
    """The step of the last `heartbeat`."""
    watchdog: Watchdog | None
    """Gets each heartbeat, and notice of each collective."""

    def __init__(self, rank: int = 0, size: int = 1):
        self.rank, self.size = rank, size
        self.step = self.collectives = 0
        self.watchdog = None

    def heartbeat(self, step: int) -> None:
        """Report that this rank is alive. step: the number of steps taken."""
        self.step = step
        if self.watchdog:
            self.watchdog.heartbeat(step)

    def _enter(self) -> None:
        """Count a collective before this rank waits in it, perhaps for one that has ended."""
        self.collectives += 1
        if self.watchdog:
            self.watchdog.write(self.collectives, 20)

    def all_gather(self, tree: Any) -> list[Any]:
        """Return the pytrees of numbers of all ranks, of one structure, as a list of pytrees of floats, rank
        by rank, the same on all ranks."""
        if self.size == 1:
            return [tree]
        self._enter()
        numbers, structure = tree_flatten(tree)
        mine = torch.tensor(numbers, dtype=torch.float64)
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(rows, mine)
        return [tree_unflatten(row.tolist(), structure) for row in rows]

    def gather(self, tree: Any) -> list[Any]:
        """Return, on rank 0, the pytrees of CPU tensors, numbers and strings of all ranks; elsewhere []."""
        if self.size == 1:
            return [tree]
        data = _pack(tree)
        lengths = [int(length) for length in self.all_gather(len(data))]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(data)] = data
        rows = [torch.empty_like(padded) for _ in lengths] if self.rank == 0 else None
        dist.gather(padded, rows)
        return [_unpack(row[:length]) for row, length in zip(rows or [], lengths)]

    def broadcast(self, tree: Any) -> Any:
        """Return rank 0's pytree of CPU tensors, numbers and strings on every rank. What the others pass is
        ignored."""
        if self.size == 1:
            return tree
        data = _pack(tree) if self.rank == 0 else None
        length = int(self.all_gather(0 if data is None else len(data))[0])
        data = torch.empty(length, dtype=torch.uint8) if data is None else data
        dist.broadcast(data, 0)
        return tree if self.rank == 0 else _unpack(data)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Add up a tensor over all ranks, in place: through the links of the device that it lies on."""
        if self.size > 1:
            self._enter()
            dist.all_reduce(tensor)
        return tensor


# Not torch's gather_object and broadcast_object_list, which unpickle what arrives, and so would run its code.


def _pack(tree: Any) -> Tensor:
    buffer = io.BytesIO()
    torch.save(tree, buffer)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def _unpack(data: Tensor) -> Any:
    return torch.load(io.BytesIO(data.numpy().tobytes()), map_location="cpu", weights_only=True)
