"""Which samples a step gets, and how they reach the device."""

import itertools
import threading
import types

import numpy as np
import pytest
import torch

from tests.conftest import refuses
from tpukit import CDEIT, MNIST, ImageClassifier, MSHNet
from tpukit.training.data import BatchLoader, BatchSpec, evaluation_index_batches, training_index_batches


def test_an_epoch_sees_every_sample_once_and_drops_only_the_tail():
    epochs = [training_index_batches(23, 5, seed=1, epoch=epoch) for epoch in (0, 1)]
    seen, other = (np.concatenate([indices for indices, _, _ in plan]) for plan in epochs)
    assert len(seen) == 20 == len(set(seen)) and not np.array_equal(seen, other)


def test_a_plan_started_in_the_middle_equals_the_rest_of_the_whole_one():
    whole = list(training_index_batches(40, 4, seed=3, epoch=2, num_uniforms=6))
    rest = list(training_index_batches(40, 4, seed=3, epoch=2, num_uniforms=6, start=7))
    for (a, b, _), (c, d, _) in itertools.zip_longest(whole[7:], rest):
        assert np.array_equal(a, c) and np.array_equal(b, d)


def test_two_seeds_give_two_orders_and_two_augmentations_and_one_seed_the_same_ones():
    plans = [list(training_index_batches(40, 4, seed=seed, epoch=0, num_uniforms=6)) for seed in (3, 4, 3)]
    for first, other, again in zip(*plans):
        assert not np.array_equal(first.indices, other.indices)
        assert not np.intersect1d(first.numbers, other.numbers).size
        assert np.array_equal(first.numbers, again.numbers)


@pytest.mark.parametrize("size, batch", [(10, 4), (8, 4), (3, 8), (1, 1)])
def test_an_evaluation_sees_every_sample_once_in_batches_of_one_shape(size, batch):
    plan = list(evaluation_index_batches(size, batch))
    assert all(len(indices) == batch for indices, _, _ in plan)
    assert np.concatenate([indices[valid] for indices, _, valid in plan]).tolist() == list(range(size))


@pytest.mark.parametrize(
    "workers, quick_s, has_threads", [(0, 0, False), (1, 0, True), (3, 0, True), (3, 60, False)]
)
def test_batches_come_in_order_and_threads_make_those_that_take_long(
    workers, quick_s, has_threads, cpu, monkeypatch
):
    monkeypatch.setattr("tpukit.training.data.QUICK_S", quick_s)
    made_by = []

    class Numbers:
        def batch(self, indices, numbers=None):
            made_by.append(threading.current_thread())
            return dict(number=indices, sum=numbers.sum(1))

        def __len__(self):
            return 40

    plan = list(training_index_batches(40, 4, seed=0, epoch=0, num_uniforms=2))
    batches = BatchLoader(Numbers(), cpu, workers=workers).batches(plan)
    first, here = next(batches), threading.current_thread()
    assert made_by == [here], "one, when it is due"
    for batch, spec in itertools.zip_longest([first, *batches], plan):
        assert np.array_equal(batch["number"], spec.indices)
        assert np.array_equal(batch["sum"], spec.numbers.sum(1))
    assert (here not in made_by[1:]) == has_threads


KINDS = {
    "mnist": (MNIST, "digits", {}),
    "mshnet": (MSHNet, "infrared", dict(base_size=64, crop_size=64)),
    "cdeit": (CDEIT, "tank", {}),
    "images": (ImageClassifier, "shapes", dict(image_size=32)),
}


@pytest.mark.parametrize("name", KINDS)
def test_pixels_on_the_device_make_the_batches_of_the_host(name, xla, request):
    kind, folder, settings = KINDS[name]
    task = kind(dataset_dir=request.getfixturevalue(folder), **settings)
    for data, numbers in zip(task.datasets(), (np.random.default_rng(0).random((4, 8)), None)):
        numbers = numbers if numbers is None else numbers[:, : data.num_uniforms]
        valid = None if numbers is not None else np.array([True, True, True, False])
        plan = [BatchSpec(np.array([3, 0, 2, 2]), numbers, valid)]
        there, here = BatchLoader(data, xla), BatchLoader(data, xla, on="host")
        assert there.resident and not here.resident
        found, wanted = (xla.to_cpu(one.compose(next(one.batches(plan)))) for one in (there, here))
        assert found.keys() == wanted.keys()
        for array in wanted:
            # On the host PIL rounds after each pass: two of a resizing, and six of a blur that share a level.
            grey_levels = 3 if (name, array) == ("mshnet", "image") else 0
            torch.testing.assert_close(found[array].float(), wanted[array].float(), atol=grey_levels, rtol=0)


def test_a_batch_that_is_an_index_is_made_by_the_thread_that_asks(digits, cpu, monkeypatch):
    data, made_by = MNIST(dataset_dir=digits).datasets()[0], []
    make = data.sample_parameters
    monkeypatch.setattr(
        data, "sample_parameters", lambda *chosen: made_by.append(threading.current_thread()) or make(*chosen)
    )
    loader = BatchLoader(data, cpu, on="device", workers=2)
    list(loader.batches(training_index_batches(len(data), 50, seed=0, epoch=0, num_uniforms=2)))
    assert made_by == [threading.current_thread()] * (len(data) // 50)


def test_a_set_is_streamed_where_it_would_take_too_much_of_the_device_and_the_loader_says_so(
    digits, xla, cpu, monkeypatch
):
    data = MNIST(dataset_dir=digits).datasets()[0]
    monkeypatch.setattr(data, "device_nbytes", lambda: 2**31)
    assert "on the device: a batch is an index" in BatchLoader(data, xla).description
    monkeypatch.setattr(data, "device_nbytes", lambda: 2**31 + 1)
    loader = BatchLoader(data, xla)
    assert loader.resident is None and "because more than" in loader.description
    assert "2 threads prepare batches" in loader.description
    monkeypatch.setattr(xla, "memory", lambda: [(0, 80 * 2**30)])
    assert BatchLoader(data, xla).resident is None
    monkeypatch.setattr(xla, "put_dataset", lambda arrays: {})
    monkeypatch.setattr(xla, "device", torch.device("cuda"))  # of which it takes an eighth
    assert BatchLoader(data, xla).resident == {}
    monkeypatch.setattr(data, "device_nbytes", lambda: 10 * 2**30 + 1)
    assert "because more than 10240 MiB" in BatchLoader(data, xla).description
    monkeypatch.undo()
    assert BatchLoader(data, cpu).resident is None  # the host's memory is the device's
    plain = types.SimpleNamespace(batch=data.batch, __len__=data.__len__)
    with refuses("data_on='device'", "device_arrays, device_nbytes, sample_parameters and compose"):
        BatchLoader(plain, xla, on="device")
