"""A simulated water tank for electrical impedance tomography: conductivity images in, electrode voltages out,
by pyEIT.

16 electrodes on the unit disk, current through neighbouring pairs, voltages between all other neighbouring
pairs: 208 numbers. Images are 128 x 128 with the disk inscribed: 0 is the background, +1 a conductive and -1
a resistive inclusion."""

import functools
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from tpukit.host import files
from tpukit.host.errors import explained
from tpukit_tasks.cdeit.data import ELECTRODES, SIZE

MESH_SPACING = 0.05  # 2821 elements
# Metal and plastic in tap water. Anything far from 1 gives nearly the same voltages.
CONDUCTIVE, RESISTIVE = 20.0, 0.01
# Volts of this model -> the unit of UEF2017's voltages divided by 1040.856, whose published mean and
# deviation then fit.
VOLTS = 0.87e-3
# Regularisation of the two linear images, about the best for synthetic scenes.
TIKHONOV, GAUSS_NEWTON = 1e-6, 3e-3
SPLITS = ("train", "test")
SEED = 1
NOISE = 0.01  # deviation of the noise, relative to the root mean square of the voltages: 40 dB
# How far a real tank is from this model: the relative deviation of each voltage's gain, and of that of all
MISMATCH = 0.15


# Scenes


def scene(rng: np.random.Generator) -> np.ndarray:
    """Return a synthetic conductivity image, (SIZE, SIZE) float32: 1 to 4 circles, polygons or L-shapes that
    do not touch."""
    x, y = pixel_places()
    image = np.zeros((SIZE, SIZE), np.float32)
    taken = []
    for _ in range(rng.integers(1, 5)):
        for _ in range(50):  # attempts to find a free place
            radius = rng.uniform(0.12, 0.36)
            distance, angle = (0.95 - radius) * np.sqrt(rng.random()), rng.uniform(0, 2 * np.pi)
            centre_x, centre_y = distance * np.cos(angle), distance * np.sin(angle)
            gaps = (np.hypot(centre_x - x2, centre_y - y2) - radius - radius2 for x2, y2, radius2 in taken)
            if all(gap > 0.03 for gap in gaps):
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
    """Return which points (u, v), in units of the bounding circle's radius, lie in a shape."""
    if shape == "circle":
        return u**2 + v**2 < 0.8 * 0.8  # about the area of a polygon in the same bounding circle
    if shape == "polygon":  # regular, with 3 to 6 corners
        corners = rng.integers(3, 7)
        sides = 2 * np.pi * np.arange(corners) / corners
        return np.max([u * np.cos(a) + v * np.sin(a) for a in sides], axis=0) < np.cos(np.pi / corners)
    square = np.maximum(abs(u), abs(v)) < 0.7
    return square & ~((u > -0.1) & (v > -0.1))


def pixel_places() -> tuple[np.ndarray, ...]:
    """Return (x, y), (SIZE, SIZE) each: the centres of the pixels. Rows run down x and columns up y, as in
    the UEF2017 images."""
    line = (np.arange(SIZE) + 0.5) / (SIZE / 2) - 1
    return np.meshgrid(-line, line, indexing="ij")


def disk() -> np.ndarray:
    """Return the pixels inside the tank, (SIZE, SIZE) bool."""
    x, y = pixel_places()
    return x**2 + y**2 <= 1


# Physics


class Tank:
    """The finite element model of the tank; all that does not depend on the inclusions is computed once.

    Raises TpukitError if pyEIT is not installed."""

    def __init__(self):
        # pyEIT's meshes import shapely for outlines given by corners. The tank is a circle, and Kaggle's TPU
        # image and Colab's have no shapely: a stand-in, which other code does not see, is enough.
        names = ("shapely", "shapely.geometry", "shapely.geometry.polygon")
        stand_in: dict[str, Any] = {}
        try:
            import shapely  # noqa: F401
        except ImportError:  # also one without its library
            stand_in = dict.fromkeys(names, mock.MagicMock())
        sys.modules.update(stand_in)
        try:
            with explained("the simulated tank needs pyEIT (pip install 'pyeit>=1.2.4')"):
                from pyeit.eit import fem, protocol
                from pyeit.mesh import create
        finally:
            for name in stand_in:
                del sys.modules[name]
        self.mesh = create(ELECTRODES, h0=MESH_SPACING)
        self.protocol = protocol.create(ELECTRODES, dist_exc=1, step_meas=1, parser_meas="std")
        self.elements = len(self.mesh.element)
        self._stiffness = fem.calculate_ke(self.mesh.node, self.mesh.element)  # (elements, 3, 3)
        self._currents = np.zeros((self.mesh.n_nodes, ELECTRODES))  # into every node, for each drive pattern
        for pattern, (source, sink) in enumerate(self.mesh.el_pos[self.protocol.ex_mat]):
            self._currents[source, pattern] = 1
            self._currents[sink, pattern] = -1
        self.centres = self.mesh.node[self.mesh.element][:, :, :2].mean(1)  # (elements, 2)
        x, y = self.centres.T
        row, column = (1 - x) * SIZE / 2, (1 + y) * SIZE / 2
        # the pixel of each element
        self._pixel = tuple(index.astype(int).clip(0, SIZE - 1) for index in (row, column))
        self.empty = self.volts(np.ones(self.elements))

    def volts(self, conductivity: np.ndarray) -> np.ndarray:
        """Return the voltages of the 16 drive patterns, (208,), for (elements,) conductivities; the
        background is 1."""
        from scipy import sparse
        from scipy.sparse.linalg import splu

        corners = self.mesh.element  # (elements, 3)
        rows, columns = np.repeat(corners, 3, 1).ravel(), np.tile(corners, (1, 3)).ravel()  # (elements * 9,)
        values = (self._stiffness * conductivity[:, None, None]).ravel()
        matrix = sparse.csc_matrix((values, (rows, columns)))  # (nodes, nodes), entries of a place added
        # One more conductance fixes the potential, of which only differences are read.
        matrix[self.mesh.ref_node, self.mesh.ref_node] += 1
        symmetric = dict(diag_pivot_thresh=0, options=dict(SymmetricMode=True))
        factors = splu(matrix, permc_spec="MMD_AT_PLUS_A", **symmetric)
        at_electrodes = factors.solve(self._currents)[self.mesh.el_pos]  # (electrode, pattern)
        pairs = self.protocol.meas_mat  # (pattern, 13, 2)
        pattern = np.arange(ELECTRODES)[:, None]
        return (at_electrodes[pairs[..., 0], pattern] - at_electrodes[pairs[..., 1], pattern]).ravel()

    def simulate(self, image: np.ndarray) -> np.ndarray:
        """(SIZE, SIZE) image in [-1, 1] -> (208,) differences to the empty tank, in the unit of the sets
        (`VOLTS`)."""
        level = image[self._pixel]  # (elements,)
        conductivity = np.where(level > 0, CONDUCTIVE ** level.clip(0), RESISTIVE ** (-level).clip(0))
        return VOLTS * (self.volts(conductivity) - self.empty) * np.sign(self.empty)

    @functools.cached_property
    def baselines(self) -> dict[str, np.ndarray]:
        """dict TR, xs_gn -> (SIZE * SIZE, 208) matrix from voltages to the image: Tikhonov, and one step of
        Gauss-Newton.

        Gauss-Newton weighs the elements by their sensitivity (NOSER, Cheney et al., 1990). Source: Adler et
        al., 2007; the same as pyEIT's."""
        from pyeit.eit.fem import EITForward
        from scipy.spatial import KDTree

        inside = disk()
        x, y = pixel_places()
        _, nearest = KDTree(self.centres).query(np.stack([x[inside], y[inside]], 1))  # element of each pixel
        jacobian, _ = EITForward(self.mesh, self.protocol).compute_jac()  # (208, elements)
        sensitivity = np.sqrt((jacobian**2).sum(0))  # (elements,)
        methods = dict(TR=(TIKHONOV, np.ones(self.elements)), xs_gn=(GAUSS_NEWTON, sensitivity))
        matrices = {}
        for name, (strength, weights) in methods.items():
            # (J' J + strength W)^-1 J' = W^-1 J' (J W^-1 J' + strength)^-1, which inverts a small matrix.
            weighted = jacobian.T / weights[:, None]
            inverse = weighted @ np.linalg.inv(jacobian @ weighted + strength * np.eye(len(jacobian)))
            matrices[name] = np.zeros((SIZE * SIZE, len(jacobian)), np.float32)
            matrices[name][inside.ravel()] = -(inverse * np.sign(self.empty) / VOLTS)[nearest]
        return matrices


# Sets


def simulate(out: Path | str, *, samples: int = 1000, test_samples: int = 100) -> Path:
    """Make a set for electrical impedance tomography: train/ and test/ with an npz file for every sample.

    A file holds xs, the image (SIZE, SIZE), and ys, the voltages (208, 1); of the test set also TR and xs_gn,
    two classical images of ys. A sample depends on its split and number alone. Existing files are kept, so
    that a set can grow.

    Args:
        out: folder of the set, which is returned."""
    from tpukit.host.bars import tqdm

    folder = Path(out)
    wanted = [
        folder / split / f"{number:06d}.npz"
        for split, count in zip(SPLITS, (samples, test_samples))
        for number in range(count)
    ]
    with files.explain_unwritable(folder):
        for split in SPLITS:
            (folder / split).mkdir(parents=True, exist_ok=True)
        missing = [path for path in wanted if not path.exists()]
        if not missing:
            return folder
        tank, done = Tank(), len(wanted) - len(missing)
        for path in tqdm(missing, total=len(wanted), initial=done, desc="simulating", unit="sample"):
            # Not durable: there are thousands, and each would wait for the disk.
            with files.atomic_file(path, durable=False) as file:
                np.savez_compressed(file, **make_sample(tank, path.parent.name, int(path.stem)))
    return folder


def make_sample(tank: Tank, split: str, number: int) -> dict:
    """Return the arrays of one sample; see `simulate`."""
    rng = np.random.default_rng(np.random.SeedSequence((SEED, SPLITS.index(split), number)))
    image = scene(rng)
    volts = tank.simulate(image)
    gain = np.exp(MISMATCH * rng.standard_normal())  # one for all voltages
    volts = volts * gain * np.exp(MISMATCH * rng.standard_normal(volts.shape))
    volts += rng.standard_normal(volts.shape) * np.sqrt(np.mean(volts**2)) * NOISE
    volts = volts.astype(np.float32)
    sample = dict(xs=image, ys=volts[:, None])
    if split == "test":
        for name, matrix in tank.baselines.items():
            sample[name] = (matrix @ volts).reshape(SIZE, SIZE).astype(np.float16)
    return sample
