"""`tpukit doctor`, `plan`, `migrate`, `simulate` and `rent`: tools that stand alone."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Annotated

from tpukit.cli.options import parse, to_stderr
from tpukit.host.errors import TpukitError


def doctor(argv):
    from tpukit import workloads
    from tpukit.host import environment
    from tpukit.host.known_errors import about
    from tpukit.tools import doctor as tool

    @dataclasses.dataclass(frozen=True)
    class Doctor:
        """What is here, what is wrong, and how to fix it. Exit code 1 if something blocks training."""

        json: bool = False
        """Print one JSON object, for machines."""
        model: str | None = None
        """Also compute this workload's loss and gradients on the device, in fp32, bf16 and (GPUs) fp16, and say how far the
        model's output moves."""
        weights: Path | None = None
        """Weights for that model; fresh ones unless given."""
        error: str | None = None
        """Look at nothing; say what to do about this error message."""

    options = Doctor()
    if argv:  # without any it answers where tyro is missing, too
        import tyro

        options = tyro.cli(Doctor, args=argv, prog="tpukit doctor", config=(tyro.conf.FlagCreatePairsOff,))
    if options.error is not None:
        fix = about(options.error)
        unknown = "This message is not known here. `tpukit doctor` looks at the machine; "
        print(fix or f"{unknown}docs/TROUBLESHOOTING.md lists what is known.")
        return 0 if fix else 1
    workload = workloads.find(options.model) if options.model else None
    env = environment.detect()
    checks = tool.examine(env)
    if workload and not tool.blocked(checks):
        checks += tool.try_model(workload(weights=options.weights), env)
    if options.json:
        found = {**dataclasses.asdict(env), "checks": [dataclasses.asdict(c) for c in checks], "blocked": tool.blocked(checks)}
        print(json.dumps(found, indent=1, default=str))
    else:
        print(f"{env}\n\n{tool.table(checks)}")
    return 1 if tool.blocked(checks) else 0


def plan(argv):
    from tpukit.tools import plan as tool

    task, options = parse("plan", argv, _plan_options)
    found = tool.plan(
        task, **{name: value for name, value in dataclasses.asdict(options).items() if name != "json"}, log=to_stderr
    )
    if options.json:
        print(json.dumps(dataclasses.asdict(found), indent=1))
    else:
        print(found)
    return 0 if found.largest_batch else 1


def _plan_options():
    import tyro

    from tpukit.devices.chips import MACHINES
    from tpukit.tools.plan import PARTS

    @dataclasses.dataclass(frozen=True)
    class PlanOptions:
        chip: Annotated[str, tyro.conf.arg(metavar="{" + ",".join(MACHINES) + "}")] = "v5e-1"
        """The TPU: one v5e chip (Colab), eight (Kaggle; 8 replicas and their gradient sum), or one v6e chip."""
        batch_sizes: tuple[int, ...] = ()
        """Global batch sizes to ask about; --batch-size alone unless given."""
        part: Annotated[str, tyro.conf.arg(metavar="{" + ",".join(PARTS) + "}")] = "train"
        """train: the whole training step. evaluate: the programs that predict a batch (of CDEIT: its sampler)."""
        find_batch: bool = False
        """Bisect the largest batch that fits, to within a sixteenth. Every try is a compilation."""
        json: bool = False
        """Print one JSON object, for machines."""

    return PlanOptions


def migrate(argv):
    import tyro

    from tpukit.tools import migrate as tool

    def options(
        files: Annotated[tuple[Path, ...], tyro.conf.Positional],
        fix: bool = False,
        format: Annotated[str, tyro.conf.arg(metavar="{" + ",".join(tool.FORMATS) + "}")] = "text",
    ):
        """What in PyTorch code will not work, or will be slow, on a TPU: by line, each with its fix. Runs nothing of it.

        Exit code 1 where something that will not work is left.

        Args:
            files: scripts, notebooks, or folders of them.
            fix: rewrite what is safe to rewrite, in place, and show the difference.
            format: text, json, github (annotations of a workflow) or sarif (editors, code scanning).
        """
        return files, fix, format

    files, fix, form = tyro.cli(options, args=argv, prog="tpukit migrate", config=(tyro.conf.FlagCreatePairsOff,))
    if form not in tool.FORMATS:
        raise TpukitError(f"no format {form!r}; there are: {', '.join(tool.FORMATS)}")
    findings = []
    examined = [(path, *tool.examine(path)) for path in tool.files_in(files)]  # all before any is rewritten
    for path, found, fixed in examined:
        if fix and any(f.fixable for f in found):
            to_stderr(tool.difference(path, fixed)) if form != "text" else print(tool.difference(path, fixed))
            tool.write(path, fixed)
            found, _ = tool.examine(path)
        findings += found
    print(tool.FORMATS[form](findings))
    return 1 if any(f.level == "error" for f in findings) else 0


def simulate(argv):
    import tyro

    from tpukit.workloads.cdeit import simulator

    @dataclasses.dataclass(frozen=True)
    class Simulate:
        """Make a set for electrical impedance tomography: train/ and test/ with an npz file for every sample.

        Files that are there already are kept, so a simulation that was stopped goes on."""

        out: Path = Path("data")
        """Folder of the set."""
        samples: int = 10_000
        """Training samples."""
        test_samples: int = 500
        """Test samples."""
        workers: int = os.cpu_count() or 1
        """Processes."""
        seed: int = 0
        """Every sample depends on the seed and its number alone."""
        snr_db: float = 40.0
        """Signal to noise of the voltages, in decibels."""
        mismatch: float = 0.15
        """How far a real tank is from the model: relative deviation of every voltage's gain, and of the gain of all."""
        check: Path | None = None
        """Make nothing; compare the model with real samples in this folder (UEF2017's data2017/, for instance)."""

    if not argv or argv[0] != "eit":
        raise TpukitError("`tpukit simulate` knows one thing to simulate: eit, a tank for electrical impedance tomography")
    options = tyro.cli(Simulate, args=argv[1:], prog="tpukit simulate eit")
    if options.check:
        found = simulator.compare_with_measurements(options.check)
        worst = min(found, key=found.get)
        print(
            f"correlation of simulated and measured voltages: {sum(found.values()) / len(found):.4f} on average over "
            f"{len(found)} samples, {found[worst]:.4f} for the worst ({worst})"
        )
        return
    settings = {name: value for name, value in dataclasses.asdict(options).items() if name not in ("out", "check")}
    simulator.simulate(options.out, **settings)
    print(f"{options.samples} training and {options.test_samples} test samples: {options.out}")


def rent(argv):
    import tyro

    from tpukit.tools import rent as tool

    tyro.cli(tool.rent, args=argv, prog="tpukit rent", config=(tyro.conf.FlagCreatePairsOff,))
