"""CDEIT: a conditional diffusion transformer for electrical impedance tomography (Shi et al., IEEE TIM 2025).

torch is imported where it is used, so that the help of the command line need not wait for it.
"""

import csv
import dataclasses
import functools
import io
import json
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from tpukit.host import files
from tpukit.host.errors import TpukitError, first_line
from tpukit.runs import weights
from tpukit.runs.run import setting
from tpukit.training.task import Workload
from tpukit.workloads.cdeit import diffusion
from tpukit.workloads.cdeit.data import CONVENTIONS, FALLBACK, PARTS, SIZE, TRAINING, Impedance, find_split, find_statistics
from tpukit.workloads.cdeit.simulator import disk, simulate

CLASSICAL = {"Tikhonov": "TR", "Gauss-Newton": "xs_gn"}  # name -> array of the files


@dataclasses.dataclass(frozen=True, kw_only=True)
class CDEIT(Workload):
    """From 208 boundary voltages to a 128 x 128 conductivity image, by a diffusion transformer.

    Defaults are the published recipe."""

    name: ClassVar[str] = "cdeit"
    dataset: ClassVar[str] = "eit"
    dataset_parts: ClassVar[tuple[str, ...]] = PARTS
    synthetic_size: ClassVar[int] = 400
    score: ClassVar[str] = "cc"
    evaluation_keys: ClassVar[tuple[str, ...]] = ("image", *CLASSICAL.values())
    fallback: ClassVar[Path] = FALLBACK

    data: Literal["simulated", "uef2017", "ktc2023"] = setting("simulated", free=True)
    """Which test set is scored: its folder below dataset_dir (test, data2017 or test2017, data2023 or test2023) and its units.
    Training is always on train/."""
    epochs: int = setting(50, free=True)
    """Passes over the training set."""
    batch_size: int = 16
    """Global batch size: images in one optimizer step, over all cores."""
    lr: float = 1e-5
    """Learning rate of Adam."""
    objective: Literal["l1", "l2"] = "l1"
    """Mean absolute or squared error of the predicted image. l1 is published; most of an image is background, and a short
    training with it stays long at predicting nothing else (over 600 steps in our small model), which l2 leaves at once."""
    clip_norm: float | None = 1.0
    """Gradients of a larger norm are scaled down to it; None does not clip."""
    ema_decay: float | None = 0.995
    """Decay of the moving average of the weights, which is what is scored and kept; None keeps no average."""
    sampling_steps: int = setting(5, free=True)
    """Steps of DDIM from noise to an image, 1 to 1000."""
    eta: float = setting(1.0, free=True)
    """Noise that DDIM adds on its way: 0 none, 1 as much as the training did."""
    sampler: Literal["ddim", "ancestral"] = setting("ddim", free=True)
    """ddim, or ancestral: all 1000 steps."""
    patch: int = 2
    """Side of the patches that become tokens."""
    width: int = 512
    """Channels of a token."""
    heads: int = 16
    """Attention heads."""
    window: int = 16
    """Side, in tokens, of the windows of the first two and last two blocks."""
    levels: int = 4
    """How often the token grid is halved on the way down."""
    checkpointing: bool = setting(False, free=True)
    """Compute activations again in the backward pass instead of keeping them: less memory, a third more time."""

    def __post_init__(self):
        super().__post_init__()
        self._schedule()
        if self.sampler == "ancestral" and self.sampling_steps not in (type(self).sampling_steps, diffusion.STEPS):
            raise TpukitError(
                f"sampling_steps={self.sampling_steps}: ancestral sampling takes all {diffusion.STEPS}; leave it out"
            )

    def _schedule(self):
        if self.sampler == "ancestral":
            return diffusion.ancestral_schedule()
        try:
            return diffusion.ddim_schedule(self.sampling_steps, self.eta)
        except ValueError as error:
            raise TpukitError(str(error)) from error

    # Data

    def datasets(self):
        root = Path(self.dataset_dir)
        training = find_split(root, TRAINING, "training set")
        return Impedance(training, TRAINING, *self._statistics(training), baselines=False), self.test_set()

    def test_set(self):
        root, convention = Path(self.dataset_dir), CONVENTIONS[self.data]
        folder = find_split(root, convention, f"{self.data} test set")
        return Impedance(folder, convention, *self._statistics(folder), baselines=True)

    def _statistics(self, folder):
        """The weights' own statistics where they carry them: others would make them see other voltages."""
        carried = weights.metadata(self.weights).get("voltages") if self.weights else None
        if carried is None:
            return find_statistics(folder, Path(self.dataset_dir))
        statistics = tuple(np.array(values, np.float32) for values in json.loads(carried))
        return statistics, f"voltage statistics: those that {self.weights} was trained with"

    def evaluation_signature(self):
        if self.sampler == "ancestral":
            return f"{self.data} by ancestral in {diffusion.STEPS} steps"
        return f"{self.data} by {self.sampler} in {self.sampling_steps} steps with eta {self.eta}"

    def metadata(self, data):
        return dict(voltages=json.dumps([values.tolist() for values in data.statistics]))

    @staticmethod
    def synthesize(folder, size, rng):
        """Simulated tanks, four fifths of them to train: see `simulator.py`."""
        cut = size * 4 // 5
        simulate(folder, samples=cut, test_samples=size - cut, seed=int(rng.integers(2**31)))

    def example(self, count):
        rng = np.random.default_rng(0)
        return dict(
            image=rng.integers(-1, 2, (count, 1, SIZE, SIZE)).astype(np.float32),
            voltages=rng.standard_normal((count, 1, 16, 16)).astype(np.float32),
            key=np.arange(count),
            t=np.linspace(0, diffusion.STEPS - 1, count).astype(np.int64),
        )

    # Training

    def model(self):
        from tpukit.workloads.cdeit.model import CDEITModel

        sizes = dict(patch=self.patch, width=self.width, heads=self.heads, window=self.window, levels=self.levels)
        try:
            return CDEITModel(image_size=SIZE, **sizes, checkpointing=self.checkpointing)
        except ValueError as error:
            raise TpukitError(str(error)) from error

    def optimizer(self, model):
        from torch.optim import Adam

        parameters = [p for p in model.parameters() if p.requires_grad]
        # Steps counted on an XLA device: counted on the host, they would change the program's constants with every step.
        return Adam(parameters, lr=self.lr, capturable=parameters[0].device.type == "xla")

    def loss(self, model, batch, epoch):
        image = batch["image"]
        noise = diffusion.normal(batch["key"], image.shape[1:])
        given = (image, batch["voltages"], batch["t"], noise, _bare(model).alphas_cumprod)
        return diffusion.loss(model, *given, squared=self.objective == "l2")

    # Sampling

    def predictor(self, model, runtime, epoch=None):
        """One program draws the first noise, another makes one step, whatever the step."""
        import torch

        first = runtime.inference(_first_noise)
        step = runtime.inference(functools.partial(_sampling_step, model))
        # One tensor a row: a slice of one tensor would be another program for every step.
        rows = [runtime.put({"row": torch.tensor(row, dtype=torch.float32)})["row"] for row in self._schedule()]

        def predict(batch):
            x = first(batch["key"])
            for row in rows:
                x = step(x, batch["voltages"], batch["key"], row)
                runtime.heartbeat(runtime.step)
            return x

        return predict

    def evaluate(self, predictions):
        """dict: rmse, psnr, ssim, cc inside the disk, means over the images; beside them those of the classical methods; how
        many predictions were broken: those with a number that is not finite, which count as empty images."""
        from tpukit.workloads.cdeit.scores import Scores

        ours, zero, classical = Scores(), Scores(), {name: Scores() for name in CLASSICAL}
        broken = 0
        for images, batch in predictions:
            valid = batch["valid"]
            truth, made = batch["image"][valid, 0].numpy(), images[valid, 0].numpy()
            whole = np.isfinite(made).all((1, 2), keepdims=True)
            broken += int((~whole).sum())
            ours.add(np.where(whole, made, 0), truth)
            zero.add(np.zeros_like(truth), truth)
            for name, key in CLASSICAL.items():
                classical[name].add(batch[key][valid].numpy(), truth)
        beside = {name: method.mean() for name, method in {**classical, "all zero": zero}.items()}
        return dict(
            ours.mean(), images=len(ours.rows), broken=broken, beside={name: mean for name, mean in beside.items() if mean}
        )

    def save_predictions(self, folder, predictions, data):
        """Write NAME.npz and NAME.mat, where NAME is the set's: prediction, TR and xs in the unit of its files, xs_gn, names;
        and NAME.csv, the scores of every image and method and their means."""
        from scipy.io import savemat

        from tpukit.workloads.cdeit.scores import NAMES, Scores

        def column(pick):
            return np.concatenate([pick(images, b)[b["valid"]].view(-1, SIZE, SIZE).numpy() for images, b in predictions])

        unit, names = CONVENTIONS[self.data].unit, data.names.tolist()
        ours, truth = column(lambda images, b: images), column(lambda images, b: b["image"])
        classical = {key: column(lambda images, b: b[key]) for key in CLASSICAL.values()}
        arrays = dict(prediction=ours * unit, TR=classical["TR"] * unit, xs_gn=classical["xs_gn"], xs=truth)
        with files.atomic_file(folder / f"{self.data}.npz") as file:
            np.savez_compressed(file, **arrays, names=names)
        with files.atomic_file(folder / f"{self.data}.mat") as file:
            savemat(file, dict(arrays, names=np.array(names, dtype=object)))
        lines = io.StringIO()
        table = csv.writer(lines)
        table.writerow(("image", "method", *NAMES))
        methods = {"CDEIT": ours, **dict(zip(CLASSICAL, classical.values())), "all zero": np.zeros_like(truth)}
        for method, made in methods.items():
            scores = Scores()
            scores.add(made, truth)
            mean = scores.mean() or dict.fromkeys(NAMES)
            table.writerows((name, method, *row.values()) for name, row in zip([*names, "mean"], [*scores.rows, mean]))
        files.write_atomic(folder / f"{self.data}.csv", lines.getvalue())

    def load_predictions(self, folder):
        path = folder / f"{self.data}.npz"
        if not path.is_file():
            return None
        unit = np.float32(CONVENTIONS[self.data].unit)
        try:
            with np.load(path, allow_pickle=False) as arrays:
                batch = dict(image=arrays["xs"][:, None], TR=arrays["TR"] / unit, xs_gn=arrays["xs_gn"])
                return batch, arrays["prediction"][:, None] / unit
        except Exception as error:  # zipfile, zlib and numpy raise many types for a damaged file
            raise TpukitError(f"{path} is damaged ({first_line(error)}); `tpukit test` makes it anew") from error

    def panels(self, batch, prediction=None):
        import torch

        rows = []
        for i, image in enumerate(np.asarray(batch["image"])):
            row = [("conductivity", tint(image[0]))]
            if prediction is not None:
                row += [(name, tint(np.asarray(batch[key][i]))) for name, key in CLASSICAL.items()]
                row += [("CDEIT", tint(np.asarray(prediction[i, 0])))]
            else:
                row += [("voltages, normalised", tint(np.asarray(batch["voltages"][i, 0]) / 3))]
                if "t" in batch:
                    given, t = torch.as_tensor(batch["image"][i : i + 1]), torch.as_tensor(batch["t"][i : i + 1])
                    noise = diffusion.normal(torch.as_tensor(batch["key"][i : i + 1]), given.shape[1:])
                    noisy = diffusion.noisy(given, t, noise, torch.tensor(diffusion.alphas_cumprod(), dtype=torch.float32))
                    row += [(f"noisy at step {int(t)}", tint(noisy[0, 0].numpy()))]
            rows.append(row)
        return rows


def _bare(model):
    """The model inside of DistributedDataParallel."""
    return getattr(model, "module", model)


def _sampling_step(model, x, voltages, keys, row):
    noise = diffusion.normal(_sampling_keys(keys, row[0].long()), x.shape[1:])
    return diffusion.update(model, x, voltages, row, noise)


def _first_noise(keys):
    return diffusion.normal(_sampling_keys(keys, -1), (1, SIZE, SIZE))


def _sampling_keys(keys, t):
    """(B,) keys of the noise at a timestep, from those of the samples; -1 is the start."""
    return keys * (diffusion.STEPS + 1) + t + 1


def tint(image):
    """(S, S) in [-1, 1] -> (S, S, 3): blue is resistive, red conductive, white the background; grey is not a number, or not
    the tank."""
    level = np.clip(np.nan_to_num(image), -1, 1)[..., None]
    ends = np.where(level < 0, (0.13, 0.35, 0.65), (0.75, 0.15, 0.15))
    nothing = np.isnan(image) | (~disk() if image.shape == (SIZE, SIZE) else False)
    return np.where(nothing[..., None], 0.9, 1 - abs(level) * (1 - ends))
