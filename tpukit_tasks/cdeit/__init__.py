"""CDEIT: a conditional diffusion transformer for electrical impedance tomography (Shi et al., IEEE TIM 2025).

torch is imported where it is used, so that the help of the command line need not wait for it.
"""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from tpukit.data import arrays
from tpukit.host import files
from tpukit.host.errors import TpukitError, check_installed, explained, reading
from tpukit.host.text import printable
from tpukit.runs import weights
from tpukit.runs.settings import setting
from tpukit.training.task import Task
from tpukit_tasks import finite
from tpukit_tasks.cdeit import data as sets
from tpukit_tasks.cdeit import diffusion
from tpukit_tasks.cdeit.simulator import disk, simulate
from tpukit_tasks.splits import find_copies

if TYPE_CHECKING:
    from torch import Tensor

    from tpukit_tasks.cdeit.model import CDEITModel

check_installed("scipy")  # which the scores need: missed now, and not after an epoch

CLASSICAL = dict(zip(("Tikhonov", "Gauss-Newton"), sets.BASELINES))  # name -> array of the files


@dataclasses.dataclass(frozen=True, kw_only=True)
class CDEIT(Task):
    """From 208 boundary voltages to a 128 x 128 conductivity image, by a diffusion transformer.

    Defaults are the published recipe."""

    name: ClassVar[str] = "cdeit"
    dataset: ClassVar[str] = "eit"
    dataset_parts: ClassVar[tuple[str, ...]] = sets.PARTS
    synthetic_size: ClassVar[int] = 400
    score: ClassVar[str] = "cc"
    score_names: ClassVar[dict[str, str]] = dict(
        cc="correlation", rmse="RMSE per pixel", psnr="PSNR, dB", ssim="SSIM"
    )
    evaluation_keys: ClassVar[tuple[str, ...]] = ("image", *CLASSICAL.values())
    fallback: ClassVar[Path] = sets.FALLBACK

    data: Literal["simulated", "uef2017", "ktc2023"] = setting("simulated", free=True)
    """Which test set is scored: its folder below dataset_dir (test, data2017 or test2017, data2023 or
    test2023) and its units. Training is always on train/."""
    network: Literal["published", "small"] = "published"
    """Sizes of the network: published, 109,719,108 parameters, or small, 5,542,096 parameters."""
    epochs: int = setting(50, free=True)
    """Passes over the training set."""
    batch_size: int = 16
    """Global batch size: images in one optimizer step, over all cores."""
    lr: float = 1e-5
    """Learning rate of Adam."""
    objective: Literal["l1", "l2"] = "l1"
    """Mean absolute or squared error of the predicted image. l1 is published, but first learns an empty
    image, because most of it is background: for over 600 steps in our small model. l2 does not."""
    clip_norm: float | None = 1.0
    """Largest norm of the gradients; larger ones are scaled down to it. None: no clipping."""
    ema_decay: float | None = 0.995
    """Decay of the moving average of the weights, which is evaluated and saved; None: no average."""
    sampling_steps: int = setting(5, free=True)
    """Steps of DDIM from noise to an image, 1 to 1000."""

    def __post_init__(self):
        super().__post_init__()
        diffusion.ddim_schedule(self.sampling_steps)  # refuses a value out of range

    # Data

    def datasets(self) -> tuple[sets.Impedance, sets.Impedance]:
        train, test = self._read(sets.TRAINING), self.test_set()
        learned, tested = ([row.tobytes() for row in data.arrays["voltages"]] for data in (train, test))
        train.notices += find_copies(learned, tested, test.names.tolist(), "samples")
        return train, test

    def test_set(self) -> sets.Impedance:
        return self._read(sets.CONVENTIONS[self.data])

    def _read(self, convention):
        assert self.dataset_dir is not None  # see `check_dataset_dir`
        folder = sets.find_split(self.dataset_dir, convention)
        # With other statistics than in training, the input would be out of distribution for these weights.
        if self.weights and (statistics := _carried_statistics(self.weights)):
            note = f"voltage statistics: those that {self.weights} was trained with"
            return sets.Impedance(folder, convention, statistics, note)
        return sets.Impedance(folder, convention, *sets.find_statistics(folder, self.dataset_dir))

    def data_signature(self, data):
        if "TR" not in data.arrays:  # a training set
            return {"files": data.contents}
        return {"files": data.contents, "sampling": f"{self.sampling_steps} steps"}

    def metadata(self, data):
        return dict(voltages=json.dumps([values.tolist() for values in data.statistics]))

    @staticmethod
    def synthesize(folder, size, rng):
        """Simulate tanks, four fifths of them to train: see `simulator.py`."""
        cut = size * 4 // 5
        simulate(folder, samples=cut, test_samples=size - cut)

    def example(self, count):
        rng = np.random.default_rng(0)
        return dict(
            image=rng.integers(-1, 2, (count, 1, sets.SIZE, sets.SIZE)).astype(np.float32),
            voltages=rng.standard_normal((count, 1, 16, 16)).astype(np.float32),
            key=np.arange(count),
            t=np.linspace(0, diffusion.STEPS - 1, count).astype(np.int64),
        )

    # Training

    def model(self) -> "CDEITModel":
        from tpukit_tasks.cdeit.model import NETWORKS, CDEITModel

        return CDEITModel(image_size=sets.SIZE, **NETWORKS[self.network])

    def optimizer(self, model):
        from torch.optim import Adam

        parameters = [p for p in model.parameters() if p.requires_grad]
        # Steps counted on the host would be constants of the compiled graph: on XLA the device counts.
        return Adam(parameters, lr=self.lr)

    def loss(self, model: "CDEITModel", batch: "dict[str, Tensor]", epoch: "Tensor | int") -> "Tensor":
        image, voltages, alphas = batch["image"], batch["voltages"], model.alphas_cumprod
        noise = diffusion.normal(batch["key"], image.shape[1:])
        squared = self.objective == "l2"
        return diffusion.loss(model, image, voltages, batch["t"], noise, alphas, squared=squared)

    # Sampling

    def predictor(self, model, runtime, epoch=None):
        """Compile two graphs: one draws the initial noise, the other takes any step of DDIM."""
        import torch

        def initial_noise(keys):
            return diffusion.normal(_noise_keys(keys, -1), (1, sets.SIZE, sets.SIZE))

        def sampling_step(x, voltages, keys, row):
            noise = diffusion.normal(_noise_keys(keys, row[0].long()), x.shape[1:])
            return diffusion.sampling_step(model, x, voltages, row, noise)

        start, step = runtime.inference(initial_noise), runtime.inference(sampling_step)
        # A tensor for each row: a slice of one tensor would be another graph at every step.
        schedule = torch.from_numpy(diffusion.ddim_schedule(self.sampling_steps)).float()
        rows = [runtime.put(row) for row in schedule]

        def predict(batch):
            x = start(batch["key"])
            for row in rows:
                x = step(x, batch["voltages"], batch["key"], row)
                runtime.world.heartbeat(runtime.world.step)
            return x

        return predict

    def export_inputs(self, batch):
        raise TpukitError(
            "CDEIT samples in several steps with noise in each, so there is no single graph to export:"
            " `tpukit predict` reconstructs the images of voltages"
        )

    def evaluate(self, predictions) -> dict:
        """Return rmse, psnr, ssim and cc inside the tank, means over the images; `images`, their number;
        not_finite, how many of them have NaN or infinite pixels, if any do: then the means are not finite,
        either; `beside`, the same scores of the classical methods and of an empty image."""
        from tpukit_tasks.cdeit.scores import image_scores

        inside, not_finite = disk(), 0
        scores = {name: [] for name in (*CLASSICAL, "all zero", "CDEIT")}
        for images, batch in predictions:
            valid = batch["valid"]
            truth = batch["image"][valid, 0].numpy()  # (B, S, S)
            image = images[valid, 0].float().numpy()
            not_finite += int((~np.isfinite(image[:, inside]).all(1)).sum())
            compared = {name: batch[key][valid].numpy() for name, key in CLASSICAL.items()}
            compared |= {"all zero": np.zeros_like(truth), "CDEIT": image}
            for name, reconstructed in compared.items():
                reconstructed = np.where(inside, reconstructed, 0)  # nothing outside the tank counts
                scores[name] += [image_scores(*pair, inside) for pair in zip(reconstructed, truth)]
        means = {
            method: {name: float(np.mean([row[name] for row in rows])) for name in self.score_names}
            for method, rows in scores.items()
        }
        ours = means.pop("CDEIT")
        # NaN is a method that was not run on these images.
        baselines = {name: mean for name, mean in means.items() if np.isfinite(mean["rmse"])}
        counts = dict(images=len(scores["CDEIT"]), not_finite=not_finite)
        if not not_finite:
            del counts["not_finite"]
        return dict(ours, **counts, beside=baselines)

    @staticmethod
    def verdict(scores: dict, last: dict) -> str:
        return finite.verdict(scores)

    def save_predictions(self, folder, predictions, data):
        """Write an npz named after the test set: prediction, TR and xs_gn in the units of its files, xs
        (N, S, S each), names."""
        convention = sets.CONVENTIONS[self.data]
        unit = convention.unit
        parts = []
        for images, batch in predictions:
            values = dict(prediction=images[:, 0] * unit, xs=batch["image"][:, 0])
            values |= dict(TR=batch["TR"] * unit, xs_gn=batch["xs_gn"] * convention.gauss_newton)
            parts.append({name: value[batch["valid"]].numpy() for name, value in values.items()})
        whole: dict = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        with files.atomic_file(folder / f"{self.data}.npz") as file:
            np.savez_compressed(file, **whole, names=data.names)

    def load_predictions(self, folder):
        path = folder / f"{self.data}.npz"
        if not path.is_file():
            return None
        convention = sets.CONVENTIONS[self.data]
        unit, gauss_newton = np.float32(convention.unit), np.float32(convention.gauss_newton)
        again = f"{path} is damaged; `tpukit test` writes it again"
        with reading(path, again, TpukitError), arrays.load(path) as saved:
            batch = dict(image=saved["xs"][:, None], TR=saved["TR"] / unit)
            batch["xs_gn"] = saved["xs_gn"] / gauss_newton
            return batch, saved["prediction"][:, None] / unit

    def panels(self, batch, prediction=None):
        is_own = "image" not in batch  # a user's own voltages
        columns = {} if is_own else {"conductivity": batch["image"][:, 0]}
        if is_own or prediction is None:
            columns["voltages, normalised"] = batch["voltages"][:, 0] / 3
        else:
            columns |= {name: batch[key] for name, key in CLASSICAL.items()}
        if prediction is not None:
            columns["CDEIT"] = prediction[:, 0]
        return [
            [(title, colour(np.asarray(image))) for title, image in zip(columns, images)]
            for images in zip(*columns.values())
        ]

    def results(self, batch, predictions):
        """Return image: (S, S) float32 in the unit of `data`'s files, NaN outside the tank. Raises
        TpukitError for what is not finite."""
        finite.require_finite(np.asarray(predictions)[:, 0, disk()])
        unit = np.float32(sets.CONVENTIONS[self.data].unit)
        images = np.where(disk(), np.asarray(predictions)[:, 0] * unit, np.float32(np.nan))
        return [dict(image=image) for image in images]

    def read_files(self, paths, best):
        """Read voltages from .npz (array ys), .npy, .csv or .txt: 208 numbers a sample, in the order and unit
        of `data`'s files."""
        statistics = _carried_statistics(best)
        if statistics is None:
            raise TpukitError(f"{best} does not say how its voltages were normalised: train it again")
        read = [sets.read_voltages(path) for path in paths]
        volts = np.float32(sets.CONVENTIONS[self.data].volts)
        maps = [sets.voltage_map(rows / volts, *statistics) for rows in read]
        for path, rows, voltages in zip(paths, read, maps):
            doubts = sets.find_silent(path.name, rows / volts, statistics[1])
            doubts += sets.doubtful_voltages(path.name, voltages)
            for sentence in doubts:
                print(printable(sentence))
        names = [f"{path.name}, {row + 1}" for path, rows in zip(paths, read) for row in range(len(rows))]
        return dict(voltages=np.concatenate(maps), key=np.arange(len(names))), names


def _carried_statistics(file: Path) -> sets.Statistics | None:
    """Return the statistics that weights were trained with, or None if their file does not say."""
    carried = weights.metadata(file).get("voltages")
    if not carried:
        return None
    with explained(f"{file}: the statistics of the voltages in its metadata are damaged"):
        mean, deviation = np.array(json.loads(carried), np.float32).reshape(2, *sets.PATTERN)
        return mean, deviation


def _noise_keys(keys, t):
    """(B,) keys of the noise at a timestep, from those of the samples; -1 is the start."""
    return keys * (diffusion.STEPS + 1) + t + 1


def colour(image):
    """(S, S) in [-1, 1] -> (S, S, 3): blue is resistive, red conductive, white the background; grey is NaN,
    or outside the tank."""
    level = np.clip(np.nan_to_num(image), -1, 1)[..., None]
    blue_or_red = np.where(level < 0, (0.13, 0.35, 0.65), (0.75, 0.15, 0.15))
    coloured = 1 - abs(level) * (1 - blue_or_red)
    grey = np.isnan(image)
    if image.shape == (sets.SIZE, sets.SIZE):
        grey |= ~disk()
    return np.where(grey[..., None], 0.9, coloured)
