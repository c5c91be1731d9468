"""`tpukit compare`: measure a task here, or merge what was measured here and elsewhere."""

import dataclasses
from pathlib import Path

import tyro

from tpukit.cli.options import CoreOptions, to_stderr, with_dataset
from tpukit.host.errors import TpukitError
from tpukit.tasks import TASKS


@dataclasses.dataclass(frozen=True)
class MeasureOptions(CoreOptions):
    batch_sizes: tuple[int, ...] = ()
    """Global batch sizes; by default they double from --batch-size on, until a step does not fit; on a CPU
    once."""
    steps: int = 20
    """Timed steps of each batch size, after the first ones."""
    out: Path | None = None
    """The JSON file; by default comparison/TASK-HARDWARE-PLACE.json in the output folder of this machine."""


def measure(task, options):
    """Measure a task here at several batch sizes (TASK), or compare such measurements of several machines
    (FILES)."""
    from tpukit.host import environment
    from tpukit.tools import compare as tool

    env = environment.detect()
    out = options.out or tool.file_for(env.outputs / "comparison", task, env, options.cores)
    tool.check_out(out)  # before a dataset is unpacked
    task = with_dataset(task, env, size=tool.SYNTHETIC_IMAGES.get(task.name))
    measured = tool.measure_here(task, log=to_stderr, **dataclasses.asdict(options) | dict(out=out))
    print(
        f"{measured.table()}\n\nNext, with the files of other machines next to it: tpukit compare"
        f" {out.parent}/*.json"
    )


def merge(
    files: tyro.conf.Positional[tuple[Path, ...]] = (),
    epochs: int = 400,
    images: int | None = None,
    batch_size: int | None = None,
    deadline_h: float | None = None,
    budget_usd: float | None = None,
    spot: bool = False,
    prices: Path | None = None,
    prices_out: Path | None = None,
    plan: tuple[str, ...] = (),
):
    """Which hardware finishes a training in time, and at what cost: from FILES that `tpukit compare TASK`
    wrote. The word merge may be left out.

    Args:
        files: files of one task; without any, the published figures alone.
        epochs: epochs of the whole training.
        images: images in an epoch; by default those of the largest measured set, but 800, as published, for a
        synthetic set
            of MSHNet.
        batch_size: use only this batch size; by default each hardware's fastest.
        deadline_h: hours of calendar time until it must be done.
        budget_usd: US dollars that it may cost.
        spot: count with Google Cloud's prices of spare capacity, which can be taken away at any time.
        prices: an edited copy of the price table.
        prices_out: write a copy of the price table there, to be edited, and do nothing else.
        plan: TPUs to add by their compiler's figures (v5e-1, v5e-8, v6e-1); you need not have one. Takes
        minutes.
    """
    from tpukit.host import environment
    from tpukit.reporting import display
    from tpukit.tools import compare as tool
    from tpukit.tools import prices as price_table

    if prices_out:
        path = price_table.copy(prices_out)
        print(f"prices: {path}. Edit it, then: tpukit compare FILES --prices {path}")
        return
    for path in files:
        if not path.exists():
            names = ", ".join(TASKS)
            raise TpukitError(f"'{path}' is neither a task ({names}) nor a file of `tpukit compare TASK`")
    measurements = [tool.Measurement.read(path) for path in files]
    picture = environment.detect().outputs / "comparison/comparison.png"
    tool.check_writable(picture)
    price_rows = price_table.read(prices)  # before minutes of planning
    comparison = tool.compare(
        measurements,
        plans=tool.plan_recipe(measurements, plan, batch_size=batch_size, log=to_stderr),
        prices=price_rows,
        epochs=epochs,
        images=images,
        batch_size=batch_size,
        deadline_h=deadline_h,
        budget_usd=budget_usd,
        spot=spot,
    )
    display.show_comparison(comparison, picture)
