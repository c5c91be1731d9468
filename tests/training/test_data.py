"""Which samples a step gets, and how they reach the device."""

import itertools
import threading
import types

import numpy as np
import pytest
import torch

from tpukit import CDEIT, MNIST, ImageClassifier, MSHNet, TpukitError
from tpukit.training.data import BatchLoader, BatchSpec, evaluation_index_batches, training_index_batches


def test_an_epoch_sees_every_sample_once_and_drops_only_the_tail():
    seen = np.concatenate([indices for indices, _, _ in training_index_batches(23, 5, seed=1, epoch=0)])
    assert len(seen) == 20 == len(set(seen))
    other = np.concatenate([indices for indices, _, _ in training_index_batches(23, 5, seed=1, epoch=1)])
    assert not np.array_equal(seen, other)


def test_a_plan_started_in_the_middle_equals_the_rest_of_the_whole_one():
    whole = list(training_index_batches(40, 4, seed=3, epoch=2, num_uniforms=6))
    rest = list(training_index_batches(40, 4, seed=3, epoch=2, num_uniforms=6, start=7))
    for (a, b, _), (c, d, _) in itertools.zip_longest(whole[7:], rest):
        assert np.array_equal(a, c) and np.array_equal(b, d)


@pytest.mark.parametrize("size, batch", [(10, 4), (8, 4), (3, 8), (1, 1)])
def test_an_evaluation_sees_every_sample_once_in_batches_of_one_shape(size, batch):
    plan = list(evaluation_index_batches(size, batch))
    assert all(len(indices) == batch for indices, _, _ in plan)
    assert np.concatenate([indices[valid] for indices, _, valid in plan]).tolist() == list(range(size))


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_batches_come_in_order_whatever_the_number_of_workers(workers, infrared, cpu):
    data, _ = MSHNet(dataset_dir=infrared, base_size=32, crop_size=32).datasets()
    plan = lambda: training_index_batches(len(data), 2, seed=0, epoch=0, num_uniforms=data.num_uniforms)  # noqa: E731
    wanted = [data.batch(indices, numbers)["image"] for indices, numbers, _ in plan()]
    got = [batch["image"].numpy() for batch in BatchLoader(data, cpu, workers=workers).batches(plan())]
    assert len(got) == 8 and all(np.array_equal(a, b) for a, b in zip(wanted, got))


@pytest.mark.parametrize("workers", [0, 2])
def test_without_workers_the_thread_that_asks_for_a_batch_makes_it_then_and_not_before(workers, cpu):
    made_by = []

    class Numbers:
        def batch(self, indices, numbers=None):
            made_by.append(threading.current_thread())
            return dict(number=indices)

        def __len__(self):
            return 40

    batches = BatchLoader(Numbers(), cpu, workers=workers).batches(
        training_index_batches(40, 4, seed=0, epoch=0)
    )
    next(batches)
    if workers:
        batches.close()
        assert threading.current_thread() not in made_by
    else:
        assert made_by == [threading.current_thread()]


@pytest.mark.parametrize("kind", ["mnist", "mshnet", "cdeit", "images"])
def test_pixels_on_the_device_make_the_batches_of_the_host(kind, digits, infrared, tank, shapes, xla):
    tasks = dict(
        mnist=MNIST(dataset_dir=digits), mshnet=MSHNet(dataset_dir=infrared, base_size=64, crop_size=64)
    )
    tasks |= dict(images=ImageClassifier(dataset_dir=shapes, image_size=32))
    task = tasks.get(kind) or CDEIT(dataset_dir=tank)
    for data, numbers in zip(task.datasets(), (np.random.default_rng(0).random((4, 8)), None)):
        numbers = numbers if numbers is None else numbers[:, : data.num_uniforms]
        valid = None if numbers is not None else np.array([True, True, True, False])
        plan = [BatchSpec(np.array([3, 0, 2, 2]), numbers, valid)]
        there, here = BatchLoader(data, xla), BatchLoader(data, xla, on="host")
        assert there.resident and not here.resident
        found, wanted = (
            {k: v.cpu() for k, v in one.compose(next(one.batches(plan))).items()} for one in (there, here)
        )
        assert found.keys() == wanted.keys()
        for name in wanted:
            torch.testing.assert_close(
                found[name].float(),
                wanted[name].float(),
                atol=0.51 if kind == "mshnet" and name == "image" else 0,
                rtol=0,
            )


def test_a_set_is_streamed_where_it_would_take_too_much_of_the_device_and_the_loader_says_so(
    digits, xla, cpu, monkeypatch
):
    data = MNIST(dataset_dir=digits).datasets()[0]
    size = xla.whole_nbytes(data.device_arrays())
    assert "on the device, whole: a batch is an index" in BatchLoader(data, xla).description
    monkeypatch.setattr(type(xla), "memory_size", lambda self: 8 * size - 1)
    loader = BatchLoader(data, xla)
    assert (
        loader.resident is None
        and "because more than" in loader.description
        and "2 threads make the batches" in loader.description
    )
    assert BatchLoader(data, xla, on="device").resident
    assert BatchLoader(data, cpu).resident is None  # the host's memory is the device's
    plain = types.SimpleNamespace(batch=data.batch, __len__=data.__len__)
    with pytest.raises(
        TpukitError, match="data_on='device'.*device_arrays, device_nbytes, sample_parameters and compose"
    ):
        BatchLoader(plain, xla, on="device")
    with pytest.raises(TpukitError, match="data_on='gpu': choose one of auto, device, host"):
        BatchLoader(data, xla, on="gpu")


def test_a_set_lies_whole_on_each_core_or_in_parts_and_is_never_whole_where_only_parts_fit(
    digits, cpu, monkeypatch
):
    data, asked = MNIST(dataset_dir=digits).datasets()[0], []
    size = cpu.whole_nbytes(data.device_arrays())
    put_dataset = lambda arrays, sharded: asked.append(sharded) or arrays  # noqa: E731
    for name, value in dict(accelerator="xla", shards=8, put_dataset=put_dataset).items():
        monkeypatch.setattr(cpu, name, value, raising=False)
    for share, on, resident, parts in (
        (1.0, "auto", True, False),
        (0.5, "auto", True, True),
        (0.1, "auto", False, False),
        (0.5, "device", True, True),
        (0.1, "device", True, True),
        (1.0, "host", False, False),
    ):
        monkeypatch.setattr(cpu, "memory_size", lambda share=share: 8 * int(share * size + 1))
        loader = BatchLoader(data, cpu, on=on)
        assert (loader.resident is not None, loader.bytes_per_core) == (
            resident,
            size // (8 if parts else 1) * resident,
        )
        assert not resident or asked.pop() == parts
        assert ("sharded over 8 cores" in loader.description) == parts
