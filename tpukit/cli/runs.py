"""`tpukit train`, `test`, `show`, `report` and `watch`: a run is made, scored and looked at."""

import dataclasses
from pathlib import Path
from typing import Annotated

from tpukit.cli.options import launch_settings, parse, quiet_unless_first, with_dataset
from tpukit.host.errors import TpukitError
from tpukit.host.tables import Sentences

# Settings that a test does not take over from the training.
NOT_OF_THE_RUN = ("weights", "batch_size", "precision")


def train(argv):
    from tpukit.host import environment
    from tpukit.launching.launcher import launch
    from tpukit.reporting import findings
    from tpukit.runs.backup import find_run
    from tpukit.runs.run import Run
    from tpukit.training.loop import train as run_training

    task, options = parse("train", argv)
    env = environment.detect()
    with quiet_unless_first():
        task = with_dataset(task, env)
    path = options.run or env.outputs / task.name
    earlier = None if (path / "config.json").is_file() else find_run(env, path.name)
    run = Run.open(path, task, backup=options.backup, earlier=earlier)
    scores = launch(run_training, task, run, **launch_settings(options))
    if scores and environment.rank() == 0:
        print(f"\n{findings.scores_table(scores)}\n\nrun: {run.path}  (tpukit show {run.path})")


def test(argv):
    from tpukit.host import environment
    from tpukit.launching.launcher import launch
    from tpukit.reporting import figures, findings
    from tpukit.runs.run import Run
    from tpukit.training.evaluation import test as run_test

    task, options = parse("test", argv)
    env = environment.detect()
    path = options.run or env.outputs / (f"{task.name}-test" if task.weights else task.name)
    if task.weights and (path / "best.safetensors").exists():
        raise TpukitError(f"--weights {task.weights} or the best weights of the run {path}? Give one of --weights and --run")
    if (path / "config.json").is_file():
        task = _as_trained(task, Run.find(path).config)
    with quiet_unless_first():
        task = with_dataset(task, env)
    run = Run.find(path, trained=False)
    scores = launch(run_test, task, run, **launch_settings(options))
    if scores and environment.rank() == 0:
        print(f"\n{findings.scores_table(scores)}")
        if task.load_predictions(run.path / "predictions"):
            figures.show_predictions(run, task, count=8)
            print(f"predictions: {run.path / 'predictions'}")


def _as_trained(task, config):
    """The task with the run's own settings (of its model, above all), where the command line leaves them at their defaults."""
    from tpukit.training.task import from_settings

    if config["workload"] != task.name:
        return task
    trained = from_settings(type(task), config["settings"])
    fixed = [f for f in dataclasses.fields(task) if not f.metadata.get("free") and f.name not in NOT_OF_THE_RUN]
    own = {f.name: getattr(trained, f.name) for f in fixed if getattr(task, f.name) == f.default}
    return dataclasses.replace(task, **own)


def show(argv):
    import tyro

    from tpukit.reporting import figures

    def options(run: Annotated[Path, tyro.conf.Positional]) -> Path:
        """Scores and curves of a run.

        Args:
            run: the folder of a run.
        """
        return run

    figures.show(tyro.cli(options, args=argv, prog="tpukit show"))


def report(argv):
    import tyro

    from tpukit import workloads
    from tpukit.host import environment
    from tpukit.reporting import figures
    from tpukit.runs.run import Run

    def options(
        run: Annotated[Path, tyro.conf.Positional],
        trace: int = 0,
        hlo: bool = False,
        dataset_dir: Path | None = None,
        cores: int | None = None,
        parallel: str = "processes",
    ):
        """What the accelerator did in a run: compilations and their causes, where a step's time went, memory.

        Args:
            run: the folder of a run.
            trace: also run so many steps of its task once more, here, and keep a profiler's trace of them for TensorBoard.
                Names the lines of operations that ran on the CPU instead or waited for the device. The run itself is not
                touched.
            hlo: also keep the step's program as the XLA device gets it, with the line of each operation.
            dataset_dir: the dataset for these steps, where it is not where the run found it.
            cores: of these steps, as for train.
            parallel: of these steps, as for train.
        """
        return Run.find(run), trace, hlo, dataset_dir, dict(cores=cores, parallel=parallel)

    run, steps, hlo, dataset_dir, how = tyro.cli(
        options, args=argv, prog="tpukit report", config=(tyro.conf.FlagCreatePairsOff,)
    )
    figures.show_report(run)
    if steps or hlo:
        from tpukit.tools.trace import trace
        from tpukit.training.task import from_settings

        own = run.config["settings"] | dict(weights=None)  # those it started from, where it has no best ones, may be gone
        task = from_settings(workloads.find(run.config["workload"]), own)
        task = dataclasses.replace(task, dataset_dir=dataset_dir or task.dataset_dir or Path("."))
        traced = trace(with_dataset(task, environment.detect()), run, steps=steps or 1, hlo=hlo, **how)
        print(f"\n{Sentences(traced.findings())}")
        if traced.rows:
            print(f"\n{traced.table()}")


def watch(argv):
    import tyro

    from tpukit.runs.run import Run
    from tpukit.tools import watch as tool

    def options(run: Annotated[Path, tyro.conf.Positional], interval_s: float = 2.0, once: bool = False):
        """A run that another process trains: how far, how fast, what it scored, and how busy the chip is.

        Args:
            run: the folder of a run.
            interval_s: seconds from one look to the next.
            once: look once.
        """
        return Run.find(run), interval_s, once

    run, interval_s, once = tyro.cli(options, args=argv, prog="tpukit watch", config=(tyro.conf.FlagCreatePairsOff,))
    tool.watch(run, interval_s=interval_s, once=once)
