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

SIZE = 128
ELECTRODES = 16
MESH_SPACING = 0.05  # 2821 elements
# Metal and plastic in tap water. Anything far from 1 gives nearly the same voltages.
CONDUCTIVE, RESISTIVE = 20.0, 0.01
# Volts of this model -> the unit of UEF2017's voltages divided by 1040.856, whose published mean and deviation then fit.
VOLTS = 0.87e-3
# Regularisation of the two linear images, about the best for synthetic scenes.
TIKHONOV, GAUSS_NEWTON = 1e-6, 3e-3
SPLITS = ("train", "test")
CHUNK = 25  # samples that a worker makes before it reports


# Scenes


def scene(rng):
    """A synthetic conductivity image: 1 to 4 circles, polygons or L-shapes that do not touch. Returns (SIZE, SIZE) float32."""
    x, y = pixel_places()
    image = np.zeros((SIZE, SIZE), np.float32)
    taken = []
    for _ in range(rng.integers(1, 5)):
        for _ in range(50):  # tries to find a free place
            radius = rng.uniform(0.12, 0.36)
            distance, angle = (0.95 - radius) * np.sqrt(rng.random()), rng.uniform(0, 2 * np.pi)
            centre = np.array([distance * np.cos(angle), distance * np.sin(angle)])
            if all(np.hypot(*(centre - other)) > radius + reach + 0.03 for other, reach in taken):
                break
        else:
            break
        taken.append((centre, radius))
        turn = rng.uniform(0, 2 * np.pi)
        u = ((x - centre[0]) * np.cos(turn) + (y - centre[1]) * np.sin(turn)) / radius
        v = ((y - centre[1]) * np.cos(turn) - (x - centre[0]) * np.sin(turn)) / radius
        shape = rng.choice(("circle", "polygon", "L"), p=(0.5, 0.35, 0.15))
        image[_inside(shape, u, v, rng)] = rng.choice((-1, 1))
    return image


def _inside(shape, u, v, rng):
    """Which points (u, v), in units of the bounding circle's radius, lie in a shape."""
    if shape == "circle":
        return u**2 + v**2 < (0.8 * 0.8)  # about the area of a polygon in the same bounding circle
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
    """The finite element model of the tank; everything that does not depend on the inclusions is computed once."""

    def __init__(self):
        with _missing_pyeit_explained():
            from pyeit.eit import fem, protocol
            from pyeit.mesh import create
        from scipy import sparse
        from scipy.sparse import csgraph

        self.mesh = create(ELECTRODES, h0=MESH_SPACING)
        self.protocol = protocol.create(ELECTRODES, dist_exc=1, step_meas=1, parser_meas="std")
        elements, nodes = self.mesh.element, self.mesh.n_nodes
        self.elements = len(elements)
        stiffness = fem.calculate_ke(self.mesh.node, elements)  # (elements, 3, 3)
        rows, columns = np.repeat(elements, 3, 1).ravel(), np.tile(elements, (1, 3)).ravel()
        # Ordered once for a thin band, so that no factorisation has to look for an order.
        pattern = sparse.csr_matrix((np.ones(len(rows)), (rows, columns)), (nodes, nodes))
        place = np.empty(nodes, int)
        place[csgraph.reverse_cuthill_mckee(pattern, True)] = np.arange(nodes)
        entry = place[columns] * nodes + place[rows]
        entries, slot = np.unique(entry, return_inverse=True)
        self._row, self._start = entries % nodes, np.searchsorted(entries // nodes, np.arange(nodes + 1))
        # (entries, elements): conductivities in, entries of the stiffness matrix out
        self._assemble = sparse.csr_matrix(
            (stiffness.ravel(), (slot, np.repeat(np.arange(self.elements), 9))), (len(entries), self.elements)
        )
        ground = place[self.mesh.ref_node]
        self._ground = np.flatnonzero((entries // nodes == ground) & (entries % nodes == ground))
        self._electrode = place[self.mesh.el_pos]
        self._currents = np.zeros((nodes, ELECTRODES))
        for pattern, (source, sink) in enumerate(self.protocol.ex_mat):
            self._currents[self._electrode[source], pattern] += 1
            self._currents[self._electrode[sink], pattern] -= 1
        x, y = self.mesh.node[elements][:, :, :2].mean(1).T
        half = SIZE // 2
        self._pixel = tuple(np.clip(v.astype(int), 0, SIZE - 1) for v in ((1 - x) * half, (1 + y) * half))
        self.empty = self.volts(np.ones(self.elements))

    def volts(self, conductivity):
        """(208,) voltages of the 16 drive patterns for (elements,) conductivities, the background being 1."""
        from scipy import sparse
        from scipy.sparse.linalg import splu

        nodes = len(self._currents)
        values = self._assemble @ conductivity
        values[self._ground] += 1.0  # fixes the potential, which only differences are read of
        matrix = sparse.csc_matrix((values, self._row, self._start), (nodes, nodes))
        factors = splu(matrix, permc_spec="NATURAL", diag_pivot_thresh=0, options=dict(SymmetricMode=True))
        at_electrodes = factors.solve(self._currents)[self._electrode]  # (electrode, pattern)
        pairs = self.protocol.meas_mat  # (pattern, 13, 2)
        pattern = np.arange(ELECTRODES)[:, None]
        return (at_electrodes[pairs[..., 0], pattern] - at_electrodes[pairs[..., 1], pattern]).ravel()

    def simulate(self, image):
        """(SIZE, SIZE) image in [-1, 1] -> (208,) differences to the empty tank, in the unit of the sets (`VOLTS`)."""
        level = image[self._pixel]
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
        centres = self.mesh.node[self.mesh.element][:, :, :2].mean(1)
        inside = disk()
        nearest = cKDTree(centres).query(np.stack([v[inside] for v in pixel_places()], 1))[1]
        matrices = {}
        for name, how in dict(
            TR=dict(method="dgn", lamb=TIKHONOV), xs_gn=dict(method="kotre", p=0.5, lamb=GAUSS_NEWTON)
        ).items():
            solver.setup(**how)
            matrix = np.zeros((SIZE * SIZE, len(self.empty)), np.float32)
            matrix[inside.ravel()] = -(solver.H * np.sign(self.empty) / VOLTS)[nearest]
            matrices[name] = matrix
        return matrices


# Sets


def simulate(folder, *, samples=1000, test_samples=100, workers=1, seed=0, snr_db=40.0, mismatch=0.15, progress=True):
    """Make a set: folder/train and folder/test with an npz file for every sample, and folder/simulation.json.

    A file holds xs, the image (SIZE, SIZE); ys, the voltages (208, 1); TR and xs_gn, the Tikhonov and Gauss-Newton images of
    ys; seed. Files that are there already are kept, so that a simulation that was stopped goes on, and more samples can be
    added. Returns the folder.

    workers: processes. snr_db: signal to noise of the voltages, in decibels. mismatch: how far a real tank is from this model,
    as the relative deviation of every voltage's gain and of the gain of all. Every sample depends on (seed, split, its number)
    alone. Raises TpukitError where the folder holds a set of other settings, or cannot be written.
    """
    folder = Path(folder)
    if min(samples, test_samples, seed) < 0 or workers < 1:
        counts = f"samples={samples}, test_samples={test_samples}, seed={seed}, workers={workers}"
        raise TpukitError(f"{counts}: give nothing below 0, and 1 worker or more")
    settings = dict(seed=seed, snr_db=snr_db, mismatch=mismatch)
    jobs = []
    with files.explain_unwritable(folder):
        if folder.exists() and not folder.is_dir():
            raise TpukitError(f"{folder} is a file; a set needs a folder of its own")
        _agree(folder, settings)
        for split, count in zip(SPLITS, (samples, test_samples)):
            (folder / split).mkdir(exist_ok=True)
            there = {entry.name for entry in os.scandir(folder / split)}
            missing = [number for number in range(count) if _name(number) not in there]
            jobs += [(folder, split, missing[i : i + CHUNK], settings) for i in range(0, len(missing), CHUNK)]
    _work_off(jobs, min(workers, len(jobs)), samples + test_samples, progress)
    return folder


def _agree(folder, settings):
    """Write down the settings of a set, or compare them with those that it has."""
    about = folder / "simulation.json"
    if about.exists():
        try:
            made = json.loads(about.read_text())
        except ValueError as error:  # no JSON, or no UTF-8
            raise TpukitError(
                f"{about} is damaged ({error}): delete it if you know the settings, or choose another folder"
            ) from error
        other = [f"{n}={made.get(n)}, not {v}" for n, v in settings.items() if made.get(n) != v]
        if other:
            raise TpukitError(f"{folder} holds a simulation with {'; '.join(other)}: give the same settings, or another folder")
        return
    with _missing_pyeit_explained():
        versions = {name: importlib.metadata.version(name) for name in ("pyeit", "numpy", "scipy")}
    folder.mkdir(parents=True, exist_ok=True)
    said = json.dumps(dict(settings, versions=versions, conductive=CONDUCTIVE, resistive=RESISTIVE), indent=1)
    files.write_atomic(about, said)


def _work_off(jobs, workers, total, progress):
    from tqdm.auto import tqdm

    left = sum(len(numbers) for _, _, numbers, _ in jobs)
    with tqdm(total=total, initial=total - left, desc="simulating", unit="sample", disable=not progress) as bar:
        if workers <= 1:
            for job in jobs:
                for _ in _make(*job):
                    bar.update()
            return
        # Fresh processes: a fork of a notebook's kernel would take its threads' locks along.
        pool = concurrent.futures.ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
        try:
            for done in concurrent.futures.as_completed([pool.submit(_make_all, job) for job in jobs]):
                bar.update(done.result())
        except concurrent.futures.process.BrokenProcessPool as error:
            raise TpukitError(
                "a simulating process died (out of memory, or killed): start again to go on, with fewer workers. In a script, "
                "several workers need `if __name__ == '__main__':` around the call"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _make_all(job):
    return sum(1 for _ in _make(*job))


@functools.cache
def _tank():
    return Tank()


def _make(folder, split, numbers, settings):
    """Make the samples of a split with these numbers; yields after each."""
    tank = _tank()
    for number in numbers:
        sample = make_sample(tank, split, number, **settings)
        path = folder / split / _name(number)
        # Not durable: there are thousands, and each would wait for the disk.
        with files.explain_unwritable(folder), files.atomic_file(path, durable=False) as file:
            np.savez_compressed(file, **sample)
        yield


def _name(number):
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
    linear = {name: (matrix @ volts).reshape(SIZE, SIZE).astype(np.float16) for name, matrix in tank.baselines.items()}
    return dict(xs=image, ys=volts[:, None], **linear, seed=np.array(origin))


def agreement(folder, volts=1040.856):
    """How well this model explains a real tank: for every npz file of a folder, how simulated and measured voltages correlate.

    folder: samples with xs and ys, as UEF2017's. volts: by what ys is divided. Returns dict(name -> correlation).
    """
    paths = sorted(Path(folder).glob("*.npz"))
    if not paths:
        raise TpukitError(f"no npz files in {folder}: give the folder of real samples, data2017/ for instance")
    found = {}
    for path in paths:
        try:
            with np.load(path, allow_pickle=False) as arrays:
                image, measured = arrays["xs"].reshape(SIZE, SIZE), arrays["ys"].reshape(208) / volts
        except Exception as error:  # numpy and zipfile raise many types for a damaged file
            raise TpukitError(f"{path} is no sample with xs and ys ({error})") from error
        simulated = _tank().simulate(image)
        found[path.stem] = float(np.corrcoef(simulated, measured)[0, 1])
    return found


@contextlib.contextmanager
def _missing_pyeit_explained():
    try:
        yield
    except ImportError as error:
        raise TpukitError(
            "the simulator of electrical impedance tomography needs pyEIT 1.2.4 or newer: pip install 'pyeit>=1.2.4'"
        ) from error
