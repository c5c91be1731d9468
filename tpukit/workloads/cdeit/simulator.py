"""A simulated water tank for electrical impedance tomography: conductivity images in, electrode voltages out, by pyEIT.

16 electrodes on the unit disk, current through neighbouring pairs, voltages between all other neighbouring pairs: 208 numbers.
Images are 128 x 128 with the disk inscribed: 0 is the background, +1 a conductive and -1 a resistive inclusion.
"""

import concurrent.futures
import contextlib
import functools
import importlib.metadata
import json
import multiprocessing
import os
from pathlib import Path

import numpy as np

from tpukit.host import files
from tpukit.host.errors import TpukitError
from tpukit.workloads.cdeit.data import ELECTRODES, SIZE

MESH_SPACING = 0.05  # 2821 elements
# Metal and plastic in tap water. Anything far from 1 gives nearly the same voltages.
CONDUCTIVE, RESISTIVE = 20.0, 0.01
# Volts of this model -> the unit of UEF2017's voltages divided by 1040.856, whose published mean and deviation then fit.
VOLTS = 0.87e-3
# Regularisation of the two linear images, about the best for synthetic scenes.
TIKHONOV, GAUSS_NEWTON = 1e-6, 3e-3
SPLITS = ("train", "test")
CHUNK = 25  # samples of a job


# Scenes


def scene(rng):
    """A synthetic conductivity image: 1 to 4 circles, polygons or L-shapes that do not touch. Returns (SIZE, SIZE) float32."""
    x, y = pixel_places()
    image = np.zeros((SIZE, SIZE), np.float32)
    taken = []
    for _ in range(rng.integers(1, 5)):
        for _ in range(50):  # attempts to find a free place
            radius = rng.uniform(0.12, 0.36)
            distance, angle = (0.95 - radius) * np.sqrt(rng.random()), rng.uniform(0, 2 * np.pi)
            centre_x, centre_y = distance * np.cos(angle), distance * np.sin(angle)
            if all(np.hypot(centre_x - x2, centre_y - y2) > radius + radius2 + 0.03 for x2, y2, radius2 in taken):
                break
        else:
            break
        taken.append((centre_x, centre_y, radius))
        turn = rng.uniform(0, 2 * np.pi)
        u = ((x - centre_x) * np.cos(turn) + (y - centre_y) * np.sin(turn)) / radius
        v = ((y - centre_y) * np.cos(turn) - (x - centre_x) * np.sin(turn)) / radius
        shape = rng.choice(("circle", "polygon", "L"), p=(0.5, 0.35, 0.15))
        image[_inside(shape, u, v, rng)] = rng.choice((-1, 1))
    return image


def _inside(shape, u, v, rng):
    """Which points (u, v), in units of the bounding circle's radius, lie in a shape."""
    if shape == "circle":
        return u**2 + v**2 < 0.8 * 0.8  # about the area of a polygon in the same bounding circle
    if shape == "polygon":  # regular, with 3 to 6 corners
        corners = rng.integers(3, 7)
        sides = 2 * np.pi * np.arange(corners) / corners
        return np.max([u * np.cos(a) + v * np.sin(a) for a in sides], axis=0) < np.cos(np.pi / corners)
    square = np.maximum(abs(u), abs(v)) < 0.7
    return square & ~((u > -0.1) & (v > -0.1))


def pixel_places():
    """(x, y), each (SIZE, SIZE): where a pixel's centre lies. Rows run down x and columns up y, as in the UEF2017 images."""
    line = (np.arange(SIZE) + 0.5) / (SIZE / 2) - 1
    return np.meshgrid(-line, line, indexing="ij")


def disk():
    """(SIZE, SIZE) bool: the pixels inside the tank."""
    x, y = pixel_places()
    return x**2 + y**2 <= 1


# Physics


class Tank:
    """The finite element model of the tank; all that does not depend on the inclusions is computed once."""

    def __init__(self):
        with _explain_missing_pyeit():
            from pyeit.eit import fem, protocol
            from pyeit.mesh import create

        self.mesh = create(ELECTRODES, h0=MESH_SPACING)
        self.protocol = protocol.create(ELECTRODES, dist_exc=1, step_meas=1, parser_meas="std")
        self.elements = len(self.mesh.element)
        node = self._prepare_matrix(fem.calculate_ke(self.mesh.node, self.mesh.element))
        self._electrode = node[self.mesh.el_pos]
        self._currents = np.zeros((self.mesh.n_nodes, ELECTRODES))
        for pattern, (source, sink) in enumerate(self.protocol.ex_mat):
            self._currents[self._electrode[source], pattern] += 1
            self._currents[self._electrode[sink], pattern] -= 1
        self.centres = self.mesh.node[self.mesh.element][:, :, :2].mean(1)  # (elements, 2)
        x, y = self.centres.T
        row, column = (1 - x) * SIZE / 2, (1 + y) * SIZE / 2
        self._pixel = row.astype(int).clip(0, SIZE - 1), column.astype(int).clip(0, SIZE - 1)  # of each element
        self.empty = self.volts(np.ones(self.elements))

    def _prepare_matrix(self, stiffness):
        """The sparsity pattern of the matrix of nodes, and how conductivities fill it. stiffness: (elements, 3, 3).

        Nodes are ordered once for a narrow band, so that no factorisation has to find an order. Returns each one's place."""
        from scipy import sparse
        from scipy.sparse import csgraph

        corners, nodes = self.mesh.element, self.mesh.n_nodes  # (elements, 3)
        rows, columns = np.repeat(corners, 3, 1).ravel(), np.tile(corners, (1, 3)).ravel()  # (elements * 9,)
        pattern = sparse.csr_matrix((np.ones(len(rows)), (rows, columns)), (nodes, nodes))
        place = np.empty(nodes, int)
        place[csgraph.reverse_cuthill_mckee(pattern, True)] = np.arange(nodes)
        # Entries of the matrix column by column, as the CSC format stores them.
        entries, slot = np.unique(place[columns] * nodes + place[rows], return_inverse=True)
        entry_column, self._entry_row = np.divmod(entries, nodes)
        self._column_start = np.searchsorted(entry_column, np.arange(nodes + 1))
        element = np.repeat(np.arange(self.elements), 9)
        # (entries, elements): conductivities in, entries of the matrix out
        self._assemble = sparse.csr_matrix((stiffness.ravel(), (slot, element)), (len(entries), self.elements))
        ground = place[self.mesh.ref_node]
        self._ground = np.flatnonzero((entry_column == ground) & (self._entry_row == ground))
        return place

    def volts(self, conductivity):
        """(208,) voltages of the 16 drive patterns for (elements,) conductivities, the background being 1."""
        from scipy import sparse
        from scipy.sparse.linalg import splu

        nodes = len(self._currents)
        values = self._assemble @ conductivity
        values[self._ground] += 1.0  # fixes the potential, of which only differences are read
        matrix = sparse.csc_matrix((values, self._entry_row, self._column_start), (nodes, nodes))
        factors = splu(matrix, permc_spec="NATURAL", diag_pivot_thresh=0, options=dict(SymmetricMode=True))
        at_electrodes = factors.solve(self._currents)[self._electrode]  # (electrode, pattern)
        pairs = self.protocol.meas_mat  # (pattern, 13, 2)
        pattern = np.arange(ELECTRODES)[:, None]
        return (at_electrodes[pairs[..., 0], pattern] - at_electrodes[pairs[..., 1], pattern]).ravel()

    def simulate(self, image):
        """(SIZE, SIZE) image in [-1, 1] -> (208,) differences to the empty tank, in the unit of the sets (`VOLTS`)."""
        level = image[self._pixel]  # (elements,)
        conductivity = np.where(level > 0, CONDUCTIVE ** level.clip(0), RESISTIVE ** (-level).clip(0))
        return VOLTS * (self.volts(conductivity) - self.empty) * np.sign(self.empty)

    @functools.cached_property
    def baselines(self):
        """dict TR, xs_gn -> (SIZE * SIZE, 208) matrix from voltages to the image: Tikhonov, and one step of Gauss-Newton.

        Gauss-Newton weighs the elements by their sensitivity (NOSER, Cheney et al., 1990). Source: Adler et al., 2007, by
        pyEIT.
        """
        from pyeit.eit.jac import JAC
        from scipy.spatial import cKDTree

        solver = JAC(self.mesh, self.protocol)
        inside = disk()
        x, y = pixel_places()
        _, nearest = cKDTree(self.centres).query(np.stack([x[inside], y[inside]], 1))  # element of each pixel
        matrices = {}
        for name, options in (
            ("TR", dict(method="dgn", lamb=TIKHONOV)),
            ("xs_gn", dict(method="kotre", p=0.5, lamb=GAUSS_NEWTON)),
        ):
            solver.setup(**options)
            matrices[name] = np.zeros((SIZE * SIZE, len(self.empty)), np.float32)
            matrices[name][inside.ravel()] = -(solver.H * np.sign(self.empty) / VOLTS)[nearest]
        return matrices


# Sets


def simulate(folder, *, samples=1000, test_samples=100, workers=1, seed=0, snr_db=40.0, mismatch=0.15, progress=True):
    """Make a set: folder/train and folder/test with an npz file for every sample, and folder/simulation.json.

    A file holds xs, the image (SIZE, SIZE); ys, the voltages (208, 1); TR and xs_gn, the Tikhonov and Gauss-Newton images of
    ys; seed. Existing files are kept: a simulation that was stopped continues, and more samples can be added. Returns the
    folder.

    workers: processes. snr_db: signal to noise of the voltages, in decibels. mismatch: how far a real tank is from this model,
    as the relative deviation of every voltage's gain and of the gain of all. Every sample depends on (seed, split, its number)
    alone. Raises TpukitError if the folder holds a set of other settings, or cannot be written.
    """
    folder = Path(folder)
    if min(samples, test_samples, seed) < 0 or workers < 1:
        counts = f"samples={samples}, test_samples={test_samples}, seed={seed}, workers={workers}"
        raise TpukitError(f"{counts}: none may be negative, and workers must be 1 or more")
    settings = dict(seed=seed, snr_db=snr_db, mismatch=mismatch)
    jobs = []
    with files.explain_unwritable(folder):
        if folder.exists() and not folder.is_dir():
            raise TpukitError(f"{folder} is a file; give a folder")
        _check_settings(folder, settings)
        for split, count in zip(SPLITS, (samples, test_samples)):
            (folder / split).mkdir(exist_ok=True)
            existing = {entry.name for entry in os.scandir(folder / split)}
            missing = [number for number in range(count) if _file_name(number) not in existing]
            jobs += [(folder, split, missing[i : i + CHUNK], settings) for i in range(0, len(missing), CHUNK)]
    _run_jobs(jobs, min(workers, len(jobs)), samples + test_samples, progress)
    return folder


def _check_settings(folder, settings):
    """Write the settings of a new set, or compare them with those of an existing one."""
    path = folder / "simulation.json"
    if not path.exists():
        with _explain_missing_pyeit():
            versions = {name: importlib.metadata.version(name) for name in ("pyeit", "numpy", "scipy")}
        folder.mkdir(parents=True, exist_ok=True)
        about = dict(settings, versions=versions, conductive=CONDUCTIVE, resistive=RESISTIVE)
        files.write_atomic(path, json.dumps(about, indent=1))
        return
    try:
        saved = json.loads(path.read_text())
    except ValueError as error:  # not JSON, or not UTF-8
        raise TpukitError(
            f"{path} is damaged ({error}): delete it if you know the settings, or choose another folder"
        ) from error
    different = [f"{name}={saved.get(name)}, not {value}" for name, value in settings.items() if saved.get(name) != value]
    if different:
        raise TpukitError(f"{folder} holds a simulation with {'; '.join(different)}: give the same settings, or another folder")


def _run_jobs(jobs, workers, total, progress):
    from tqdm.auto import tqdm

    left = sum(len(numbers) for _, _, numbers, _ in jobs)
    with tqdm(total=total, initial=total - left, desc="simulating", unit="sample", disable=not progress) as bar:
        if workers <= 1:
            for job in jobs:
                bar.update(_make_samples(*job))
            return
        # Fresh processes: a fork of a notebook's kernel would take its threads' locks along.
        pool = concurrent.futures.ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
        try:
            for done in concurrent.futures.as_completed([pool.submit(_make_samples, *job) for job in jobs]):
                bar.update(done.result())
        except concurrent.futures.process.BrokenProcessPool as error:
            raise TpukitError(
                "a worker process died (out of memory, or killed): start again to continue, with fewer workers. In a "
                "script, several workers need `if __name__ == '__main__':` around the call"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


@functools.cache
def _tank():
    return Tank()


def _make_samples(folder, split, numbers, settings):
    """Make the samples of a split with these numbers; returns how many."""
    for number in numbers:
        sample = make_sample(_tank(), split, number, **settings)
        # Not durable: there are thousands, and each would wait for the disk.
        path = folder / split / _file_name(number)
        with files.explain_unwritable(folder), files.atomic_file(path, durable=False) as file:
            np.savez_compressed(file, **sample)
    return len(numbers)


def _file_name(number):
    return f"{number:06d}.npz"


def make_sample(tank, split, number, *, seed, snr_db, mismatch):
    """One sample as a dict of arrays; see `simulate`."""
    origin = (seed, SPLITS.index(split), number)
    rng = np.random.default_rng(np.random.SeedSequence(origin))
    image = scene(rng)
    volts = tank.simulate(image)
    volts = volts * np.exp(mismatch * rng.standard_normal()) * np.exp(mismatch * rng.standard_normal(volts.shape))
    volts += rng.standard_normal(volts.shape) * np.sqrt(np.mean(volts**2)) * 10 ** (-snr_db / 20)
    volts = volts.astype(np.float32)
    baselines = {name: (matrix @ volts).reshape(SIZE, SIZE).astype(np.float16) for name, matrix in tank.baselines.items()}
    return dict(xs=image, ys=volts[:, None], **baselines, seed=np.array(origin))


def compare_with_measurements(folder, volts=1040.856):
    """dict(name -> correlation of simulated and measured voltages) of a folder of real samples with xs and ys, as UEF2017's.

    volts: what ys is divided by."""
    paths = sorted(Path(folder).glob("*.npz"))
    if not paths:
        raise TpukitError(f"no npz files in {folder}: give the folder of real samples, data2017/ for instance")
    correlations = {}
    for path in paths:
        try:
            with np.load(path, allow_pickle=False) as arrays:
                image, measured = arrays["xs"].reshape(SIZE, SIZE), arrays["ys"].reshape(208) / volts
        except Exception as error:  # numpy and zipfile raise many types for a damaged file
            raise TpukitError(f"{path} is not a sample with xs and ys ({error})") from error
        correlations[path.stem] = float(np.corrcoef(_tank().simulate(image), measured)[0, 1])
    return correlations


@contextlib.contextmanager
def _explain_missing_pyeit():
    try:
        yield
    except ImportError as error:
        raise TpukitError(
            "the simulator of electrical impedance tomography needs pyEIT 1.2.4 or newer: pip install 'pyeit>=1.2.4'"
        ) from error
