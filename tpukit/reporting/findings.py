"""Records of a run in, sentences and tables out. Pure functions: no files, no device, no drawing."""

import math
from pathlib import Path
from typing import Any, NamedTuple

from tpukit.devices import LONG_COMPILE_S, words
from tpukit.host.tables import Table, format_duration
from tpukit.tasks import TASKS, find
from tpukit.training.json_types import has_type

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
    rates=dict[str, float] | None,
    counters=dict(fallbacks=dict[str, int] | None),  # {} where nothing compiles
)
SCORES = dict(beside=dict[str, dict] | None)
FIELDS = dict(
    start=dict(device=str, max_graphs=int, batch_size=int, steps_per_epoch=int),
    train=dict(loss=float | None, grad_norm=float | None, lr=float | None, speed=SPEED),
    stopped=dict(epoch=int, patience=int),
    evaluation=dict(epoch=int, kept=bool, scores=SCORES, speed=dict(seconds=float)),
    compile=dict(seconds=float, what=str, why=list[str], refused=bool, programs=int),
)
PROGRESS = dict(step=int, total=int, unit=str)
ROC = dict.fromkeys(("tpr", "fpr", "precision"), list[float])
CONFUSION = dict(classes=list[str], counts=list[list[float]])
# Times of an interval by their names in the report -> field of the record's `speed`.
TIMES = {
    "step": "seconds",
    "waiting for data": "wait_s",
    words.SENDING: "to_device_s",
    words.READING: "from_device_s",
}
NO_SCORES = ("loss", "gradient norm", "learning rate")  # the names of the curves that show no score


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
    return (_worked(records) or _sessions(records) or [[]])[-1]


def _worked(records):
    """The sessions that trained or compiled."""
    return [s for s in _sessions(records) if _of_kind(s, "train") or _of_kind(s, "compile")]


# Scores and curves


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
    kept = [record for record in evaluations if record["kept"]][-1:]
    tables = []
    for record in evaluations[-1:] + [record for record in kept if record is not evaluations[-1]]:
        which = ", whose weights are kept" if tables else ""
        tables.append(scores_table(record["scores"], f"Scores after epoch {record['epoch'] + 1}{which}"))
    return tables


def curves(records: list) -> Series:
    """Loss, gradient norm, learning rate if it changes, and every evaluation score, over the epochs."""
    series, per_epoch = {}, steps_per_epoch(records)
    for record in valid_records(records):
        values = {}
        if record["kind"] == "train":
            values = dict(zip(NO_SCORES, map(record.get, ("loss", "grad_norm", "lr"))))
        elif record["kind"] == "evaluation":
            values = {name: value for name, value in record["scores"].items() if isinstance(value, float)}
        for name, value in values.items():
            if has_type(value, float):
                epochs, points = series.setdefault(name, ([], []))
                epochs.append(record["step"] / per_epoch)
                points.append(value)
    if len(set(series.get("learning rate", ((), ()))[1])) == 1:
        del series["learning rate"]
    return series


def steps_per_epoch(records: list) -> int:
    """Steps of an epoch of the last session; 1 where nothing tells."""
    starts = _of_kind(valid_records(records), "start")
    return max(starts[-1]["steps_per_epoch"], 1) if starts else 1


class Labels(NamedTuple):
    """What a task says of its scores. Empty for a task that tpukit does not know.

    score: the one that decides which weights are best. names: the scores worth a curve, with unit; all where
    there are none. published: the paper's scores, where the run's dataset is the paper's."""

    score: str | None
    names: dict[str, str]
    published: dict[str, float]


NO_LABELS = Labels(None, {}, {})


def labels_of(config: dict) -> Labels:
    """The `Labels` of a run. config: `Run.config`."""
    if config["task"] not in list(TASKS):  # a list, because a damaged config may hold what has no hash
        return NO_LABELS
    kind = find(config["task"])
    folders = Path(str(config["settings"].get("dataset_dir")).lower()).parts
    return Labels(kind.score, kind.score_names, kind.published if kind.dataset.lower() in folders else {})


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
    for name, row, column in zip(confusion["classes"], confusion["counts"], zip(*confusion["counts"])):
        correct = row[len(rows)]
        precision, recall = (_format_number(correct / of) if of else "" for of in (sum(column), sum(row)))
        rows.append((name, f"{sum(row):.0f}", precision, recall))
    return Table("Classes", ("class", "test images", "precision", "recall"), rows)


# What the accelerator did


def describe(records: list) -> list[str]:
    """What the accelerator did in the last session of a run, in sentences, the most important first, and how
    long all sessions took."""
    session = _last_session(records)
    damaged = len(records) - len(valid_records(records))
    sentences = [f"Damaged records left out: {damaged}."] if damaged else []
    if not session:
        return sentences or ["This run has not started yet."]
    worked = _worked(records)
    which = f"The last of {len(worked)} sessions" if len(worked) > 1 else "It"
    sentences.append(f"{which} ran on {session[0]['device']}.")
    for record in _of_kind(session, "diverged")[-1:]:
        sentences.append(f"It stopped at step {record['step']}: loss or gradient was not a finite number.")
    for record in _of_kind(session, "stopped")[-1:]:
        reason = f"no better score within a patience of {record['patience']}"
        sentences.append(f"It stopped early after epoch {record['epoch'] + 1}: {reason}.")
    speeds = [record["speed"] for record in _of_kind(session, "train")]
    return [*sentences, *_describe_graphs(session, speeds), *_describe_time(speeds, worked)]


def _describe_graphs(session, speeds):
    """What was compiled or captured, and what ran on the CPU instead."""
    is_xla = not speeds or bool(speeds[-1]["counters"])
    if not is_xla and session[0].get("accelerator") == "tpu":
        return ["torch_tpu compiled the model and the predictions; it does not report when."]
    sentences = []
    made = "compiled" if is_xla else "captured"
    expected, unexpected = _step_compilations(session)
    if expected:
        form = "" if is_xla else " as a CUDA graph"
        steps = " and ".join(f"at step {r['step']} ({r['seconds']:.1f} s{_why(r, ', ')})" for r in expected)
        sentences.append(f"The training step was {made}{form} {steps}; every other step reused that graph.")
    for record in unexpected:
        reason = _why(record, " because ") or ", though no argument changed"
        end = ", which ended the run" if record["refused"] else ""
        sentences.append(f"Step {record['step']} {made} again ({record['seconds']:.1f} s){reason}{end}.")
    if not is_xla:
        for record in _of_step(session):
            if not _made_graphs(record):
                reason = _why(record, ", because ")
                sentences.append(f"The training step is not captured as a CUDA graph{reason}.")
        if (mode := session[0].get("torch_compile", "no")) != "no":
            sentences.append(f"torch.compile compiled the model ({mode}); it does not report when.")
        return sentences or [words.NOTHING_COMPILES]
    if speeds and not expected:
        sentences.append("The training step was not compiled: this session had already compiled this graph.")
    if speeds:
        fallbacks = speeds[-1]["counters"].get("fallbacks") or {}
        hint = " `tpukit report RUN --trace 5` names their lines." if fallbacks else ""
        sentences.append(words.describe_fallbacks(fallbacks) + hint)
    return sentences


def _of_step(session):
    """The records of compilations of the training step."""
    return [record for record in _of_kind(session, "compile") if record["what"] == "step"]


def _made_graphs(compilation):
    return not compilation["refused"] and bool(compilation["programs"])


def _step_compilations(session):
    """(expected, unexpected) compilations of the training step: records, expected as many as the training
    allowed. The last may be one that was refused."""
    done = [record for record in _of_step(session) if _made_graphs(record)]
    slow = [record for record in done if record["seconds"] >= LONG_COMPILE_S] or done[:1]
    allowed = session[0]["max_graphs"] if session else 0
    refused = [record for record in _of_step(session) if record["refused"]]
    return slow[:allowed], slow[allowed:] + refused


def _why(compilation, before=""):
    """The causes of a compilation, with a text before them; nothing where it has none."""
    causes = "; ".join(compilation["why"])
    return f"{before}{causes}" if causes else ""


def _describe_time(speeds, worked):
    """speeds: of the intervals of the last session. worked: the sessions."""
    if not speeds:
        return ["No interval of training was recorded yet."]
    seconds = sum(speed["seconds"] for speed in speeds)
    waited = sum(speed["wait_s"] for speed in speeds) / max(seconds, 1e-9)
    advice = ": if threads make the batches, raise num_workers or shrink the images" if waited > 0.1 else ""
    fastest = max(speeds, key=lambda speed: speed["images_per_s"])
    rates = "".join(f", {value:.4g} {name}" for name, value in (fastest.get("rates") or {}).items())
    sentences = [
        f"Fastest interval: {fastest['images_per_s']:.1f} samples per second{rates}.",
        f"Waiting for data took {waited:.1%} of the training time{advice}.",
    ]
    training, evaluating = (
        sum(record["speed"]["seconds"] for session in worked for record in _of_kind(session, kind))
        for kind in ("train", "evaluation")
    )
    where = f" in {len(worked)} sessions" if len(worked) > 1 else ""
    durations = [format_duration(seconds) for seconds in (training, evaluating)]
    return [*sentences, f"Training took {durations[0]}, evaluation {durations[1]}{where}."]


def accelerator_tables(records: list) -> list[Table]:
    """Tables of the last session: compilations with their causes, the time of a step, memory."""
    session = _last_session(records)
    compilations, seen = [], set()
    for record in _of_kind(session, "compile"):
        function = record["what"]
        reason = _why(record) or ("no argument changed" if function in seen else "the first time")
        seconds = "refused" if record["refused"] else f"{record['seconds']:.1f}"
        compilations.append((record["step"], function, seconds, reason))
        seen.add(function)
    spans, steps = intervals(records), []
    timed = [name for name in TIMES if any(f"{span[name]:.2f}" != "0.00" for span in spans)]
    stride = math.ceil(len(spans) / 12) or 1  # at most 12, the last among them
    for span in spans[(len(spans) - 1) % stride :: stride]:
        times = [f"{span[name]:.2f}" for name in timed]
        steps.append((f"{span['from']} to {span['to']}", *times, f"{span['images_per_s']:.1f}"))
    memory = [device for record in _of_kind(session, "train")[-1:] for device in record["speed"]["memory"]]
    tables = (
        Table("Compilations", ("step", "function", "seconds", "why"), compilations),
        Table("Where a step's time went, ms per step", ("steps", *timed, "samples per second"), steps),
        words.memory_table(memory),
    )
    return [table for table in tables if table.rows]


def intervals(records: list) -> list[dict]:
    """The intervals between two metric syncs of the last session, in milliseconds per step.

    A list of dict(from, to, images_per_s, and the names of `TIMES`). The host waits for data; sending and
    reading overlap with the device's work."""
    session = _last_session(records)
    spans = []
    for record in _of_kind(session, "train"):
        speed, batch_size = record["speed"], session[0]["batch_size"]
        steps = max(1, round(speed["images_per_s"] * speed["seconds"] / batch_size))
        span = {"from": record["step"] - steps + 1, "to": record["step"]}
        times = {name: 1e3 * (speed.get(field) or 0.0) / steps for name, field in TIMES.items()}
        spans.append(span | times | dict(images_per_s=speed["images_per_s"]))
    return spans


def compiled_steps(records: list) -> list[int]:
    """Steps of the last session at which the training step was compiled."""
    expected, unexpected = _step_compilations(_last_session(records))
    return [record["step"] for record in expected + unexpected]


# A run that is still training


def headline(records: list, progress: dict | None = None) -> str:
    """A training in one line: device, compilations of the step; with `progress` (`Run.read_progress`) also
    how far it is: step, epoch, time left."""
    sessions = _sessions(records)
    if not sessions or not (progress is None or has_type(progress, PROGRESS)):
        return "The training starts: the first step is compiled or prepared"
    session = sessions[-1]
    parts = [session[0]["device"], *_how_far(session, progress or {})]
    if compiled := [record for record in _of_kind(session, "compile") if _made_graphs(record)]:
        seconds = format_duration(sum(record["seconds"] for record in compiled))
        parts.append(f"{len(compiled)} compilation{'s' if len(compiled) > 1 else ''}, {seconds}")
    return " · ".join(parts)


def _how_far(session, progress):
    """Step, epoch, time left; nothing without progress."""
    if not progress:
        return []
    step, total = progress["step"], progress["total"]
    parts = [f"{progress['unit']} {step} of {total}"]
    if progress.get("epoch"):
        parts.append(f"epoch {progress['epoch']}")
    trained = _of_kind(session, "train")
    rate = trained[-1]["speed"]["images_per_s"] if trained else 0.0
    if progress["unit"] == "step" and step < total and rate > 0:
        left_s = (total - step) * (session[0]["batch_size"]) / rate
        parts.append(f"about {format_duration(left_s)} left")
    return parts


def is_finished(progress: dict, checkpoints: list) -> bool:
    """Whether nothing will follow: a training evaluates after its last step, and the checkpoint of that step
    comes last."""
    if not has_type(progress, PROGRESS) or progress["step"] < progress["total"]:
        return False
    steps = [entry["step"] for entry in checkpoints]
    return progress["unit"] != "step" or progress["total"] <= max(steps, default=-1)
