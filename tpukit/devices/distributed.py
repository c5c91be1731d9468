"""Collectives over the processes of one training, through host memory (torch.distributed's gloo).

What crosses the accelerator's own links (gradients on a TPU, or by NCCL) is up to the runtime.
"""

import torch.distributed as dist


class World:
    """This process among the `size` processes of a training. The default is a world of one.

    rank: 0 to size - 1, over all hosts; rank 0 records, saves and prints.
    Every method is collective: all ranks call it, in the same order. A tree is a nest of CPU tensors, numbers and strings.
    """

    def __init__(self, rank=0, size=1):
        self.rank, self.size = rank, size

    def all_gather(self, tree):
        """A tree from every rank -> list of them, rank by rank, on all ranks."""
        if self.size == 1:
            return [tree]
        trees = [None] * self.size
        dist.all_gather_object(trees, tree)
        return trees

    def gather(self, tree):
        """A tree from every rank -> on rank 0 the list of them, rank by rank, elsewhere []."""
        if self.size == 1:
            return [tree]
        trees = [None] * self.size if self.rank == 0 else None
        dist.gather_object(tree, trees)
        return trees or []

    def broadcast(self, tree):
        """Rank 0's tree, on every rank. What the others pass is ignored."""
        trees = [tree if self.rank == 0 else None]
        if self.size > 1:
            dist.broadcast_object_list(trees)
        return trees[0]

    def all_reduce(self, tensor):
        """Add up a CPU tensor over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor
