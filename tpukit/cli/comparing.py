"""`tpukit compare`: measure here, or merge what was measured."""

import contextlib
import dataclasses
from pathlib import Path
from typing import Annotated

from tpukit.cli.options import parse, to_stderr
from tpukit.host.errors import TpukitError
from tpukit.workloads import WORKLOADS


def compare(argv):
    if argv and argv[0] in WORKLOADS:
        return _measure(argv)
    return _merge(argv)


def _measure(argv):
    from tpukit.host import environment
    from tpukit.tools import compare as tool
    from tpukit.workloads.datasets import find_dataset

    task, options = parse("compare", argv, _compare_options)
    env = environment.detect()
    size = tool.SYNTHETIC_IMAGES.get(task.name)
    out = options.out or tool.file_for(env.outputs / "comparison", task, env, options.cores)
    tool.check_writable(out)  # before a dataset is unpacked
    found = find_dataset(env, task.dataset, task.dataset_dir, fallback=task.fallback or False, size=size)
    how = {name: value for name, value in dataclasses.asdict(options).items() if name != "out"}
    measured = tool.measure_here(dataclasses.replace(task, dataset_dir=found), out=out, log=to_stderr, **how)
    print(f"{measured.table()}\n\nNext, with the files of other machines beside it: tpukit compare {out.parent}/*.json")


def _compare_options():
    import tyro

    from tpukit.launching.launcher import PARALLEL

    @dataclasses.dataclass(frozen=True)
    class CompareOptions:
        batch_sizes: tuple[int, ...] = ()
        """Global batch sizes; unless given they double from --batch-size on, until a step does not fit."""
        steps: int = 20
        """Timed steps of each batch size, after the first ones."""
        max_batch: int | None = None
        """Where doubling ends; on a CPU after one doubling unless given."""
        out: Path | None = None
        """The JSON file; comparison/WORKLOAD-HARDWARE-PLACE.json in the output folder of this machine unless given."""
        cores: int | None = None
        """TPU cores or GPUs to use; all that are here unless given. On a CPU: processes, one unless given."""
        parallel: Annotated[str, tyro.conf.arg(metavar="{" + ",".join(PARALLEL) + "}")] = PARALLEL[0]
        """processes: one for each core. spmd: one program over all TPU cores of this host."""

    return CompareOptions


def _merge(argv):
    import tyro

    from tpukit.host import environment
    from tpukit.reporting import figures
    from tpukit.tools import compare as tool
    from tpukit.tools import prices as price_table

    @dataclasses.dataclass(frozen=True)
    class Merge:
        """Which hardware finishes a training in time, in how many sessions, at what cost: from files that
        `tpukit compare WORKLOAD` wrote here and elsewhere, published figures, and the bounds of `tpukit plan`.

        `tpukit compare WORKLOAD --help` lists the options of measuring."""

        files: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
        """Files of one workload; without any, the published figures alone."""
        epochs: int = 400
        """Of the whole training."""
        images: int | None = None
        """Of an epoch; those of the measured set unless given, or 800 as published where it was made up."""
        batch_size: int | None = None
        """Count with this batch size alone; with each hardware's fastest unless given."""
        deadline_h: float | None = None
        """Hours on the calendar until it has to be done."""
        budget_usd: float | None = None
        """US dollars that it may cost."""
        spot: bool = False
        """Count with Google Cloud's prices of spare capacity, which can be taken away at any time."""
        prices: Path | None = None
        """A copy of the table of prices, edited."""
        prices_out: Path | None = None
        """Write a copy of the table of prices there, to be edited, and do nothing else."""
        usd_per_kwh: float = price_table.USD_PER_KWH
        """Electricity, for local cards."""
        plan: tuple[str, ...] = ()
        """TPUs that are not here (v5e-1, v5e-8, v6e-1): ask their compiler for bounds. Takes minutes."""
        picture: Path | None = None
        """Keep the plots there as a PNG file; beside the first file, or where that cannot be written in the output folder,
        unless given."""

    for name in argv[:1]:
        if not name.startswith("-") and not Path(name).exists():
            raise TpukitError(f"{name!r} is neither a workload ({', '.join(WORKLOADS)}) nor a file of `tpukit compare`")
    options = tyro.cli(Merge, args=argv, prog="tpukit compare", config=(tyro.conf.FlagCreatePairsOff,))
    if options.prices_out:
        path = price_table.copy(options.prices_out)
        print(f"prices: {path}. Edit it, then: tpukit compare FILES --prices {path}")
        return
    if options.picture and options.picture.suffix.lower() != ".png":
        raise TpukitError(f"--picture {options.picture}: the plots are a PNG file, whose name ends in .png")
    measurements = [tool.Measurement.read(path) for path in options.files]
    picture = options.picture or _place_of_picture(options.files, environment.detect().outputs / "comparison")
    tool.check_writable(picture)
    prices = price_table.read(options.prices)
    plans = tool.plan_recipe(measurements, options.plan, batch_size=options.batch_size, log=to_stderr)
    counted = {name: getattr(options, name) for name in ("epochs", "images", "batch_size")}
    asked = {name: getattr(options, name) for name in ("deadline_h", "budget_usd", "spot", "usd_per_kwh")}
    found = tool.compare(measurements, plans=plans, prices=prices, **counted, **asked)
    figures.show_comparison(found, picture)


def _place_of_picture(files, outputs):
    from tpukit.tools import compare as tool

    if files:
        with contextlib.suppress(TpukitError):  # such as Kaggle's inputs, which are read-only
            tool.check_writable(files[0].parent / "comparison.png")
            return files[0].parent / "comparison.png"
    return outputs / "comparison.png"
