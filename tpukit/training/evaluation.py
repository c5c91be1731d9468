"""What scores weights: `test` for a run, `evaluate` for a model, `predictions` for what both stand on."""

import contextlib
import dataclasses
import itertools
import json

from tpukit.devices.runtime import check_batch, open_runtime
from tpukit.host import environment
from tpukit.host.errors import TpukitError
from tpukit.runs import weights
from tpukit.training.data import BatchLoader, evaluation_plan


def test(task, run, *, runtime=None, progress=True):
    """Score the run's best weights, or `task.weights` where the run has none, on the test set. Returns the scores, on every
    rank.

    What the task keeps of its predictions is written to the run's folder predictions/. runtime: as for `train`.
    """
    with environment.explain_known_errors():
        best = run.path / "best.safetensors"
        path = task.weights if task.weights and not best.exists() else best
        task = dataclasses.replace(task, weights=path)
        task.check_dataset_dir()
        model = task.model()
        weights.load(model, path)
        data = task.test_set()
        runtime = runtime or open_runtime(environment.detect(), task.precision)
        check_batch(task.batch_size, runtime.cores)
        run = run if runtime.world.rank == 0 else run.read_only()
        run.print(f"testing {path} on {runtime}: {len(data)} samples")
        say_of(run, data)
        epoch, total = weights.epoch_of(path), -(-len(data) // task.batch_size)
        with progress_bar(
            f"testing {task.name}", total, shown=progress and runtime.world.rank == 0 and run.echo, unit="batch"
        ) as bar:
            done = itertools.count(1)

            def tick():
                bar.update()
                run.write_progress(name=f"testing {task.name}", unit="batch", step=next(done), total=total)

            folder = run.path / "predictions"
            scores = evaluate(task, runtime.place(model), data, runtime, epoch=epoch, check=tick, folder=folder)
        return json.loads(runtime.world.broadcast(json.dumps(scores))) if runtime.world.size > 1 else scores


def evaluate(task, model, data, runtime, *, epoch=None, check=lambda: None, folder=None):
    """Scores of a model on a device over a test set: `task.evaluate` on the predictions of every batch.

    Every sample counts once; the padding of the last batch is marked in `valid`. With several ranks each predicts its share,
    and rank 0 scores them all, in the order that one device would give; the other ranks return None. epoch: see
    `Workload.predict`. check: called between batches. folder: where the task keeps what it wants of the predictions.
    """
    feed = BatchLoader(data, runtime, on=task.data_on, workers=task.num_workers)
    found = predictions(task, model, feed, runtime, epoch=epoch, check=check)
    if runtime.world.rank != 0:
        return None
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        task.keep(folder, found, data)
    return task.evaluate(found)


def predictions(task, model, feed, runtime, *, epoch, check):
    """list of (prediction, what the task is `scored_with`), on the CPU: on rank 0 those of all ranks."""
    predict = task.predictor(model, runtime, epoch)
    compose = feed.compose if feed.resident is None else runtime.inference(feed.compose)
    found, unread = [], None

    def read(copied):
        found.extend(runtime.world.gather(copied()))

    model.eval()
    plan = evaluation_plan(len(feed.data), task.batch_size)
    with contextlib.closing(feed.batches(plan)) as batches:
        for batch in batches:
            batch = compose(batch)
            names = batch if task.scored_with is None else (*task.scored_with, "valid")
            copied = runtime.host_later((predict(batch), {name: batch[name] for name in names}))
            if unread is not None:  # one late, so that the device has something to do meanwhile
                read(unread)
            unread = copied
            runtime.heartbeat(runtime.step)
            check()
    if unread is None:
        raise TpukitError(f"{task.dataset_dir}: its test set has no samples to score; give it some")
    read(unread)
    return found


def say_of(run, *datasets):
    """Say what the datasets have to say of themselves, once."""
    for said in dict.fromkeys(getattr(data, "said", "") for data in datasets):
        if said:
            run.print(said)


def progress_bar(name, total, *, shown, initial=0, unit="step"):
    from tqdm.auto import tqdm

    return tqdm(total=total, initial=initial, desc=name, unit=unit, disable=not shown, mininterval=0.5)
