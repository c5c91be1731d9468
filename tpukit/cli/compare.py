"""`tpukit compare`: measure a task here, or merge what was measured here and elsewhere."""

import dataclasses
import shutil
from pathlib import Path

import tyro

import tpukit
from tpukit.cli.options import CoreOptions, to_stderr, with_dataset
from tpukit.host import files as host_files
from tpukit.host.errors import TpukitError
from tpukit.tasks import TASKS
from tpukit.training.task import Task


@dataclasses.dataclass(frozen=True)
class MeasureOptions(CoreOptions):
    batch_sizes: tuple[int, ...] = ()
    """Global batch sizes; by default they double from --batch-size on, until a step does not fit; on a CPU
    once."""
    steps: int = 20
    """Timed steps of each batch size, after the first ones."""
    out: Path | None = None
    """The JSON file; by default comparison/TASK-HARDWARE-PLACE.json in the output folder of this machine."""


def measure(task: Task, options: MeasureOptions) -> None:
    """Measure a task here at several batch sizes (TASK), or compare such measurements of several machines
    (FILES)."""
    from tpukit.tools.measure import SYNTHETIC_IMAGES, check_out, file_for, measure_here

    env = tpukit.detect()
    out = options.out or file_for(env.outputs / "comparison", task, env, options.cores)
    check_out(out)  # before a dataset is unpacked
    task = with_dataset(task, env, size=SYNTHETIC_IMAGES.get(task.name))
    settings = dataclasses.asdict(dataclasses.replace(options, out=out))
    measured = measure_here(task, log=to_stderr, **settings)
    following = f"tpukit compare {out.parent}/*.json"
    print(f"{measured.table()}\n\nNext, with the files of other machines next to it: {following}")


def merge(
    files: tyro.conf.Positional[tuple[Path, ...]] = (),
    epochs: int = 400,
    spot: bool = False,
    prices: Path | None = None,
    prices_out: Path | None = None,
) -> None:
    """In how many sessions, hours and dollars which hardware trains: from FILES that `tpukit compare TASK`
    wrote. The word merge may be left out.

    Args:
        files: files of one task; without any, the published figures alone.
        epochs: epochs of the whole training.
        spot: count with Google Cloud's prices of spare capacity, which can be taken away at any time.
        prices: an edited copy of the price table.
        prices_out: write a copy of the price table there, to be edited, and do nothing else.
    """
    from tpukit.tools.measure import PRICES, Measurement, compare, read_prices

    if prices_out:
        if prices_out.exists():
            raise TpukitError(f"{prices_out} already exists: choose another name, or read it with --prices")
        with host_files.explain_unwritable(prices_out.parent):
            prices_out.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(PRICES, prices_out)
        print(f"prices: {prices_out}. Edit it, then: tpukit compare FILES --prices {prices_out}")
        return
    for path in files:
        if not path.exists():
            names = ", ".join(TASKS)
            raise TpukitError(f"'{path}' is neither a task ({names}) nor a file of `tpukit compare TASK`")
    comparison = compare(
        [Measurement.read(path) for path in files],
        prices=read_prices(prices or PRICES),
        epochs=epochs,
        spot=spot,
    )
    tpukit.show_comparison(comparison, tpukit.detect().outputs / "comparison/comparison.png")
