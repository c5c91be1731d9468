"""Turn the records of a run into sentences and tables. Pure functions: no files, no device, no drawing."""

import math
from pathlib import Path
from typing import Any, NamedTuple

from tpukit.devices import LONG_COMPILE_S, words
from tpukit.host.tables import Table, format_duration
from tpukit.tasks import TASKS, find

Record = dict[str, Any]
Series = dict[str, tuple[list[float], list[float]]]  # name -> (x, y)

# Values that are read of a record, by kind
READ = dict(
    start=("device", "max_graphs", "batch_size", "steps_per_epoch"),
    train=("loss", "grad_norm", "speed"),
    evaluation=("epoch", "kept", "scores", "speed"),
    compile=("seconds", "what", "why", "refused", "programs"),
)
MAX_DRAWN = 2.0**63  # in size; more breaks the axes of a figure
# Times of an interval by their names in the report -> field of the record's `speed`.
TIMES = {
    "step": "seconds",
    "waiting for data": "wait_s",
    words.SENDING: "to_device_s",
    words.READING: "from_device_s",
}
NO_SCORES = ("loss", "gradient norm", "learning rate")  # the names of the curves that show no score


def readable(records: list[Record]) -> list[Record]:
    """Return the records without those that lack a value of their kind, which another program wrote."""
    return [record for record in records if all(name in record for name in READ.get(record["kind"], ()))]


def _of_kind(records, kind):
    return [record for record in records if record["kind"] == kind]


def _sessions(records):
    """Return lists of readable records, each beginning with that of a start."""
    sessions = []
    for record in readable(records):
        if record["kind"] == "start":
            sessions.append([])
        if sessions:
            sessions[-1].append(record)
    return sessions


def _last_session(records):
    """Return the records of the last session that trained or compiled, which a finished run that is started
    again does not; else of the last session."""
    return (_worked(records) or _sessions(records) or [[]])[-1]


def _worked(records):
    """Return the sessions that trained or compiled."""
    return [s for s in _sessions(records) if _of_kind(s, "train") or _of_kind(s, "compile")]


# Scores and curves


def scores_table(scores: dict, title: str = "Scores", column: str = "value") -> Table:
    """Return the scores of an evaluation. `beside` holds the same scores for each further column."""
    beside = scores.get("beside") or {}
    rows = []
    for name, value in scores.items():
        if isinstance(value, (int, float)):
            values = [value, *(other.get(name, "") for other in beside.values())]
            rows.append((name, *map(_format_number, values)))
    return Table(title, ("score", column, *beside), rows)


def _format_number(value):
    if not isinstance(value, float):
        return value
    return f"{value:.3e}" if 0 < abs(value) < 1e-3 else f"{value:.4f}"


def last_and_kept_tables(records: list) -> list[Table]:
    """Return the scores, if there are any: of the last evaluation, and of the one whose weights are kept."""
    evaluations = _of_kind(readable(records), "evaluation")
    if not evaluations:
        return []
    last = evaluations[-1]
    kept = next((record for record in reversed(evaluations) if record["kept"]), None)
    if kept is None or kept is last:
        title = f"Scores after epoch {last['epoch'] + 1}"
        return [scores_table(last["scores"], title, "last, kept" if kept else "last")]
    title = f"Scores after epoch {last['epoch'] + 1} (last) and epoch {kept['epoch'] + 1} (kept)"
    both = {"beside": {"kept": kept["scores"], **(last["scores"].get("beside") or {})}}
    return [scores_table(last["scores"] | both, title, "last")]


def verdict(records: list) -> list[str]:
    """Return what the scores of the kept weights say: nothing where they need no word, else one sentence."""
    evaluations = _of_kind(readable(records), "evaluation")
    kept = [record for record in evaluations if record["kept"]][-1:] or evaluations[-1:]
    scores = kept[0]["scores"] if kept else {}
    false, found, right = (_number(scores, name) for name in ("fa", "pd", "accuracy"))
    classes = len((scores.get("confusion") or {}).get("classes") or ())
    if false is not None and false > 0.1:
        return ["The network marks far too many pixels: train longer."]
    if found == 0:
        return ["The network finds no target yet: train longer."]
    if found and _number(evaluations[-1]["scores"], "pd") == 0:
        return ["The last epoch finds no target any more: train longer, or with a lower learning rate."]
    if right is not None and classes and right < 1 / classes + 0.1:
        return [f"This is hardly better than guessing one of {classes} classes: train longer."]
    if len(evaluations) > 3 and kept[0] is evaluations[-1]:
        return ["The last epoch is the best one: train longer, and the scores may rise further."]
    return []


def _number(scores, name):
    value = scores.get(name)
    return value if isinstance(value, (int, float)) else None


def curves(records: list) -> Series:
    """Return loss, gradient norm, learning rate if it changes, and every score, over the epochs."""
    series, per_epoch = {}, steps_per_epoch(records)
    for record in readable(records):
        values = {}
        if record["kind"] == "train":
            values = dict(zip(NO_SCORES, map(record.get, ("loss", "grad_norm", "lr"))))
        elif record["kind"] == "evaluation":
            values = record["scores"]
        for name, value in values.items():
            if isinstance(value, float) and abs(value) < MAX_DRAWN:
                epochs, points = series.setdefault(name, ([], []))
                epochs.append(record["step"] / per_epoch)
                points.append(value)
    if len(set(series.get("learning rate", ((), ()))[1])) == 1:
        del series["learning rate"]
    return series


def steps_per_epoch(records: list) -> int:
    """Return the steps of an epoch of the last session; 1 where nothing tells."""
    starts = _of_kind(readable(records), "start")
    return max(starts[-1]["steps_per_epoch"], 1) if starts else 1


class Labels(NamedTuple):
    """A task's names of its scores. Empty for a task that tpukit does not know.

    score: the one that decides which weights are best. names: the scores worth a curve, with unit; all where
    there are none. published: the paper's scores, where the run's dataset is the paper's. epochs: those that
    the run is to train; 0 if its settings do not say."""

    score: str | None
    names: dict[str, str]
    published: dict[str, float]
    epochs: int = 0


NO_LABELS = Labels(None, {}, {})


def labels_of(config: dict) -> Labels:
    """Return the `Labels` of a run. config: `Run.config`."""
    epochs = config["settings"].get("epochs")
    epochs = epochs if isinstance(epochs, int) and 0 < epochs < MAX_DRAWN else 0
    if config["task"] not in TASKS:
        return NO_LABELS._replace(epochs=epochs)
    kind = find(config["task"])
    folders = Path(str(config["settings"].get("dataset_dir")).lower()).parts
    published = kind.published if kind.dataset.lower() in folders else {}
    return Labels(kind.score, kind.score_names, published, epochs)


def _of_kept_weights(records, name):
    """Return a value in the scores of the evaluation whose weights are kept, else of the last one that has
    it, or None."""
    evaluations = [one for one in _of_kind(readable(records), "evaluation") if one["scores"].get(name)]
    kept = [evaluation for evaluation in evaluations if evaluation["kept"]] or evaluations
    return kept[-1]["scores"][name] if kept else None


def roc(records: list) -> dict | None:
    """Return a dict of lists tpr, fpr, precision, threshold of the weights that are kept, or None."""
    rates = _of_kept_weights(records, "roc")
    if rates is None:
        return None
    last = max(len(rates["tpr"]) - 1, 1)
    return dict(rates, threshold=[index / last for index in range(len(rates["tpr"]))])


def confusion(records: list) -> dict | None:
    """Return classes (K names) and counts (K, K) of the weights that are kept, or None."""
    return _of_kept_weights(records, "confusion")


def per_class_table(confusion: dict) -> Table:
    """Return a table of the classes of `confusion`: number of test images, precision, recall."""
    rows = []
    for name, row, column in zip(confusion["classes"], confusion["counts"], zip(*confusion["counts"])):
        correct = row[len(rows)]
        precision, recall = (_format_number(correct / of) if of else "" for of in (sum(column), sum(row)))
        rows.append((name, f"{sum(row):.0f}", precision, recall))
    return Table("Classes", ("class", "test images", "precision", "recall"), rows)


# What the accelerator did


def describe(records: list) -> list[str]:
    """Describe the accelerator's work in the last session of a run, in sentences, the most important first,
    and how long all sessions took."""
    session = _last_session(records)
    if not session:
        return ["This run has not started yet."]
    worked = _worked(records)
    which = f"The last of {len(worked)} sessions" if len(worked) > 1 else "It"
    sentences = [f"{which} ran on {session[0]['device']}."]
    for record in _of_kind(session, "diverged")[-1:]:
        sentences.append(f"It stopped at step {record['step']}: loss or gradient was not a finite number.")
    for record in _of_kind(session, "stopped")[-1:]:
        reason = f"no better score within a patience of {record['patience']}"
        sentences.append(f"It stopped early after epoch {record['epoch'] + 1}: {reason}.")
    speeds = [record["speed"] for record in _of_kind(session, "train")]
    return [*sentences, *_describe_graphs(session, speeds), *_describe_time(speeds, worked)]


def _describe_graphs(session, speeds):
    """Describe what was compiled or captured, and what ran on the CPU instead."""
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
        if session[0].get("compile") == "yes":
            sentences.append("torch.compile compiled the loss; it does not report when.")
        return sentences or [words.NOTHING_COMPILES]
    if speeds and not expected:
        sentences.append("The training step was not compiled: this session had already compiled this graph.")
    if speeds:
        fallbacks = speeds[-1]["counters"].get("fallbacks") or {}
        hint = " `tpukit report RUN --trace 5` names their lines." if fallbacks else ""
        sentences.append(words.describe_fallbacks(fallbacks) + hint)
    return sentences


def _of_step(session):
    """Return the records of compilations of the training step."""
    return [record for record in _of_kind(session, "compile") if record["what"] == "step"]


def _made_graphs(compilation):
    return not compilation["refused"] and bool(compilation["programs"])


def _step_compilations(session):
    """Return the (expected, unexpected) compilations of the training step: records, expected as many as the
    training allowed. The last may be one that was refused."""
    done = [record for record in _of_step(session) if _made_graphs(record)]
    slow = [record for record in done if record["seconds"] >= LONG_COMPILE_S] or done[:1]
    allowed = session[0]["max_graphs"] if session else 0
    refused = [record for record in _of_step(session) if record["refused"]]
    return slow[:allowed], slow[allowed:] + refused


def _why(compilation, before=""):
    """Join the causes of a compilation, with a text before them; nothing where it has none."""
    causes = "; ".join(compilation["why"])
    return f"{before}{causes}" if causes else ""


def _describe_time(speeds, worked):
    """Describe speed and durations. speeds: of the last session's intervals. worked: the sessions."""
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
    """Return tables of the last session: compilations with their causes, the time of a step, memory."""
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
    """Return the intervals between two metric syncs of the last session, in milliseconds per step.

    Each is dict(from, to, images_per_s, and the names of `TIMES`). The host waits for data; sending and
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
    """Return the steps of the last session at which the training step was compiled."""
    expected, unexpected = _step_compilations(_last_session(records))
    return [record["step"] for record in expected + unexpected]


# A run that is still training


def headline(records: list) -> str:
    """Describe a training run in one line: its device and its compilations."""
    sessions = _sessions(records)
    if not sessions:
        return "The training starts: the first step is compiled or prepared"
    session = sessions[-1]
    parts = [session[0]["device"]]
    if compiled := [record for record in _of_kind(session, "compile") if _made_graphs(record)]:
        seconds = format_duration(sum(record["seconds"] for record in compiled))
        parts.append(f"{len(compiled)} compilation{'s' if len(compiled) > 1 else ''}, {seconds}")
    return " · ".join(parts)
