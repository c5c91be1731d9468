"""What a state of a loop may hold, and what is refused before it takes the place of a whole one."""

import fractions
import io
import math
import pickle
import random
from collections import OrderedDict, defaultdict

import numpy as np
import pytest
import torch

from tests.conftest import refuses
from tests.tpukit.runs.store import alike, content, steps_in
from tpukit import Checkpoints
from tpukit.runs import tensors


def test_a_state_of_any_device_comes_back_on_the_cpu(xla, tmp_path):
    saved = Checkpoints(tmp_path)
    state = OrderedDict(weight=torch.ones(2, 3, device=xla.device), names=["a", ("b", None)], lr=0.1, on=True)
    saved.save(dict(model=state, half=torch.ones(2, dtype=torch.bfloat16)), 1)
    state["weight"] = torch.ones(2, 3)
    assert alike(saved.restore(), dict(model=state, half=torch.ones(2, dtype=torch.bfloat16)))


@pytest.mark.parametrize(
    "value",
    [
        np.array([None]),
        np.ma.array([1.0, 2.0]),
        frozenset(),
        defaultdict(int),
        torch.nn.Linear(1, 1),
        len,
        lambda: 0,
        fractions.Fraction(1, 2),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_state_that_could_not_be_read_without_running_code_is_refused_before_it_takes_the_place_of_one(
    value, saved
):
    before = content(saved.folder)
    with refuses("tensors, numbers and strings", f"state['model'][1]['fn'] is a {type(value).__name__}, "):
        saved.save(dict(step=3, model=(1, OrderedDict(fn=value))), 3)
    with refuses(-1):
        saved.save({}, -1)
    assert content(saved.folder) == before


def test_a_key_that_could_not_be_read_and_a_tensor_without_values_are_named(saved):
    with refuses("a key of state['by'] is a Fraction"):
        saved.save(dict(by={fractions.Fraction(1, 2): 1}), 3)
    with refuses("state['weight'] is a meta tensor"):
        saved.save(dict(weight=torch.ones(2, device="meta")), 3)


ARRAYS = [
    np.arange(6, dtype=np.uint32).reshape(2, 3).T,
    np.array([1.5, np.nan], dtype=">f8"),
    np.array(True),
    np.zeros((0, 3), np.float16),
    np.array([1 + 2j])[::2],
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: array.dtype.str)
def test_arrays_of_numbers_come_back_as_they_were(array, saved):
    saved.save(dict(a=[array]), 3)
    [read] = saved.restore()["a"]
    assert type(read) is np.ndarray and read.dtype == array.dtype and read.shape == array.shape
    assert np.array_equal(read, array, equal_nan=array.dtype.kind == "f")
    read[...] = 0  # it can be written


def test_random_states_of_python_and_numpy_come_back(saved):
    generators = [np.random.default_rng(0), np.random.Generator(np.random.MT19937(0))]
    states = [generator.bit_generator.state for generator in generators]
    saved.save(dict(python=random.getstate(), numpy=np.random.get_state(), generators=states), 3)
    wanted = random.random(), np.random.rand(), [generator.random() for generator in generators]
    state = saved.restore()
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    for generator, its in zip(generators, state["generators"]):
        generator.bit_generator.state = its
    assert (random.random(), np.random.rand(), [generator.random() for generator in generators]) == wanted


@pytest.mark.parametrize("dtype", ["O", "V8", "(2,)O", "U2"])
def test_an_array_of_objects_in_a_file_is_refused(dtype):
    class Forged:
        def __reduce__(self):
            return tensors.to_array, (torch.zeros(8, dtype=torch.uint8), dtype, (1,))

    with pytest.raises(pickle.UnpicklingError, match="could run code"):
        file = io.BytesIO()
        torch.save(Forged(), file)
        tensors.load_tensors(io.BytesIO(file.getvalue()))


def test_the_versions_of_modules_come_back_with_their_state(saved):
    state = torch.nn.Sequential(torch.nn.BatchNorm1d(2)).state_dict()
    state._metadata["0"]["version"] = 1
    saved.save(dict(model=state), 3)
    assert saved.restore()["model"]._metadata == state._metadata


@pytest.mark.parametrize("step", [1.5, math.nan, "3", None, -1, torch.ones(2)])
def test_a_step_that_is_no_whole_number_is_refused_in_a_sentence(step, saved):
    before = content(saved.folder)
    with refuses("step=", "whole number"):
        saved.save({}, step)
    assert content(saved.folder) == before
    saved.save({}, np.int64(3))
    assert steps_in(saved.folder) == [3, 2]


def test_a_view_is_saved_without_the_rest_of_its_tensor_and_what_is_shared_stays_shared(saved):
    large = torch.arange(1e6)
    saved.save(dict(view=large[10:14], a=large[:0]), 3)
    assert (saved.folder / "checkpoints/step-00000003.pt").stat().st_size < 10_000
    assert saved.restore()["view"].tolist() == [10, 11, 12, 13]
    saved.save(dict(one=large, other=large), 4)
    assert (saved.folder / "checkpoints/step-00000004.pt").stat().st_size < 5e6
    assert torch.equal(saved.restore()["other"], large)
