"""Sets on disk, and the statistics of their voltages."""

import os
import shutil

import numpy as np
import pytest
import torch

from tests.conftest import refuses
from tests.tasks.cdeit.small import task_of
from tpukit_tasks.cdeit.data import read_voltages, voltage_map


def test_a_batch_holds_images_maps_times_and_keys(tank):
    data, test_data = task_of(tank).datasets()
    assert (len(data), len(test_data)) == (21, 5)
    batch = data.batch(np.array([2, 9]), np.array([[0.25, 0.999], [0.5, 0.0]]))
    assert batch["t"].tolist() == [999, 0] and batch["key"].tolist() == [2**38, 2**39]
    with np.load(tank / "train/000009.npz") as sample:
        assert np.array_equal(batch["image"][1, 0], sample["xs"])
        mean, deviation = data.statistics
        assert np.array_equal(batch["voltages"][1], voltage_map(sample["ys"].T, mean, deviation)[0])
    normal = np.concatenate([data.batch(np.arange(21))["voltages"]])
    filled = normal[:, 0, np.arange(16), (np.arange(16) + 5) % 16]
    assert abs(filled.mean()) < 1e-4 and filled.std() == pytest.approx(1, abs=1e-3)
    assert not normal[:, 0, np.arange(16), (np.arange(16) + 1) % 16].any()


def save_statistics(folder, mean, deviation=1.0):
    for name, value in (("mean.pth", mean), ("std.pth", deviation)):
        torch.save(torch.full((1, 16, 13), value), folder / name)


def test_statistics_are_read_next_to_the_split_or_computed(tank, tmp_path):
    for split in ("train", "test"):
        (tmp_path / split).symlink_to(tank / split)
    task = task_of(tmp_path)
    volts = np.stack([np.load(path)["ys"].reshape(16, 13) for path in (tank / "train").glob("*.npz")])
    data, test_data = task.datasets()
    for one in (data, test_data):
        assert f"computed from the training set in {tmp_path}" in one.notes
        assert np.allclose(one.statistics, [volts.mean(0), volts.std(0)], rtol=1e-4)
    save_statistics(tmp_path, 3.0)
    data, _ = task.datasets()
    assert (data.statistics[0] == 3.0).all() and f"mean.pth and std.pth of {tmp_path}" in data.notes
    (tmp_path / "mean.pth").unlink()  # half of a pair is none
    assert "computed" in task.datasets()[0].notes


def test_statistics_of_a_sample_with_nan_are_refused_and_those_that_are_there_not_used(tank, tmp_path):
    root = shutil.copytree(tank, tmp_path / "eit")
    sample = root / "train/000003.npz"
    with np.load(sample) as file:
        np.savez(sample, **{**file, "ys": np.full((208, 1), np.nan, np.float32)})
    with refuses(root / "train", "NaN"):
        task_of(root).datasets()
    assert not list(root.glob("*.pth"))
    for mean, deviation, told in ((np.nan, 1.0, "mean.pth"), (0.0, 0.0, "std.pth")):
        save_statistics(root, mean, deviation)
        with refuses(root / told):
            task_of(root).datasets()


def test_real_sets_are_in_their_own_units(uef2017, tmp_path):
    (tmp_path / "test2017").symlink_to(uef2017 / "test")
    for name in ("mean.pth", "std.pth"):
        (tmp_path / name).symlink_to(uef2017 / name)
    data = task_of(tmp_path, data="uef2017").test_set()
    assert len(data) == 22
    truth = data.batch(np.arange(22))["image"][:, 0]
    of_empty = np.mean(np.sqrt((truth**2).mean((1, 2))))
    assert of_empty == pytest.approx(0.253, abs=5e-4)  # as published


@pytest.mark.parametrize(
    "xs, ys, told",
    [
        (None, None, "bad.npz"),
        ((128, 128), None, "'ys'"),
        ((2, 128, 128), (208,), "xs has shape (2, 128, 128), not (128, 128)"),
        ((128, 128), (208, 2), "ys has shape (208, 2), not (208,)"),
    ],
)
def test_a_file_that_is_no_sample_is_named_with_what_is_wrong(tmp_path, xs, ys, told):
    path = tmp_path / "train/bad.npz"
    path.parent.mkdir()
    np.savez(path, **{name: np.zeros(shape) for name, shape in dict(xs=xs, ys=ys).items() if shape})
    if xs is None:
        path.write_bytes(b"not a zip")
    with refuses("bad.npz", told):
        task_of(tmp_path).datasets()


def test_a_folder_without_a_training_set_is_refused_with_what_is_there(uef2017, tmp_path):
    (tmp_path / "other").mkdir()
    with refuses("other, not train/", "xs", "tpukit simulate eit"):
        task_of(tmp_path).datasets()
    (tmp_path / "test2023").mkdir()
    (tmp_path / "test2023/data1.mat").touch()
    save_statistics(tmp_path, 0.0)
    with refuses("data1.mat", "xs", "ys"):
        task_of(tmp_path, data="ktc2023").test_set()
    with refuses("test2017/", "npz"):  # the files of a test set themselves are none
        task_of(uef2017 / "test", data="uef2017").test_set()


VOLTS = np.random.default_rng(0).normal(size=(2, 208)).astype(np.float32)
SPREADSHEET = "\ufeff" + "\n".join(",".join(map(str, row)) for row in VOLTS)
READ = {
    "spreadsheet.csv": (lambda path: path.write_text(SPREADSHEET, "utf-8"), VOLTS),
    "patterns.npy": (lambda path: np.save(path, VOLTS.reshape(2, 16, 13)), VOLTS),
    "samples.npz": (lambda path: np.savez(path, ys=VOLTS), VOLTS),
    "rows.txt": (lambda path: np.savetxt(path, VOLTS), VOLTS),
    "column.txt": (lambda path: np.savetxt(path, VOLTS[0]), VOLTS[:1]),
    "matrix.txt": (lambda path: np.savetxt(path, VOLTS[0].reshape(16, 13), delimiter="\t"), VOLTS[:1]),
}


@pytest.mark.parametrize("name", READ)
def test_voltages_are_read_from_every_kind_of_file(name, tmp_path):
    write, volts = READ[name]
    write(tmp_path / name)
    assert np.allclose(read_voltages(tmp_path / name), volts, rtol=1e-6)


class Evil:
    def __reduce__(self):
        return os.mkdir, ("executed",)


REFUSED = {
    "complex.npy": lambda path: np.save(path, VOLTS + 1j),
    "nan.npy": lambda path: np.save(path, VOLTS * np.nan),
    "large.npy": lambda path: np.save(path, np.full(208, 1e300)),
    "shape.npy": lambda path: np.save(path, VOLTS[:, 1:]),
    "columns.csv": lambda path: path.write_text("1,2,3\n" * 208),  # read by rows, all samples would be mixed
    "empty.npy": lambda path: np.save(path, VOLTS[:0]),
    "words.txt": lambda path: path.write_text("no numbers"),
    "binary.csv": lambda path: path.write_bytes(b"\xff\xfe\x00" * 99),
    "other.npz": lambda path: np.savez(path, xs=VOLTS),
    "dead.npy": lambda path: np.save(path, np.zeros(208)),
    "stuck.csv": lambda path: np.savetxt(path, np.vstack([VOLTS, np.full((1, 208), 0.7)]), delimiter=","),
    "evil.npy": lambda path: np.save(path, np.array([Evil()] * 208, object), allow_pickle=True),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_without_voltages_is_refused_by_its_name_and_no_code_of_it_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    REFUSED[name](tmp_path / name)
    with refuses(name, "208 finite numbers"), np.errstate(over="ignore"):
        read_voltages(tmp_path / name)
    assert not (tmp_path / "executed").exists()


def test_both_classical_images_of_ktc2023_are_in_the_unit_of_the_truth(tmp_path):
    """As in the published files, both are 2/1978 times smaller than the truth; here they are the truth."""
    rng = np.random.default_rng(0)
    (tmp_path / "test2023").mkdir()
    truth = rng.random((128, 128), np.float32)
    small = truth * np.float32(2 / 1978)
    np.savez(tmp_path / "test2023/0.npz", xs=truth, ys=rng.random(208, np.float32), TR=small, xs_gn=small)
    save_statistics(tmp_path, 0.0)
    batch = task_of(tmp_path, data="ktc2023").test_set().batch(np.arange(1))
    for name in ("TR", "xs_gn"):
        assert np.allclose(batch[name][0], truth, rtol=1e-5)


def silent(voltages, noise):
    def change(folder):
        path = min((folder / "test").glob("*.npz"))
        sample = dict(np.load(path))
        sample["ys"][voltages] *= noise
        np.savez(path, **sample)

    return change


def scaled(name, factor, count=None):
    def change(folder):
        for path in sorted((folder / "test").glob("*.npz"))[:count]:
            sample = dict(np.load(path))
            np.savez(path, **sample | {name: sample[name] * np.float32(factor)})

    return change


@pytest.mark.parametrize(
    "change, told",
    [
        (lambda folder: None, None),
        (lambda folder: (folder / "test/._000001.npz").write_bytes(b"of macOS"), None),
        (scaled("ys", 1040), "test: its voltages are"),
        (scaled("xs", 2 / 1978), "test: its images have values up to 0.00101"),
        (
            lambda folder: shutil.copy(folder / "train/000003.npz", folder / "test"),
            "1 of 5 test samples are training samples, too (000003)",
        ),
        (
            silent(slice(0, 13), 1e-9),
            "test: 1 of 5 samples have drive patterns whose voltages are all equal, so nothing",
        ),
        (scaled("ys", 15, 1), "test: 1 of 5 samples have voltages over 10 times as large"),
        (lambda folder: (folder / "test/more.mat").touch(), "1 files are not npz, and are not read (more"),
    ],
)
def test_another_unit_copies_and_other_files_are_told(change, told, tank, tmp_path):
    folder = shutil.copytree(tank, tmp_path / "set")
    change(folder)
    train, test = task_of(folder).datasets()
    notices = train.notices + test.notices
    assert len(notices) == (told is not None) and all(told in notice for notice in notices)


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_sample_of_a_dead_device_is_refused_by_its_file(split, tank, tmp_path):
    folder = shutil.copytree(tank, tmp_path / "set")
    silent_sample = min((folder / split).glob("*.npz"))
    sample = dict(np.load(silent_sample))
    np.savez(silent_sample, **sample | dict(ys=np.zeros_like(sample["ys"])))
    with refuses(silent_sample.name, "0 in all 208 voltages, which is no measurement"):
        task_of(folder).datasets()


def test_matlabs_voltages_are_answered_with_how_to_save_them_otherwise(tmp_path):
    (tmp_path / "v.MAT").write_bytes(b"MATLAB 5.0 MAT-file\xb0")
    with refuses("v.MAT", "numpy.save('v.npy', scipy.io.loadmat("):
        read_voltages(tmp_path / "v.MAT")
