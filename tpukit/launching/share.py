"""The part of a dataset that one core trains on: `core.share(dataset, batch_size)`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from torch.utils.data import DataLoader, DistributedSampler

from tpukit.host.errors import TpukitError

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from tpukit.devices.distributed import World

Sample = TypeVar("Sample", covariant=True)


class Share(DataLoader[Sample]):
    """Batches of one core, all of one shape. The cores together take those that one core alone would.

        for images, labels in loader.epoch(3):
            ...

    An order depends on the seed and the epoch alone, so a resumed loop sees the one that it would have.

    world: of the cores. The other arguments are those of `Core.share`."""

    left_out: int
    """Number of samples that are left out of each epoch."""

    def __init__(
        self,
        dataset: Dataset[Sample],
        batch_size: int,
        world: World,
        shuffle: bool,
        seed: int,
        **options: Any,
    ):
        if not hasattr(dataset, "__len__"):
            raise TpukitError(
                f"core.share needs a dataset with a length, not {type(dataset).__name__}: cores that each"
                " read a stream would take different numbers of batches"
            )
        size = len(dataset)  # pyright: ignore[reportArgumentType]
        if batch_size < 1 or batch_size % world.size or size < batch_size:
            raise TpukitError(
                f"batch_size={batch_size}: it is shared by all cores, so it must be a multiple of"
                f" {world.size}, and at most {size}, the number of samples"
            )
        self.left_out = size % batch_size
        self.order: Any = DistributedSampler(
            dataset, world.size, world.rank, shuffle=shuffle, seed=seed, drop_last=True
        )
        super().__init__(  # pyright: ignore[reportUnknownMemberType]
            dataset, batch_size // world.size, sampler=self.order, drop_last=True, **options
        )

    def epoch(self, number: int) -> Share[Sample]:
        """Return the batches of an epoch, in its order.

        Args:
            number: of the epoch. Each has another order."""
        self.order.set_epoch(number)
        return self
