"""Records of a run in, sentences and tables out. Pure functions: no files, no device, no drawing."""

import math
from pathlib import Path
from types import UnionType
from typing import NamedTuple, get_args, get_origin

from tpukit.devices import LONG_COMPILE_S
from tpukit.host.tables import GIB, Table, format_duration
from tpukit.tasks import TASKS, find

# What is read here of a record, by its kind. What may be None may be missing, too.
SPEED = dict(
    seconds=float, images_per_s=float, wait_s=float, to_device_s=float | None, from_device_s=float | None
)
SPEED |= dict(
    memory=list[tuple[float, float]], counters=dict(fallbacks=dict[str, int] | None)
)  # {} where nothing compiles
FIELDS = dict(
    start=dict(device=str, max_graphs=int | None, batch_size=int | None),
    train=dict(loss=float | None, grad_norm=float | None, lr=float | None, speed=SPEED),
    stopped=dict(epoch=int, patience=int),
    evaluation=dict(
        epoch=int, kept=bool | None, scores=dict(beside=dict[str, dict] | None), speed=dict(seconds=float)
    ),
    compile=dict(seconds=float, what=str | None, why=list[str] | None),
)
PROGRESS = dict(step=int, total=int, unit=str)


def valid_records(records):
    """The records without the damaged ones: a bit that flipped on a disk can leave JSON with a name or a
    value less."""
    found = [record for record in records if _fits(record, dict(kind=str, step=int))]
    return [record for record in found if _fits(record, FIELDS.get(record["kind"], {}))]


def _fits(value, kind):
    """Whether a value of JSON is of a kind: a type as in annotations, or a dict of the kinds of some of its
    values."""
    if isinstance(kind, dict):
        return isinstance(value, dict) and all(_fits(value.get(name), of_it) for name, of_it in kind.items())
    origin, inner = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return any(_fits(value, one) for one in inner)
    if origin is list:
        return isinstance(value, list) and all(_fits(item, inner[0]) for item in value)
    if origin is tuple:  # which JSON does not have
        return isinstance(value, list) and len(value) == len(inner) and all(map(_fits, value, inner))
    if origin is dict:
        return isinstance(value, dict) and all(_fits(item, inner[1]) for item in value.values())
    if kind in (int, float):  # neither NaN nor infinity, nor an integer too large for a float
        return isinstance(value, (int, kind)) and not isinstance(value, bool) and abs(value) < 2**63
    return isinstance(value, kind)


# Settings, scores, curves


def settings_table(config, defaults=()):
    """A task's settings. config: dict(task, settings). defaults: names of those to fold, because they are
    defaults."""
    settings = config["settings"].items()
    rows = [row for row in settings if row[0] not in defaults]
    folded = [row for row in settings if row[0] in defaults]
    title, summary = f"Settings of {config['task']}", f"{len(folded)} settings at their defaults"
    return Table(title, ("setting", "value"), rows, folded=folded, summary=summary)


def scores_table(scores, title="Scores"):
    """The scores of an evaluation; `beside` holds a dict of the same scores for each column of a
    comparison."""
    beside = scores.get("beside") or {}
    rows = []
    for name, value in scores.items():
        if isinstance(value, (int, float)):
            values = [value, *(other.get(name, "") for other in beside.values())]
            rows.append((name, *map(_format_number, values)))
    return Table(title, ("score", "value", *beside), rows)


def kept_evaluation(evaluations):
    """The record of the evaluation whose weights the run kept as the best, or None."""
    return next((record for record in reversed(evaluations) if record.get("kept")), None)


def last_and_kept_tables(records):
    """The scores of the last evaluation, and those of the one whose weights are kept where that is another;
    [] without any."""
    evaluations = _of_kind(valid_records(records), "evaluation")
    if not evaluations:
        return []
    last, best = evaluations[-1], kept_evaluation(evaluations)
    tables = [scores_table(last["scores"], f"Scores after epoch {last['epoch'] + 1}")]
    if best and best is not last:
        tables.append(
            scores_table(best["scores"], f"Scores after epoch {best['epoch'] + 1}, whose weights are kept")
        )
    return tables


def _format_number(value):
    if not isinstance(value, float):
        return value
    return f"{value:.3e}" if 0 < abs(value) < 1e-3 else f"{value:.4f}"


NO_SCORES = ("loss", "gradient norm", "learning rate")  # the names of the other curves


def curves(records):
    """dict of series to draw, name -> (steps, values): loss, gradient norm, learning rate if it changes, and
    every evaluation score."""
    series = {}
    for record in valid_records(records):
        values = {}
        if record["kind"] == "train":
            values = dict(zip(NO_SCORES, map(record.get, ("loss", "grad_norm", "lr"))))
        elif record["kind"] == "evaluation":
            values = {name: value for name, value in record["scores"].items() if isinstance(value, float)}
        for name, value in values.items():
            if _fits(value, float):
                steps, points = series.setdefault(name, ([], []))
                steps.append(record["step"])
                points.append(value)
    if len(set(series.get("learning rate", ((), ()))[1])) == 1:
        del series["learning rate"]
    return series


class Labels(NamedTuple):
    """What a task says of its scores. Empty for a task that tpukit does not know."""

    score: str | None
    """The one that decides which weights are best."""
    names: dict[str, str]
    """The scores worth a curve, with unit; where there are none, all are."""
    published: dict[str, float]
    """The paper's scores, where the run's dataset is the paper's."""
    milestones: dict[int, str]
    """Epoch -> what changes there."""

    def hides(self, name):
        """Whether a series needs no curve of its own."""
        return bool(self.names) and name not in self.names and name not in NO_SCORES


NO_LABELS = Labels(None, {}, {}, {})


def labels_of(config):
    """The `Labels` of a run. config: `Run.config`."""
    if config["task"] not in list(TASKS):  # a list, because a damaged config may hold what has no hash
        return NO_LABELS
    kind, settings = find(config["task"]), config["settings"]
    folders = Path(str(settings.get("dataset_dir")).lower()).parts
    published = kind.published if kind.dataset.lower() in folders else {}
    return Labels(kind.score, kind.score_names, published, kind.milestones(settings))


def steps_per_epoch(records):
    """Of the last session; in runs of earlier versions, which do not record it, by the evaluations; 1 where
    nothing tells."""
    records = valid_records(records)
    found = [record["step"] // max(record["epoch"] + 1, 1) for record in _of_kind(records, "evaluation")]
    found += [record["steps_per_epoch"] for record in records if _fits(record.get("steps_per_epoch"), int)]
    return max(found[-1], 1) if found else 1


def epoch_curves(records):
    """As `curves`, over the epochs: name -> (epochs, values)."""
    per_epoch = steps_per_epoch(records)
    return {
        name: ([step / per_epoch for step in steps], values)
        for name, (steps, values) in curves(records).items()
    }


def roc(records):
    """dict of lists tpr, fpr, precision, threshold of the last evaluation that has them, or None."""
    for record in reversed(valid_records(records)):
        found = record["scores"].get("roc") if record["kind"] == "evaluation" else None
        if _fits(found, dict.fromkeys(("tpr", "fpr", "precision"), list[float])):
            count = len(found["tpr"])
            if count > 1 and len(found["fpr"]) == len(found["precision"]) == count:
                return dict(found, threshold=[place / (count - 1) for place in range(count)])
    return None


def confusion(records):
    """dict of classes (K names) and counts (K lists of K numbers) of the last evaluation that has them, or
    None."""
    for record in reversed(valid_records(records)):
        found = record["scores"].get("confusion") if record["kind"] == "evaluation" else None
        if _fits(found, dict(classes=list[str], counts=list[list[float]])):
            sizes = {len(found["counts"]), *map(len, found["counts"])}
            if sizes == {len(found["classes"])} and len(found["classes"]) > 1:
                return found
    return None


def per_class_table(confusion):
    """A table of the classes of `confusion`: number of test images, precision, recall."""
    rows = []
    for number, name in enumerate(confusion["classes"]):
        correct, true = confusion["counts"][number][number], sum(confusion["counts"][number])
        called = sum(row[number] for row in confusion["counts"])
        precision, recall = (_format_number(correct / of) if of else "" for of in (called, true))
        rows.append((name, f"{true:.0f}", precision, recall))
    return Table("Classes", ("class", "test images", "precision", "recall"), rows)


# What the accelerator did, in sentences


def findings(records):
    """What the accelerator did in the last session of a run, as a list of sentences, the most important
    first."""
    session = _last_session(records)
    sentences = []
    if damaged := len(records) - len(valid_records(records)):
        sentences.append(f"Left out: {damaged} damaged record{'s' if damaged > 1 else ''}.")
    if not session:
        return sentences or ["This run has not started yet."]
    sentences.append(f"It ran on {session[0]['device']}.")
    if diverged := _of_kind(session, "diverged"):
        sentences.append(
            f"It stopped at step {diverged[-1]['step']}: loss or gradient was not a finite number."
        )
    if stopped := _of_kind(session, "stopped"):
        epochs, patience = stopped[-1]["epoch"] + 1, stopped[-1]["patience"]
        sentences.append(
            f"It stopped early after epoch {epochs}: no better score within a patience of {patience}."
        )
    trained = _of_kind(session, "train")
    sentences += _describe_compilations(session, trained)
    if trained:
        sentences += _describe_time(session, [record["speed"] for record in trained])
    else:
        sentences.append("No interval of training was recorded yet.")
    return sentences


def _of_kind(records, kind):
    return [record for record in records if record["kind"] == kind]


def _last_session(records):
    """The valid records of the last session that trained or compiled; of the last one if none did.

    A finished run that is started again does neither."""
    sessions = _sessions(records)
    worked = [
        session for session in sessions if any(record["kind"] in ("train", "compile") for record in session)
    ]
    return (worked or sessions or [[]])[-1]


def _sessions(records):
    """Lists of valid records, each beginning with that of a start."""
    sessions = []
    for record in valid_records(records):
        if record["kind"] == "start":
            sessions.append([])
        if sessions:
            sessions[-1].append(record)
    return sessions


def _describe_compilations(session, trained):
    counters = trained[-1]["speed"]["counters"] if trained else None
    if trained and not counters:
        sentences = [
            _describe_capture(record)
            for record in _of_kind(session, "compile")
            if _function(record) == "step"
        ]
        if (mode := session[0].get("torch_compile", "no")) != "no":
            sentences.append(f"torch.compile compiled the model ({mode}); it does not report when.")
        if session[0].get("accelerator") == "tpu":
            sentences = ["torch_tpu compiled the model and the predictions; it does not report when."]
        return sentences or ["Nothing is compiled on this device: PyTorch runs each operation as it comes."]
    sentences = []
    expected, unexpected = _step_compilations(session)
    if expected:
        steps = " and ".join(f"at step {r['step']} ({r['seconds']:.1f} s{_why(r, ', ')})" for r in expected)
        sentences.append(
            f"The training step was compiled {steps}; every other step reused the compiled graph."
        )
    elif trained:
        sentences.append("The training step was not compiled: this session had already compiled this graph.")
    for record in unexpected:
        reason = _why(record, " because ") or ", though no argument changed"
        end = ", which ended the run" if record.get("refused") else ""
        sentences.append(f"Step {record['step']} compiled again ({record['seconds']:.1f} s){reason}{end}.")
    if fallbacks := (counters or {}).get("fallbacks"):
        names = ", ".join(f"{name} ({count} times)" for name, count in fallbacks.items())
        sentences.append(
            f"Ran on the CPU, a round trip each: {names}. `tpukit report RUN --trace 5` names their lines."
        )
    elif counters:
        sentences.append("No operation fell back to the CPU.")
    return sentences


def _made_graphs(compilation):
    return not compilation.get("refused") and bool(compilation.get("programs", 1))


def _describe_capture(record):
    if not _made_graphs(record):
        return f"The training step is not captured as a CUDA graph{_why(record, ', because ')}."
    return (
        f"The training step was captured as a CUDA graph at step {record['step']}"
        f" ({record['seconds']:.1f} s)."
    )


def _step_compilations(session):
    """(expected, unexpected) compilations of the training step: records, expected as many as the training
    allowed. The last may be one that was refused."""
    of_step = [record for record in _of_kind(session, "compile") if _function(record) == "step"]
    done = [record for record in of_step if _made_graphs(record)]
    slow = [record for record in done if record["seconds"] >= LONG_COMPILE_S] or done[:1]
    allowed = session[0].get("max_graphs") or 1
    return slow[:allowed], slow[allowed:] + [record for record in of_step if record.get("refused")]


def _function(compilation):
    return compilation.get("what") or "step"


def _why(compilation, before=""):
    """The causes of a compilation, with a text before them; nothing where it has none."""
    causes = "; ".join(compilation.get("why") or [])
    return f"{before}{causes}" if causes else ""


def waiting_share(speeds):
    """The share of the time of some intervals, by their `speed`, in which the steps waited for data."""
    return sum(speed["wait_s"] for speed in speeds) / max(sum(speed["seconds"] for speed in speeds), 1e-9)


def _describe_time(session, speeds):
    seconds = sum(speed["seconds"] for speed in speeds)
    waited = waiting_share(speeds)
    sentences = [
        f"Fastest interval: {max(speed['images_per_s'] for speed in speeds):.1f} samples per second."
    ]
    advice = ": raise num_workers, or store smaller images" if waited > 0.1 else ""
    sentences.append(f"Waiting for data took {waited:.1%} of the training time{advice}.")
    if not speeds[-1]["memory"]:
        sentences.append("This device does not report how much of its memory is used.")
    if evaluating := sum(record["speed"]["seconds"] for record in _of_kind(session, "evaluation")):
        sentences.append(f"Training took {seconds:.0f} s, evaluation {evaluating:.0f} s.")
    return sentences


# What the accelerator did, in tables


def accelerator_tables(records):
    """Tables of the last session: compilations with their causes, the time of a step, memory."""
    session = _last_session(records)
    tables, trained = [], _of_kind(session, "train")
    if compilations := _of_kind(session, "compile"):
        tables.append(_compilations_table(compilations))
    if not trained:
        return tables
    tables.append(_intervals_table(intervals(records)))
    if memory := trained[-1]["speed"]["memory"]:
        rows = [
            (n, f"{peak / GIB:.2f}", f"{of / GIB:.2f}", f"{peak / max(of, 1):.0%}")
            for n, (peak, of) in enumerate(memory)
        ]
        tables.append(Table("Memory", ("device", "peak, GiB", "of GiB", ""), rows))
    return tables


def _compilations_table(compilations):
    rows, seen = [], set()
    for record in compilations:
        function = _function(record)
        reason = _why(record) or ("no argument changed" if function in seen else "the first time")
        seconds = "refused" if record.get("refused") else f"{record['seconds']:.1f}"
        rows.append((record["step"], function, seconds, reason))
        seen.add(function)
    return Table("Compilations", ("step", "function", "seconds", "why"), rows)


def _intervals_table(found):
    """At most 12 of the intervals, evenly spaced, the last among them."""
    stride = math.ceil(len(found) / 12)
    rows = []
    for interval in found[(len(found) - 1) % stride :: stride]:
        times = [f"{interval[part]:.2f}" for part in ("step_ms", "wait_ms", "to_device_ms", "from_device_ms")]
        rows.append((f"{interval['from']} to {interval['to']}", *times, f"{interval['images_per_s']:.1f}"))
    columns = ("steps", "ms per step", "waiting for data", "sending", "reading", "samples per second")
    return Table("Where a step's time went, ms per step", columns, rows)


def intervals(records):
    """The intervals between two metric syncs of the last session, in milliseconds per step.

    A list of dict(from, to, step_ms, wait_ms, to_device_ms, from_device_ms, images_per_s). The host waits for
    data; sending and reading overlap with the device's work."""
    session = _last_session(records)
    found = []
    for record in _of_kind(session, "train"):
        speed, batch_size = record["speed"], session[0].get("batch_size") or 1
        steps = max(1, round(speed["images_per_s"] * speed["seconds"] / batch_size))
        interval = {
            "from": record["step"] - steps + 1,
            "to": record["step"],
            "images_per_s": speed["images_per_s"],
        }
        parts = dict(
            step_ms="seconds", wait_ms="wait_s", to_device_ms="to_device_s", from_device_ms="from_device_s"
        )
        found.append(
            interval | {name: 1e3 * (speed.get(part) or 0.0) / steps for name, part in parts.items()}
        )
    return found


def compiled_steps(records):
    """Steps of the last session at which the training step was compiled."""
    session = _last_session(records)
    expected, unexpected = _step_compilations(session) if session else ([], [])
    return [record["step"] for record in expected + unexpected]


# A run that is still training


def headline(records, progress):
    """How far a training is, in one line: device, step, epoch, speed, time left, compilations of the step."""
    sessions = _sessions(records)
    if not sessions or not _fits(progress, PROGRESS):
        return "The training starts: the first step is compiled or prepared"
    session, step, total = sessions[-1], progress["step"], progress["total"]
    parts = [session[0]["device"], f"{progress['unit']} {step} of {total}"]
    if progress.get("epoch"):
        parts.append(f"epoch {progress['epoch']}")
    if left := _time_left(session, progress):
        parts.append(f"about {left} left")
    if compiled := [record for record in _of_kind(session, "compile") if _made_graphs(record)]:
        seconds = format_duration(sum(record["seconds"] for record in compiled))
        parts.append(f"{len(compiled)} compilation{'s' if len(compiled) > 1 else ''}, {seconds}")
    return " · ".join(parts)


def _time_left(session, progress):
    """How long the remaining steps take at the speed of the last interval, in words; "" where that is not
    known."""
    trained, steps = _of_kind(session, "train"), progress["total"] - progress["step"]
    rate = trained[-1]["speed"]["images_per_s"] if trained else 0.0
    if progress["unit"] != "step" or steps <= 0 or rate <= 0:
        return ""
    return format_duration(steps * (session[0].get("batch_size") or 1) / rate)


def is_finished(progress, checkpoints):
    """Whether nothing will follow: after its last step a training evaluates, and the checkpoint of that step
    comes last."""
    if not _fits(progress, PROGRESS) or progress["step"] < progress["total"]:
        return False
    return progress["unit"] != "step" or any(
        step >= progress["total"] for step in _checkpoint_steps(checkpoints)
    )


def _checkpoint_steps(checkpoints):
    return (
        [entry["step"] for entry in checkpoints if _fits(entry, dict(step=int))]
        if isinstance(checkpoints, list)
        else []
    )
