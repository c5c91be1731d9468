"""Which samples, in which order, and how they reach the device: lying there, or streamed."""

import collections
import concurrent.futures

import numpy as np

from tpukit.host.errors import TpukitError

DATA_ON = ("auto", "device", "host")
SHARE = 8  # a set may take this part of a device's memory


def training_plan(size, batch_size, *, seed, epoch, num_draws=0, start=0):
    """Yield (indices, numbers, None) for every step of an epoch from step `start` on.

    indices: (B,) samples, shuffled; the ragged tail is dropped. numbers: (B, num_draws) uniform in [0, 1) for the
    augmentation. Both depend on (seed, epoch, step) alone, so a resumed run draws what a straight one draws.
    """
    order = np.random.default_rng(np.random.SeedSequence((seed, epoch))).permutation(size)
    for step in range(start, size // batch_size):
        rng = np.random.default_rng(np.random.SeedSequence((seed, epoch, step)))
        yield order[step * batch_size : (step + 1) * batch_size], rng.random((batch_size, num_draws)), None


def evaluation_plan(size, batch_size):
    """Yield (indices, None, valid): every sample once, the last batch padded with sample 0 where `valid` is False."""
    for first in range(0, size, batch_size):
        indices = np.arange(first, first + batch_size)
        valid = indices < size
        yield np.where(valid, indices, 0), None, valid


class BatchLoader:
    """A dataset on its way to a runtime's device.

    data: as `Workload.datasets` says. on: "device" puts all its pixels there once, so that a batch is an index and a few
    numbers a sample; "host" makes every batch on `workers` threads, a few ahead; "auto" takes the device where it is an
    accelerator and the pixels take at most an eighth of its memory, whole or in parts on the cores of this process.
    `description`: which way, and the sizes. `bytes_a_core`: what lies on each of its devices.
    """

    def __init__(self, data, runtime, *, on="auto", workers=2):
        self.data, self.runtime, self.workers = data, runtime, workers
        self.resident = None
        able = hasattr(data, "device_arrays")
        if on not in DATA_ON:
            raise TpukitError(f"data_on={on!r}: choose one of {', '.join(DATA_ON)}")
        if on == "device" and not able:
            raise TpukitError(
                f"data_on='device': {type(data).__name__} only makes batches on the host; use 'auto' or 'host', or implement "
                "device_arrays, device_nbytes, sample_parameters and compose (tpukit/workloads/mnist.py has them)"
            )
        room = runtime.memory_size() // SHARE if able else 0
        size = data.device_nbytes() if able else 0
        sharded = size > room and runtime.shards > 1
        self.bytes_a_core = 0
        if on == "device" or able and on == "auto" and runtime.accelerator != "cpu" and size <= room * runtime.shards:
            self.resident = runtime.put_whole(data.device_arrays(), sharded=sharded)
            self.bytes_a_core = size // runtime.shards if sharded else size
        how = f"{workers} threads make the batches" if workers else "batches are made between the steps"
        if self.resident is not None:
            how = f"on the device, {f'a part on each of {runtime.shards} cores' if sharded else 'whole'}: a batch is an index"
        elif able and on == "auto" and runtime.accelerator != "cpu":
            how += f", because more than {_mib(room)} of pixels would crowd the device"
        self.description = f"{len(data)} samples{f', {_mib(size)} of pixels' if able else ''}, {how}"

    def batches(self, plan):
        """Make this rank's share of the batches of a plan, a few ahead, and put them on the device in order.

        Yields dicts of tensors, to be given to `compose` within a program; evaluation batches carry `valid`: (B,) bool. Rank r
        of W takes samples r * B / W to (r + 1) * B / W of every global batch, so that all ranks together see what one device
        would see, and make the same number of steps.
        """
        world, put = self.runtime.world, self.runtime.put_batch

        def make(step):
            indices, numbers, valid = step
            share = len(indices) // world.size
            mine = slice(world.rank * share, (world.rank + 1) * share)
            indices, numbers = indices[mine], None if numbers is None else numbers[mine]
            if self.resident is None:
                batch = self.data.batch(indices, numbers)
            else:
                batch = dict(self.data.sample_parameters(indices, numbers), index=np.asarray(indices, np.int64))
            return batch if valid is None else {**batch, "valid": valid[mine]}

        if self.workers == 0:
            for step in plan:
                yield put(make(step))
            return
        waiting = collections.deque()
        with concurrent.futures.ThreadPoolExecutor(self.workers, thread_name_prefix="batches") as pool:
            try:
                for step in plan:
                    waiting.append(pool.submit(make, step))
                    if len(waiting) > 2 * self.workers:
                        yield put(waiting.popleft().result())
                while waiting:
                    yield put(waiting.popleft().result())
            finally:
                for future in waiting:
                    future.cancel()

    def compose(self, batch):
        """What the workload gets, from what `batches` put on the device. To be called within a program."""
        if self.resident is None:
            return batch
        parameters = dict(batch)
        index = parameters.pop("index")
        valid = {"valid": parameters.pop("valid")} if "valid" in parameters else {}
        rows = {name: values.index_select(0, index) for name, values in self.resident.items()}
        return self.data.compose(rows, parameters) | valid


def _mib(size):
    return f"{size / 2**20:.0f} MiB"
