"""Sets for electrical impedance tomography on disk: a folder of npz files for every split, and the statistics of the voltages.

A file holds xs, a conductivity image (128, 128), and ys, 208 voltages; test files also xs_gn and TR, the images of two
classical methods. One file may hold several samples, along a first axis. The conventions are those of the published code.
"""

import functools
from pathlib import Path

import numpy as np

from tpukit.host import arrays, files
from tpukit.host.errors import TpukitError
from tpukit.runs import weights
from tpukit.workloads.cdeit.diffusion import STEPS

ELECTRODES = 16
SIZE = 128  # of the images
FALLBACK = Path("data")
KEY_DRAW, TIME_DRAW = 0, 1


class Convention:
    """How a set is written down: the names of its folders, and the constants V and I of its tank.

    The network sees ys / V. A prediction is saved as prediction * I / V, the `unit`, and so TR stands in the files.
    """

    def __init__(self, folders, volts, current):
        self.folders, self.volts, self.unit = folders, volts, current / volts


CONVENTIONS = dict(
    simulated=Convention(("test", "valid", "val"), 1.0, 1.0),
    uef2017=Convention(("data2017", "test2017"), 1040.856, 2.0),
    ktc2023=Convention(("data2023", "test2023"), 1978.0, 2.0),
)
TRAINING = Convention(("train",), 1.0, 1.0)
PARTS = tuple(name for convention in (TRAINING, *CONVENTIONS.values()) for name in convention.folders)


class Impedance:
    """One split, read once into arrays that all processes of a host share.

    `batch(indices, numbers)` -> dict of image (B, 1, 128, 128) float32, voltages (B, 1, 16, 16) float32, key (B,) int64 for
    the noise; with numbers (B, 2) in [0, 1) also t (B,) int64, the timestep; without, TR and xs_gn (B, 128, 128) float32.
    `notes`: a sentence about where its statistics come from.
    """

    num_draws = 2

    def __init__(self, folder, convention, statistics, notes="", *, baselines):
        self.convention, self.statistics, self.notes = convention, statistics, notes
        key = [baselines, arrays.content_key(folder, like=("*.npz",))]
        read = arrays.mapped(f"eit-{folder.name}", key, functools.partial(_read_split, folder, baselines))
        self.names, self.images, self.volts = read["names"], read["xs"], read["ys"]
        self.linear = {name: read[name] for name in ("TR", "xs_gn") if baselines}

    def __len__(self):
        return len(self.images)

    def batch(self, indices, numbers=None):
        rows = self._rows(indices)
        if numbers is not None:
            rows = {name: rows[name] for name in ("image", "voltages")}
        return rows | self.sample_parameters(indices, numbers)

    def _rows(self, chosen):
        volts = self.volts[chosen] / np.float32(self.convention.volts)
        scale = dict(TR=1 / self.convention.unit, xs_gn=1.0)
        linear = {name: values[chosen] * np.float32(scale[name]) for name, values in self.linear.items()}
        return dict(image=self.images[chosen][:, None], voltages=voltage_map(volts, *self.statistics), **linear)

    # On the device

    def device_nbytes(self):
        return self.images.nbytes * (1 + len(self.linear))

    def device_arrays(self):
        return self._rows(slice(None))

    def sample_parameters(self, indices, numbers=None):
        if numbers is None:
            return dict(key=np.asarray(indices, np.int64))
        key = (numbers[:, KEY_DRAW] * 2**40).astype(np.int64)
        return dict(key=key, t=(numbers[:, TIME_DRAW] * STEPS).astype(np.int64))

    def compose(self, rows, parameters):
        return rows | parameters


def voltage_map(volts, mean, deviation):
    """(B, 208) voltages -> (B, 1, 16, 16) normalised map: row r is the drive pattern, zero at the columns r - 1, r, r + 1.

    mean, deviation: (16, 13) each.
    """
    normal = (volts.reshape(-1, ELECTRODES, ELECTRODES - 3) - mean) / deviation
    out = np.zeros((len(volts), ELECTRODES, ELECTRODES), np.float32)
    out[:, _FILLED] = normal.reshape(len(volts), -1)
    return out[:, None]


_OFFSET = (np.arange(ELECTRODES)[None] - np.arange(ELECTRODES)[:, None]) % ELECTRODES
_FILLED = (_OFFSET > 1) & (_OFFSET < ELECTRODES - 1)  # (16, 16), 208 true


# Reading


def find_split(root, convention, what):
    """The folder of a split below root: under one of the convention's names, or root itself where that holds a test set's
    files.

    Raises TpukitError naming the folders that were looked for.
    """
    root = Path(root)
    for folder in [root / name for name in convention.folders]:
        if folder.is_dir():
            return folder
    if convention is not TRAINING and any(root.glob("*.npz")):
        return root
    there = ", ".join(sorted(p.name for p in root.iterdir() if p.is_dir())) if root.is_dir() else ""
    raise TpukitError(
        f"no {what} in {root}: it needs a folder {' or '.join(f'{name}/' for name in convention.folders)} of npz files"
        f"{f' (there are: {there})' if there else ''}. `tpukit simulate eit` makes train/ and test/"
    )


def _read_split(folder, baselines):
    from tqdm.auto import tqdm

    paths = sorted(folder.glob("*.npz"))
    if not paths:
        raise TpukitError(f"no npz files in {folder}")
    names = ["xs", "ys", *(("TR", "xs_gn") if baselines else ())]
    samples = [_read_file(path, names) for path in tqdm(paths, desc=f"reading {folder.name}", disable=len(paths) < 1000)]
    arrays = {name: np.concatenate([sample[name] for sample in samples]) for name in names}
    count = [len(sample["xs"]) for sample in samples]
    stems = [p.stem if n == 1 else f"{p.stem}-{i}" for p, n in zip(paths, count) for i in range(n)]
    return dict(arrays, names=np.array(stems))


def _read_file(path, names):
    """dict of float32 arrays: xs, TR, xs_gn (N, 128, 128) and ys (N, 208). A classical image that is not there is not a
    number."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            found = {name: np.asarray(arrays[name], np.float32) for name in names if name in arrays}
    except Exception as error:  # numpy and zipfile raise many types for a damaged file
        raise TpukitError(f"{path} cannot be read ({error}): copy or make it again") from error
    shapes = dict.fromkeys(names, (SIZE, SIZE)) | dict(ys=(ELECTRODES * (ELECTRODES - 3),))
    for name in names:
        if name not in found and name in ("xs", "ys"):
            raise TpukitError(f"{path} has no array {name!r}: a sample needs xs {shapes['xs']} and ys {shapes['ys']}")
        values = found[name] if name in found else np.full(found["xs"].shape, np.nan, np.float32)
        bare = values.squeeze().shape
        if values.size == 0 or shapes[name] not in (bare, bare[1:]):
            raise TpukitError(f"{path}: {name} has shape {values.shape}, a sample needs {shapes[name]}")
        found[name] = values.reshape(-1, *shapes[name])
    if len({len(values) for values in found.values()}) > 1:
        raise TpukitError(f"{path}: its arrays hold {', '.join(f'{len(v)} {n}' for n, v in found.items())}")
    return found


# Statistics of the voltages


def find_statistics(split_folder, root):
    """(mean, deviation), (16, 13) float32 each, by which voltages are normalised, and a sentence that says where they come
    from.

    In this order: mean.pth and std.pth beside the split's folder (or in it); in ./data; computed from root's training set, and
    saved beside it.
    """
    for folder in (split_folder.parent, split_folder, FALLBACK):
        if found := _read_statistics(folder):
            return found
    try:
        training = find_split(root, TRAINING, "training set")
    except TpukitError as error:
        raise TpukitError(
            f"no mean.pth and std.pth beside {split_folder} or in {FALLBACK.resolve()}, and no training set in {root} to "
            "compute them from: put the two files of the set that the network was trained on there"
        ) from error
    with files.file_lock(training.parent / "mean.pth"):
        if found := _read_statistics(training.parent):  # another process was first
            return found
        statistics = _statistics_of(training)
        return statistics, _save_statistics(training.parent, statistics)


def _statistics_of(training):
    volts = Impedance(training, TRAINING, None, baselines=False).volts.reshape(-1, ELECTRODES, ELECTRODES - 3)
    deviation = volts.std(0, dtype=np.float64)
    if len(volts) < 2 or not deviation.all():
        raise TpukitError(f"{training}: its {len(volts)} samples have no spread of voltages to normalise by; simulate more")
    return volts.mean(0, dtype=np.float64).astype(np.float32), deviation.astype(np.float32)


def _save_statistics(folder, statistics):
    import torch

    notes = f"voltage statistics: computed from the training set in {folder}"
    try:
        for name, values in zip(("mean.pth", "std.pth"), statistics):
            with files.atomic_file(folder / name) as file:
                torch.save(torch.from_numpy(values)[None], file)  # (1, 16, 13), as published
        return f"{notes}, and saved there as mean.pth and std.pth"
    except (OSError, TpukitError) as error:  # Kaggle's inputs are read-only
        return f"{notes}; not saved ({error})"


def _read_statistics(folder):
    """The statistics of a folder and the sentence about them, or None where it has none."""
    paths = [folder / name for name in ("mean.pth", "std.pth")]
    if not all(path.is_file() for path in paths):
        return None
    return tuple(_read_statistic(path) for path in paths), f"voltage statistics: mean.pth and std.pth of {folder}"


def _read_statistic(path):
    try:
        return weights.load_tensors(path).float().numpy().reshape(ELECTRODES, ELECTRODES - 3)
    except Exception as error:  # torch raises many types for a damaged file
        raise TpukitError(f"{path} is not a tensor of {ELECTRODES} x {ELECTRODES - 3} numbers ({error})") from error
