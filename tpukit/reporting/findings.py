"""Records of a run in, sentences and tables out. Pure functions: no files, no device, no drawing."""

import math
from pathlib import Path
from typing import Any, NamedTuple

from tpukit.devices import LONG_COMPILE_S
from tpukit.host.json_types import has_type
from tpukit.host.tables import GIB, Table, format_duration
from tpukit.tasks import TASKS, find

Record = dict[str, Any]
Series = dict[str, tuple[list[float], list[float]]]  # name -> (x, y)

# Fields read from a record, by kind.
SPEED = dict(
    seconds=float,
    images_per_s=float,
    wait_s=float,
    to_device_s=float | None,
    from_device_s=float | None,
    memory=list[tuple[float, float]],
    counters=dict(fallbacks=dict[str, int] | None),  # {} where nothing compiles
)
SCORES = dict(beside=dict[str, dict] | None)
FIELDS = dict(
    start=dict(device=str, max_graphs=int | None, batch_size=int | None),
    train=dict(loss=float | None, grad_norm=float | None, lr=float | None, speed=SPEED),
    stopped=dict(epoch=int, patience=int),
    evaluation=dict(epoch=int, kept=bool | None, scores=SCORES, speed=dict(seconds=float)),
    compile=dict(seconds=float, what=str | None, why=list[str] | None),
)
PROGRESS = dict(step=int, total=int, unit=str)
ROC = dict.fromkeys(("tpr", "fpr", "precision"), list[float])
CONFUSION = dict(classes=list[str], counts=list[list[float]])


def valid_records(records: list[Any]) -> list[Record]:
    """The records without the damaged ones: after a flipped bit JSON may lack a name or a value."""
    named = [record for record in records if has_type(record, dict(kind=str, step=int))]
    return [record for record in named if has_type(record, FIELDS.get(record["kind"], {}))]


def _of_kind(records, kind):
    return [record for record in records if record["kind"] == kind]


def _sessions(records):
    """Lists of valid records, each beginning with that of a start."""
    sessions = []
    for record in valid_records(records):
        if record["kind"] == "start":
            sessions.append([])
        if sessions:
            sessions[-1].append(record)
    return sessions


def _last_session(records):
    """The valid records of the last session that trained or compiled, which a finished run that is started
    again does not; else of the last session."""
    sessions = _sessions(records)
    worked = [s for s in sessions if _of_kind(s, "train") or _of_kind(s, "compile")]
    return (worked or sessions or [[]])[-1]


# Settings, scores, curves


def settings_table(config: dict, defaults: tuple | list = ()) -> Table:
    """A task's settings. config: dict(task, settings). defaults: names of those to fold."""
    settings = config["settings"].items()
    rows = [row for row in settings if row[0] not in defaults]
    folded = [row for row in settings if row[0] in defaults]
    title, summary = f"Settings of {config['task']}", f"{len(folded)} settings at their defaults"
    return Table(title, ("setting", "value"), rows, folded=folded, summary=summary)


def scores_table(scores: dict, title: str = "Scores") -> Table:
    """The scores of an evaluation. `beside` holds a dict of the same scores for each further column."""
    beside = scores.get("beside") or {}
    rows = []
    for name, value in scores.items():
        if isinstance(value, (int, float)):
            values = [value, *(other.get(name, "") for other in beside.values())]
            rows.append((name, *map(_format_number, values)))
    return Table(title, ("score", "value", *beside), rows)


def _format_number(value):
    if not isinstance(value, float):
        return value
    return f"{value:.3e}" if 0 < abs(value) < 1e-3 else f"{value:.4f}"


def last_and_kept_tables(records: list) -> list[Table]:
    """The scores of the last evaluation, and of the one whose weights are kept where that is another."""
    evaluations = _of_kind(valid_records(records), "evaluation")
    kept = [record for record in evaluations if record.get("kept")][-1:]
    tables = []
    for record in evaluations[-1:] + [record for record in kept if record is not evaluations[-1]]:
        which = ", whose weights are kept" if tables else ""
        tables.append(scores_table(record["scores"], f"Scores after epoch {record['epoch'] + 1}{which}"))
    return tables


NO_SCORES = ("loss", "gradient norm", "learning rate")  # the names of the other curves


def curves(records: list) -> Series:
    """Loss, gradient norm, learning rate if it changes, and every evaluation score, over the steps."""
    series = {}
    for record in valid_records(records):
        values = {}
        if record["kind"] == "train":
            values = dict(zip(NO_SCORES, map(record.get, ("loss", "grad_norm", "lr"))))
        elif record["kind"] == "evaluation":
            values = {name: value for name, value in record["scores"].items() if isinstance(value, float)}
        for name, value in values.items():
            if has_type(value, float):
                steps, points = series.setdefault(name, ([], []))
                steps.append(record["step"])
                points.append(value)
    if len(set(series.get("learning rate", ((), ()))[1])) == 1:
        del series["learning rate"]
    return series


def steps_per_epoch(records: list) -> int:
    """Steps of an epoch of the last session; 1 where nothing tells.

    Runs of earlier versions do not record it: there by the last evaluation."""
    records = valid_records(records)
    counts = [record["step"] // max(record["epoch"] + 1, 1) for record in _of_kind(records, "evaluation")]
    counts += [
        record["steps_per_epoch"] for record in records if has_type(record.get("steps_per_epoch"), int)
    ]
    return max(counts[-1], 1) if counts else 1


def epoch_curves(records: list) -> Series:
    """As `curves`, over the epochs."""
    count = steps_per_epoch(records)
    return {name: ([step / count for step in steps], y) for name, (steps, y) in curves(records).items()}


class Labels(NamedTuple):
    """What a task says of its scores. Empty for a task that tpukit does not know.

    score: the one that decides which weights are best. names: the scores worth a curve, with unit; all where
    there are none. published: the paper's scores, where the run's dataset is the paper's. milestones: what
    changes at an epoch."""

    score: str | None
    names: dict[str, str]
    published: dict[str, float]
    milestones: dict[int, str]

    def is_hidden(self, name: str) -> bool:
        """Whether a series needs no curve."""
        return bool(self.names) and name not in self.names and name not in NO_SCORES


NO_LABELS = Labels(None, {}, {}, {})


def labels_of(config: dict) -> Labels:
    """The `Labels` of a run. config: `Run.config`."""
    if config["task"] not in list(TASKS):  # a list, because a damaged config may hold what has no hash
        return NO_LABELS
    kind, settings = find(config["task"]), config["settings"]
    folders = Path(str(settings.get("dataset_dir")).lower()).parts
    published = kind.published if kind.dataset.lower() in folders else {}
    milestones = getattr(kind, "milestones", lambda settings: {})(settings)
    return Labels(kind.score, kind.score_names, published, milestones)


def _last_evaluated(records, name, expected):
    """The values of a name in the scores of evaluations, of this type, the last one first."""
    evaluations = _of_kind(valid_records(records), "evaluation")
    values = [record["scores"].get(name) for record in reversed(evaluations)]
    return [value for value in values if has_type(value, expected)]


def roc(records: list) -> dict | None:
    """dict of lists tpr, fpr, precision, threshold of the last evaluation that has them, or None."""
    for rates in _last_evaluated(records, "roc", ROC):
        count = len(rates["tpr"])
        if count > 1 and len(rates["fpr"]) == len(rates["precision"]) == count:
            return dict(rates, threshold=[index / (count - 1) for index in range(count)])
    return None


def confusion(records: list) -> dict | None:
    """dict of classes (K names) and counts (K, K) of the last evaluation that has them, or None."""
    for matrix in _last_evaluated(records, "confusion", CONFUSION):
        sizes = {len(matrix["counts"]), *map(len, matrix["counts"])}
        if sizes == {len(matrix["classes"])} and len(matrix["classes"]) > 1:
            return matrix
    return None


def per_class_table(confusion: dict) -> Table:
    """A table of the classes of `confusion`: number of test images, precision, recall."""
    rows = []
    for number, name in enumerate(confusion["classes"]):
        correct, true = confusion["counts"][number][number], sum(confusion["counts"][number])
        called = sum(row[number] for row in confusion["counts"])
        precision, recall = (_format_number(correct / of) if of else "" for of in (called, true))
        rows.append((name, f"{true:.0f}", precision, recall))
    return Table("Classes", ("class", "test images", "precision", "recall"), rows)


# What the accelerator did, in sentences


def describe(records: list) -> list[str]:
    """What the accelerator did in the last session of a run, in sentences, the most important first."""
    session = _last_session(records)
    damaged = len(records) - len(valid_records(records))
    sentences = [f"Left out: {damaged} damaged record{'s' if damaged > 1 else ''}."] if damaged else []
    if not session:
        return sentences or ["This run has not started yet."]
    sentences.append(f"It ran on {session[0]['device']}.")
    for record in _of_kind(session, "diverged")[-1:]:
        sentences.append(f"It stopped at step {record['step']}: loss or gradient was not a finite number.")
    for record in _of_kind(session, "stopped")[-1:]:
        reason = f"no better score within a patience of {record['patience']}"
        sentences.append(f"It stopped early after epoch {record['epoch'] + 1}: {reason}.")
    trained = _of_kind(session, "train")
    if trained and not trained[-1]["speed"]["counters"]:
        sentences += _describe_without_xla(session)
    else:
        sentences += _describe_compilations(session, trained)
    return sentences + _describe_time(session, [record["speed"] for record in trained])


def _describe_without_xla(session):
    if session[0].get("accelerator") == "tpu":
        return ["torch_tpu compiled the model and the predictions; it does not report when."]
    sentences = [_describe_capture(record) for record in _of_step(session)]
    if (mode := session[0].get("torch_compile", "no")) != "no":
        sentences.append(f"torch.compile compiled the model ({mode}); it does not report when.")
    return sentences or ["Nothing is compiled on this device: PyTorch runs each operation as it comes."]


def _describe_capture(record):
    if not _made_graphs(record):
        return f"The training step is not captured as a CUDA graph{_why(record, ', because ')}."
    where = f"at step {record['step']} ({record['seconds']:.1f} s)"
    return f"The training step was captured as a CUDA graph {where}."


def _describe_compilations(session, trained):
    sentences = []
    expected, unexpected = _step_compilations(session)
    if expected:
        steps = " and ".join(f"at step {r['step']} ({r['seconds']:.1f} s{_why(r, ', ')})" for r in expected)
        rest = "every other step reused the compiled graph"
        sentences.append(f"The training step was compiled {steps}; {rest}.")
    elif trained:
        sentences.append("The training step was not compiled: this session had already compiled this graph.")
    for record in unexpected:
        reason = _why(record, " because ") or ", though no argument changed"
        end = ", which ended the run" if record.get("refused") else ""
        sentences.append(f"Step {record['step']} compiled again ({record['seconds']:.1f} s){reason}{end}.")
    if trained and (fallbacks := trained[-1]["speed"]["counters"].get("fallbacks")):
        names = ", ".join(f"{name} ({count} times)" for name, count in fallbacks.items())
        hint = "`tpukit report RUN --trace 5` names their lines"
        sentences.append(f"Ran on the CPU, a round trip each: {names}. {hint}.")
    elif trained:
        sentences.append("No operation fell back to the CPU.")
    return sentences


def _of_step(session):
    """The records of compilations of the training step."""
    return [record for record in _of_kind(session, "compile") if _function(record) == "step"]


def _function(compilation):
    return compilation.get("what") or "step"


def _made_graphs(compilation):
    return not compilation.get("refused") and bool(compilation.get("programs", 1))


def _step_compilations(session):
    """(expected, unexpected) compilations of the training step: records, expected as many as the training
    allowed. The last may be one that was refused."""
    done = [record for record in _of_step(session) if _made_graphs(record)]
    slow = [record for record in done if record["seconds"] >= LONG_COMPILE_S] or done[:1]
    allowed = session[0].get("max_graphs") or 1 if session else 0
    refused = [record for record in _of_step(session) if record.get("refused")]
    return slow[:allowed], slow[allowed:] + refused


def _why(compilation, before=""):
    """The causes of a compilation, with a text before them; nothing where it has none."""
    causes = "; ".join(compilation.get("why") or [])
    return f"{before}{causes}" if causes else ""


def _describe_time(session, speeds):
    if not speeds:
        return ["No interval of training was recorded yet."]
    seconds = sum(speed["seconds"] for speed in speeds)
    waited = sum(speed["wait_s"] for speed in speeds) / max(seconds, 1e-9)
    advice = ": raise num_workers, or store smaller images" if waited > 0.1 else ""
    fastest = max(speed["images_per_s"] for speed in speeds)
    sentences = [
        f"Fastest interval: {fastest:.1f} samples per second.",
        f"Waiting for data took {waited:.1%} of the training time{advice}.",
    ]
    if not speeds[-1]["memory"]:
        sentences.append("This device does not report how much of its memory is used.")
    if evaluating := sum(record["speed"]["seconds"] for record in _of_kind(session, "evaluation")):
        sentences.append(f"Training took {seconds:.0f} s, evaluation {evaluating:.0f} s.")
    return sentences


# What the accelerator did, in tables


def accelerator_tables(records: list) -> list[Table]:
    """Tables of the last session: compilations with their causes, the time of a step, memory."""
    session = _last_session(records)
    tables, trained = [], _of_kind(session, "train")
    if compilations := _of_kind(session, "compile"):
        tables.append(_compilations_table(compilations))
    if trained:
        tables.append(_intervals_table(intervals(records)))
    if trained and (memory := trained[-1]["speed"]["memory"]):
        gib = [(peak / GIB, size / GIB, peak / max(size, 1)) for peak, size in memory]
        rows = [
            (n, f"{peak:.2f}", f"{size:.2f}", f"{share:.0%}") for n, (peak, size, share) in enumerate(gib)
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


def _intervals_table(spans):
    """At most 12 of the intervals, evenly spaced, the last among them."""
    stride = math.ceil(len(spans) / 12)
    rows = []
    for span in spans[(len(spans) - 1) % stride :: stride]:
        times = [f"{span[part]:.2f}" for part in PARTS]
        rows.append((f"{span['from']} to {span['to']}", *times, f"{span['images_per_s']:.1f}"))
    columns = ("steps", "ms per step", "waiting for data", "sending", "reading", "samples per second")
    return Table("Where a step's time went, ms per step", columns, rows)


# Part of an interval -> its field in the record's `speed`.
PARTS = dict(step_ms="seconds", wait_ms="wait_s", to_device_ms="to_device_s", from_device_ms="from_device_s")


def intervals(records: list) -> list[dict]:
    """The intervals between two metric syncs of the last session, in milliseconds per step.

    A list of dict(from, to, step_ms, wait_ms, to_device_ms, from_device_ms, images_per_s). The host waits for
    data; sending and reading overlap with the device's work."""
    session = _last_session(records)
    spans = []
    for record in _of_kind(session, "train"):
        speed, batch_size = record["speed"], session[0].get("batch_size") or 1
        steps = max(1, round(speed["images_per_s"] * speed["seconds"] / batch_size))
        span = {"from": record["step"] - steps + 1, "to": record["step"]}
        times = {part: 1e3 * (speed.get(field) or 0.0) / steps for part, field in PARTS.items()}
        spans.append(span | times | dict(images_per_s=speed["images_per_s"]))
    return spans


def compiled_steps(records: list) -> list[int]:
    """Steps of the last session at which the training step was compiled."""
    expected, unexpected = _step_compilations(_last_session(records))
    return [record["step"] for record in expected + unexpected]


# A run that is still training


def headline(records: list, progress: dict) -> str:
    """How far a training is, in one line: device, step, epoch, time left, compilations of the step."""
    sessions = _sessions(records)
    if not sessions or not has_type(progress, PROGRESS):
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
    """How long the remaining steps take at the speed of the last interval; "" where that is not known."""
    trained, steps = _of_kind(session, "train"), progress["total"] - progress["step"]
    rate = trained[-1]["speed"]["images_per_s"] if trained else 0.0
    if progress["unit"] != "step" or steps <= 0 or rate <= 0:
        return ""
    return format_duration(steps * (session[0].get("batch_size") or 1) / rate)


def is_finished(progress: dict, checkpoints: list) -> bool:
    """Whether nothing will follow: a training evaluates after its last step, and the checkpoint of that step
    comes last."""
    if not has_type(progress, PROGRESS) or progress["step"] < progress["total"]:
        return False
    return progress["unit"] != "step" or progress["total"] <= max(_checkpoint_steps(checkpoints), default=-1)


def _checkpoint_steps(checkpoints):
    entries = checkpoints if isinstance(checkpoints, list) else []
    return [entry["step"] for entry in entries if has_type(entry, dict(step=int))]
