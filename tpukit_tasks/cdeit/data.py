"""Sets for electrical impedance tomography on disk: a folder of npz files for each split, and the statistics
of the voltages.

A file holds xs, a conductivity image (128, 128), and ys, 208 voltages; test files also xs_gn and TR, the
images of two classical methods. The conventions are those of the published code."""

import dataclasses
import io
from pathlib import Path

import numpy as np

from tpukit.data import arrays
from tpukit.host import files
from tpukit.host.errors import TpukitError, reading
from tpukit.runs.tensors import load_tensors
from tpukit_tasks.cdeit.diffusion import STEPS
from tpukit_tasks.splits import some

ELECTRODES = 16
PATTERN = (ELECTRODES, ELECTRODES - 3)  # drive patterns, voltages of each
VOLTAGES = 16 * 13
SIZE = 128  # side of the images
FALLBACK = Path("data")
NPZ = "[!.]*.npz"  # without macOS's ._NAME.npz, which is beside NAME.npz on a disk of another system
SAMPLES = "save each sample as one, with xs, its image of 128 x 128, and ys, its 208 voltages"
STATISTICS = ("mean.pth", "std.pth")  # files with the statistics of the voltages
APART = 10.0  # times as large as they should be: numbers in another unit
SILENT = 1e-3  # of the deviation: what differs by less is the noise of a device without a signal
BASELINES = ("TR", "xs_gn")  # the images of the classical methods: Tikhonov, Gauss-Newton

Statistics = tuple[np.ndarray, np.ndarray]  # mean and deviation of the voltages, (16, 13) float32 each


@dataclasses.dataclass(frozen=True)
class Convention:
    """Storage of a set: the names of its folders, and the constants V and I of its tank.

    The network gets ys / V. A prediction is saved as prediction * I / V, the `unit`, which is also that of TR
    in the files. `gauss_newton` is that of xs_gn there."""

    folders: tuple[str, ...]
    volts: float
    unit: float
    gauss_newton: float = 1.0


CONVENTIONS = dict(
    simulated=Convention(("test", "valid", "val"), 1.0, 1.0),
    uef2017=Convention(("data2017", "test2017"), 1040.856, 2.0 / 1040.856),
    ktc2023=Convention(("data2023", "test2023"), 1978.0, 2.0 / 1978.0, 2.0 / 1978.0),
)
TRAINING = Convention(("train",), 1.0, 1.0)
PARTS = tuple(name for convention in (TRAINING, *CONVENTIONS.values()) for name in convention.folders)


class Impedance:
    """One split, whose images all processes of a host share.

    `batch(indices, numbers)` -> dict of image (B, 1, 128, 128) float32, voltages (B, 1, 16, 16) float32, of a
    test set TR and xs_gn (B, 128, 128) float32, key (B,) int64 for the noise; with numbers (B, 2) in [0, 1)
    also t (B,) int64, the timestep. `notes`, `notices`: sentences for the log."""

    num_uniforms = 2  # for the noise and for the timestep

    def __init__(self, folder: Path, convention: Convention, statistics: Statistics, notes: str = ""):
        self.statistics, self.notes = statistics, notes
        names = ("xs", "ys") if convention is TRAINING else ("xs", "ys", *BASELINES)
        stored, self.contents = _read_split(folder, names)
        self.names = stored["names"]
        volts = stored["ys"] / np.float32(convention.volts)
        self.arrays = dict(image=stored["xs"][:, None], voltages=voltage_map(volts, *statistics))
        if convention is not TRAINING:
            for name, unit in zip(BASELINES, (convention.unit, convention.gauss_newton)):
                self.arrays[name] = stored[name] * np.float32(1 / unit)
        self.notices = _doubts(folder, self.arrays) + find_silent(folder.name, volts, statistics[1])

    def __len__(self):
        return len(self.names)

    def batch(self, indices, numbers=None):
        rows = {name: values[indices] for name, values in self.arrays.items()}
        return rows | self.sample_parameters(indices, numbers)

    # On the device

    def device_nbytes(self):
        return sum(values.nbytes for values in self.arrays.values())

    def device_arrays(self):
        return self.arrays

    def sample_parameters(self, indices, numbers=None):
        if numbers is None:
            return dict(key=np.asarray(indices, np.int64))
        return dict(key=(numbers[:, 0] * 2**40).astype(np.int64), t=(numbers[:, 1] * STEPS).astype(np.int64))

    def compose(self, rows, parameters):
        return rows | parameters


def _doubts(folder, values):
    """Return sentences about a split's numbers, if they may be in another unit, and about files that are not
    read."""
    notices = doubtful_voltages(folder.name, values["voltages"])
    largest = np.nanmax(np.abs(values["image"]))
    if not 1 / APART < largest < APART:
        notices.append(
            f"{folder.name}: its images have values up to {largest:.3g}, but inclusions should be -1 or 1"
        )
    others = [path.name for path in sorted(folder.iterdir()) if path.suffix != ".npz" and path.name[0] != "."]
    if others:
        notices.append(f"{folder.name}: {len(others)} files are not npz, and are not read ({some(others)})")
    return notices


def doubtful_voltages(name: str, voltages: np.ndarray) -> list[str]:
    """Return a sentence if the voltages of a folder or a file, maps of `voltage_map`, may be in another unit;
    else none."""
    spread = np.sqrt(np.nanmean(voltages[voltages != 0] ** 2))
    if not 1 / APART < spread < APART:
        return [
            f"{name}: its voltages are {spread:.3g} times as large as the statistics expect: does data"
            " (--data) name the convention of its files?"
        ]
    # One that is small may be of an empty tank.
    apart = np.flatnonzero(np.sqrt(np.nansum(voltages**2, (1, 2, 3)) / VOLTAGES) > APART) + 1
    told = f"{name}: {len(apart)} of {len(voltages)} samples have voltages over {APART:g} times as large"
    return [f"{told} as the statistics expect (numbers {_listed(apart)})"] if len(apart) else []


def find_silent(name: str, volts: np.ndarray, deviation: np.ndarray) -> list[str]:
    """Return a sentence if samples have drive patterns without a measurement, whose voltages hardly differ;
    else none. volts: (N, 208). deviation: (16, 13), as of the statistics."""
    is_silent = np.ptp(volts.reshape(-1, *PATTERN), 2) < SILENT * deviation.mean()  # (N, 16)
    found = np.flatnonzero(is_silent.any(1)) + 1
    told = f"{name}: {len(found)} of {len(volts)} samples have drive patterns whose voltages are all equal"
    return [f"{told}, so nothing was measured there (numbers {_listed(found)})"] if len(found) else []


def _require_measured(volts):
    """Raise ValueError for samples (N, 208) whose voltages are all equal."""
    if len(dead := np.flatnonzero(np.ptp(volts, 1) == 0)):
        raise ValueError(
            f"{len(dead)} of {len(volts)} samples (numbers {_listed(dead + 1)}) hold {volts[dead[0], 0]:g} in"
            f" all {VOLTAGES} voltages, which is no measurement: is the device on? Leave them out"
        )


def _listed(numbers):
    return some([str(number) for number in numbers])


def voltage_map(volts: np.ndarray, mean: np.ndarray, deviation: np.ndarray) -> np.ndarray:
    """(B, 208) voltages -> (B, 1, 16, 16) normalised map: row r is the drive pattern, zero at the columns
    r - 1, r, r + 1, which it does not measure. mean, deviation: (16, 13) each."""
    electrode = np.arange(ELECTRODES)
    distance = (electrode[None, :] - electrode[:, None]) % ELECTRODES  # (16, 16), from the drive pattern
    normalised = (volts.reshape(-1, *PATTERN) - mean) / deviation
    out = np.zeros((len(volts), ELECTRODES, ELECTRODES), np.float32)
    out[:, (distance > 1) & (distance < ELECTRODES - 1)] = normalised.reshape(len(volts), -1)
    return out[:, None]


# Reading


def find_split(root: Path, convention: Convention) -> Path:
    """Return the folder of a split below root: the first of the convention's names that is there. Raises
    TpukitError with the folders that were searched for."""
    for name in convention.folders:
        if (root / name).is_dir():
            return root / name
    wanted = " or ".join(f"{name}/" for name in convention.folders)
    here = ", ".join(sorted(path.name for path in root.glob("*/"))) or "no folder"
    raise TpukitError(
        f"{root} has {here}, not {wanted} with npz files: {SAMPLES}; `tpukit simulate eit` makes a set"
    )


def _read_split(folder, names):
    """Return (arrays, contents) of a folder's files: their arrays, (N, ...) each, mapped into memory, and
    their `names`; a digest of the files."""
    from tpukit.host.bars import tqdm

    def read():
        if not paths:
            here = ", ".join(sorted(path.name for path in folder.iterdir())[:5]) or "nothing"
            raise TpukitError(f"no npz files in {folder}, which has {here}: {SAMPLES}")
        shown = tqdm(paths, desc=f"reading {folder.name}", disable=len(paths) < 1000)
        samples = [_read_file(path, names) for path in shown]
        split = {name: np.stack([sample[name] for sample in samples]) for name in names}
        return dict(split, names=np.array([path.stem for path in paths]))

    paths = sorted(folder.glob(NPZ))
    contents = arrays.content_key(paths)
    return arrays.mapped(f"eit-{folder.name}", [names, contents], read), contents


def _read_file(path, names):
    """Return float32 arrays: ys (208,), the others (128, 128); a baseline that the file lacks is all NaN."""
    missing = dict.fromkeys(BASELINES, np.full((SIZE, SIZE), np.nan))
    sample = {}
    wrong = f"{path} is not a sample with xs (an image) and ys (voltages): copy or make it again"
    with reading(path, wrong, TpukitError), arrays.load(path) as file:
        for name in names:
            values = _real(file[name] if name in file else missing[name])
            shape = (VOLTAGES,) if name == "ys" else (SIZE, SIZE)
            if values.squeeze().shape != shape:
                raise ValueError(f"{name} has shape {values.shape}, not {shape}")
            sample[name] = values.reshape(shape)
        _require_measured(sample["ys"][None])
    return sample


def _real(values):
    """Return a float32 array. Raises TypeError for complex numbers, which would lose their imaginary part."""
    return np.asarray(values).astype(np.float32, casting="same_kind")


def read_voltages(path: Path) -> np.ndarray:
    """Return the voltages of a file, (N, 208) float32: .npz (its array ys), .npy, or rows of numbers in a
    text file (.csv, .txt).

    A sample is a row of 208, or 16 rows of 13; a single one may be a column. Raises TpukitError for a file
    that cannot be read, has another shape, holds a number that is not finite, or no measurement."""
    ending = path.suffix.lower()
    if ending == ".mat":
        raise TpukitError(
            f"{path}: MATLAB's files are not read, so save its voltages as .npy:"
            " numpy.save('v.npy', scipy.io.loadmat('v.mat')['NAME'])"
        )
    wrong = f"{path} holds no voltages (208 finite numbers a sample, in .npz (ys), .npy, .csv or .txt)"
    with reading(path, wrong, TpukitError):
        if ending in (".npz", ".npy"):
            loaded = arrays.load(path)
            values = loaded["ys"] if ending == ".npz" else loaded
        else:
            text = path.read_text("utf-8-sig")  # spreadsheets write a byte order mark
            values = np.loadtxt(text.replace(",", " ").splitlines())
        volts = _real(values)
        shape = volts.squeeze().shape
        if shape[-1:] != (VOLTAGES,) and shape[-2:] != PATTERN:  # another shape would mix samples
            raise ValueError(f"shape {volts.shape}")
        if not len(volts) or not np.isfinite(volts).all():
            raise ValueError(f"{len(volts)} rows, some with NaN or infinity")
        volts = volts.reshape(-1, VOLTAGES)
        _require_measured(volts)
        return volts


# Statistics of the voltages


def find_statistics(split_folder: Path, root: Path) -> tuple[Statistics, str]:
    """Return the (mean, deviation) that normalise voltages, and a sentence that says where they come from:
    mean.pth and std.pth next to the split's folder, else computed from root's training set.

    Raises TpukitError if there is neither, or one is damaged."""
    folder = split_folder.parent
    if all((folder / name).is_file() for name in STATISTICS):
        mean, deviation = (_read_statistic(folder / name) for name in STATISTICS)
        return (mean, deviation), f"voltage statistics: {' and '.join(STATISTICS)} of {folder}"
    try:
        training = find_split(root, TRAINING)
    except TpukitError as error:
        raise TpukitError(
            f"no {' and '.join(STATISTICS)} next to {split_folder}, and no training set in {root} to compute"
            " them from: copy both files from the set that the network was trained on"
        ) from error
    split, _ = _read_split(training, ("xs", "ys"))
    volts = split["ys"].reshape(-1, *PATTERN)
    mean = volts.mean(0, dtype=np.float64).astype(np.float32)
    deviation = volts.std(0, dtype=np.float64).astype(np.float32)
    if not np.isfinite(volts).all() or not deviation.all():  # a single sample has no deviation, either
        raise TpukitError(
            f"{training}: its {len(volts)} samples have voltages that hold NaN or infinity, or do not vary:"
            " make them again, or add more"
        )
    return (mean, deviation), f"voltage statistics: computed from the training set in {training.parent}"


def _read_statistic(path):
    both = " and ".join(STATISTICS)
    wrong = f"{path} is not a tensor of 16 x 13 usable numbers: delete {both} there, and they are computed"
    with reading(path, wrong, TpukitError):
        values = load_tensors(io.BytesIO(files.read_bytes(path))).float().numpy().reshape(PATTERN)
        if not np.isfinite(values).all() or path.name == STATISTICS[1] and not (values > 0).all():
            raise ValueError("NaN, infinity, or a deviation that is not above 0")
    return values
