"""Choose the samples of each step, and bring them to the device: stored there, or streamed."""

import collections
import concurrent.futures
import time
from collections.abc import Generator, Iterable, Iterator
from typing import Any, NamedTuple, Self

import numpy as np

from tpukit.devices.runtime import Batch, Runtime, Stored
from tpukit.host.errors import TpukitError

QUICK_S = 5e-4  # what takes less is made sooner than given to a thread
MAX_BYTES = 2**31  # of a dataset kept on a device: an eighth of the 16 GiB of a T4 or a v5e chip


class BatchSpec(NamedTuple):
    """The choices of the host for a global batch of B samples."""

    indices: np.ndarray
    """(B,) samples of the dataset"""
    numbers: np.ndarray | None = None
    """(B, num_uniforms) uniform in [0, 1), for the augmentation; None in an evaluation"""
    valid: np.ndarray | None = None
    """(B,) bool, False for padding; None in training"""

    def of_rank(self, rank: int, world_size: int) -> Self:
        """Return this rank's share: samples rank * B / W to (rank + 1) * B / W."""
        share = len(self.indices) // world_size
        part = slice(rank * share, (rank + 1) * share)
        return self._make(None if one is None else one[part] for one in self)


def training_index_batches(
    size: int, batch_size: int, *, seed: int, epoch: int, num_uniforms: int = 0, start: int = 0
) -> Iterator[BatchSpec]:
    """Yield a `BatchSpec` for every step of an epoch from step `start` on: shuffled samples, without the
    ragged tail.

    It depends on (seed, epoch, step) alone, so a resumed run draws what an uninterrupted one draws.
    """
    order = np.random.default_rng(np.random.SeedSequence((seed, epoch))).permutation(size)
    numbers = np.zeros((batch_size, 0))  # of sets that draw none, for which no generator is made
    for step in range(start, size // batch_size):
        indices = order[step * batch_size : (step + 1) * batch_size]
        if num_uniforms:
            rng = np.random.default_rng(np.random.SeedSequence((seed, epoch, step)))
            numbers = rng.random((batch_size, num_uniforms))
        yield BatchSpec(indices, numbers)


def evaluation_index_batches(size: int, batch_size: int) -> Iterator[BatchSpec]:
    """Yield a `BatchSpec` for every batch of an evaluation: each sample once, the last batch padded with
    sample 0."""
    for first in range(0, size, batch_size):
        indices = np.arange(first, first + batch_size)
        valid = indices < size
        yield BatchSpec(np.where(valid, indices, 0), valid=valid)


class BatchLoader:
    """Brings the batches of a dataset to a runtime's device.

    data: as `Task.datasets` returns it. on: "device" stores all its arrays there once, so that a batch is an
    index and a few numbers per sample; "host" makes every batch: `workers` threads do, a few ahead, once one
    takes QUICK_S (0: the calling thread); "auto" stores them on an accelerator if they take at most
    MAX_BYTES, or an eighth of a GPU that is larger; each of the devices holds them."""

    def __init__(self, data: Any, runtime: Runtime, *, on: str = "auto", workers: int = 2) -> None:
        self.data, self.runtime, self.workers = data, runtime, workers
        self.resident: dict[str, Stored] | None = None  # the dataset's arrays, if the device stores them
        self.resident_bytes = 0  # what they take of each device
        can_be_stored = hasattr(data, "device_arrays")
        if on == "device" and not can_be_stored:
            raise TpukitError(
                f"data_on='device': {type(data).__name__} only makes batches on the host; use 'auto' or"
                " 'host', or implement device_arrays, device_nbytes, sample_parameters and compose"
                " (tpukit_tasks/mnist.py has them)"
            )
        where = "batches are made on demand"
        if workers:
            where = f"up to {workers} threads prepare batches in advance"
        if can_be_stored and (on == "device" or (on == "auto" and runtime.accelerator != "cpu")):
            gpus = runtime.memory() if runtime.device.type == "cuda" else []
            limit = max([MAX_BYTES, *(total // 8 for _, total in gpus)])
            if on == "device" or data.device_nbytes() <= limit:
                self.resident = runtime.put_dataset(data.device_arrays())
                self.resident_bytes = sum(stored.rows.nbytes for stored in self.resident.values())  # padded
                where = f"{self.resident_bytes / 2**20:.0f} MiB on the device: a batch is an index"
            else:
                where += f", because more than {limit / 2**20:.0f} MiB would take too much of the device"
        self.description = f"{len(data)} samples, {where}"

    def batches(self, plan: Iterable[BatchSpec]) -> Generator[Batch, None, None]:
        """Make this rank's share of the batches of a plan and put them on the device in order.

        Yields dicts of tensors, to be given to `compose` in a compiled function. All ranks together see what
        one device would."""
        # For an index and a few numbers, threads would only compete for the interpreter.
        uses_threads, plan = self.workers > 0 and self.resident is None, iter(plan)
        for spec in plan:
            started = time.perf_counter()
            arrays = self._make(spec)
            is_quick = time.perf_counter() - started < QUICK_S
            yield self.runtime.put_batch(arrays)
            if uses_threads and not is_quick:
                break
        else:
            return
        pool = concurrent.futures.ThreadPoolExecutor(self.workers, thread_name_prefix="batches")
        pending = collections.deque()
        try:
            for spec in plan:
                pending.append(pool.submit(self._make, spec))
                if len(pending) > 2 * self.workers:
                    yield self.runtime.put_batch(pending.popleft().result())
            while pending:
                yield self.runtime.put_batch(pending.popleft().result())
        finally:
            pool.shutdown(cancel_futures=True)

    def _make(self, spec: BatchSpec) -> dict[str, np.ndarray]:
        """Return what goes to the device for this rank's share of a batch: dict of numpy arrays."""
        indices, numbers, valid = spec.of_rank(self.runtime.world.rank, self.runtime.world.size)
        if self.resident is None:
            batch = self.data.batch(indices, numbers)
        else:
            batch = dict(self.data.sample_parameters(indices, numbers), index=np.asarray(indices, np.int64))
        if hasattr(self.data, "shares"):  # of all ranks' samples
            first = self.runtime.world.rank * len(indices)
            batch = {**batch, "share": self.data.shares(spec.indices)[first : first + len(indices)]}
        return batch if valid is None else {**batch, "valid": valid}

    def compose(self, batch: Batch) -> Batch:
        """Complete a batch that `batches` put on the device. Call it in a compiled function."""
        if self.resident is None:
            return batch
        rows = {name: stored.take(batch["index"]) for name, stored in self.resident.items()}
        kept = {name: batch[name] for name in ("valid", "share") if name in batch}
        parameters = {name: values for name, values in batch.items() if name not in ("index", *kept)}
        return self.data.compose(rows, parameters) | kept


def identity(batch: Batch) -> Batch:
    """Return a batch as it is, in place of `BatchLoader.compose`."""
    return batch
