"""Turn the records of a run into sentences and tables. Pure functions: no files, no device, no drawing."""

from collections.abc import Callable
from typing import Any, NamedTuple

from tpukit.devices import LONG_COMPILE_S
from tpukit.host.tables import Table
from tpukit.host.text import format_duration

Record = dict[str, Any]
Series = dict[str, tuple[list[float], list[float]]]  # name -> (x, y)

MAX_DRAWN = 2.0**63  # in size; more breaks the axes of a figure
SYNTHETIC = "on synthetic data (they say nothing about real data)"  # in a title
NO_SCORES = ("loss", "gradient norm", "learning rate")  # the names of the curves that show no score


def readable(records: list[Record]) -> list[Record]:
    """Return the records without those whose values are not as training writes them: anybody may have written
    the file."""
    return [record for record in records if _is_readable(record)]


def _is_readable(record):
    """Return True if what is read of a record of its kind has the type that it needs."""
    try:
        speed = record.get("speed")
        match record["kind"]:
            case "start":
                positive = are_numbers(record["batch_size"], record["steps_per_epoch"], least=1)
                return positive and isinstance(record["max_graphs"], int) and "device" in record
            case "train":
                optional = [speed.get(name) or 0.0 for name in ("to_device_s", "from_device_s")]
                times = are_numbers(speed["seconds"], speed["images_per_s"], speed["wait_s"], *optional)
                memory = are_numbers(*(value for pair in speed["memory"] for value in (pair[0], pair[1])))
                counted = isinstance((speed["counters"] or {}).get("fallbacks") or {}, dict)
                return times and memory and counted and {"loss", "grad_norm"} <= record.keys()
            case "evaluation":
                beside = record["scores"].get("beside") or {}
                are_scores = all(isinstance(other, dict) for other in beside.values())
                return are_numbers(record["epoch"], speed["seconds"]) and "kept" in record and are_scores
            case "compile":
                words = isinstance(record["what"], str) and all(isinstance(why, str) for why in record["why"])
                known = {"refused", "programs"} <= record.keys()
                return words and known and isinstance(record["why"], list) and are_numbers(record["seconds"])
        return True
    except (LookupError, TypeError, AttributeError):
        return False


def are_numbers(*values: Any, least: float = 0) -> bool:
    """Return True for numbers from `least` on that can be drawn."""
    return all(isinstance(value, (int, float)) and least <= value < MAX_DRAWN for value in values)


def of_kind(records: list[Record], kind: str) -> list[Record]:
    """Return the readable records of a kind."""
    return [record for record in readable(records) if record["kind"] == kind]


def sessions_of(records: list[Record]) -> list[list[Record]]:
    """Return lists of readable records, each beginning with that of a start."""
    sessions = []
    for record in readable(records):
        if record["kind"] == "start":
            sessions.append([])
        if sessions:
            sessions[-1].append(record)
    return sessions


def last_session(records: list[Record]) -> list[Record]:
    """Return the records of the last session that trained or compiled, else of the last session: a finished
    run that is started again does neither."""
    return (worked_sessions(records) or sessions_of(records) or [[]])[-1]


def worked_sessions(records: list[Record]) -> list[list[Record]]:
    """Return the sessions that trained or compiled."""
    return [s for s in sessions_of(records) if of_kind(s, "train") or of_kind(s, "compile")]


# Scores and curves


def scores_table(scores: dict, names: dict, title: str = "Scores", column: str = "value") -> Table:
    """Return the scores of an evaluation by their names in charts, without one that is the negative of one
    with a name. `beside` holds the same scores for each further column."""
    beside, rows, shown = scores.get("beside") or {}, [], [number_in(scores, name) for name in names]
    for name, value in scores.items():
        if isinstance(value, (int, float)) and (name in names or not value or -value not in shown):
            values = [value, *(other.get(name, "") for other in beside.values())]
            rows.append((names.get(name, name.replace("_", " ")), *map(format_number, values)))
    return Table(title, ("score", column, *beside), rows)


def format_number(value: Any) -> Any:
    """Return a float with four digits, and anything else as it is."""
    if not isinstance(value, float):
        return value
    return f"{value:.3e}" if 0 < abs(value) < 1e-3 else f"{value:.4f}"


def last_and_kept_table(records: list, names: dict) -> Table | None:
    """Return the scores of the last evaluation and of the one whose weights are kept; None without any.
    names: of scores in charts."""
    evaluations = of_kind(records, "evaluation")
    kept = kept_evaluation(evaluations)
    if kept is None:
        return None
    last, starts = evaluations[-1], of_kind(records, "start")
    kind = f" · {SYNTHETIC}" if starts and starts[-1].get("synthetic") else ""
    places = [f"epoch {one['epoch'] + 1}" for one in (last, kept)]
    if any(one["step"] % steps_per_epoch(records) for one in (last, kept)):
        places = [f"step {one['step']}" for one in (last, kept)]
    if kept is last:
        column = "last, kept" if last["kept"] else "last"
        return scores_table(last["scores"], names, f"Scores after {places[0]}{kind}", column)
    title = "Scores after {} (last) and {} (kept)".format(*places) + kind
    beside = {"kept": kept["scores"], **(last["scores"].get("beside") or {})}
    return scores_table(dict(last["scores"], beside=beside), names, title, "last")


def kept_evaluation(evaluations: list[Record]) -> Record | None:
    """Return the evaluation whose weights are kept, else the last one; None without any."""
    kept = [evaluation for evaluation in evaluations if evaluation["kept"]] or evaluations
    return kept[-1] if kept else None


def verdict(records: list, judge: Callable[[dict, dict], str | None] = lambda scores, last: None) -> str:
    """Return a sentence about the scores of the kept weights, or "" if they need no comment. judge:
    `Displayed.verdict` of the task, whose sentence comes first; without it, what holds for any task."""
    evaluations = of_kind(records, "evaluation")
    kept = kept_evaluation(evaluations)
    if kept is None:
        return ""
    if sentence := judge(kept["scores"], evaluations[-1]["scores"]):
        return sentence
    if len(evaluations) > 3 and kept is evaluations[-1]:
        return "The last epoch is the best one: train longer, and the scores may rise further."
    return ""


def number_in(scores: dict, name: str) -> float | None:
    """Return a score of an evaluation; None if it is missing, or no number."""
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
    """Return the steps of an epoch of the last session; 1 if nothing tells."""
    starts = of_kind(records, "start")
    return starts[-1]["steps_per_epoch"] if starts else 1


def planned_epochs(records: list) -> float:
    """Return the epochs that the last session was to train; 0 if nothing tells."""
    starts: list[Any] = of_kind(records, "start")
    epochs = starts[-1].get("epochs") if starts else 0
    return epochs if are_numbers(epochs) else 0


class Labels(NamedTuple):
    """A task's names of its scores."""

    score: str | None
    """The one that decides which weights are best."""
    names: dict[str, str]
    """The scores worth a curve, with unit; all if there are none."""


NO_LABELS = Labels(None, {})


def labels_of(config: dict) -> Labels:
    """Return the `Labels` of a run. config: `Run.config`, a file in which anybody may have written."""
    score, names = config.get("score"), config.get("score_names")
    names = names if isinstance(names, dict) and all(isinstance(unit, str) for unit in names.values()) else {}
    return Labels(score if isinstance(score, str) else None, names)


# A run that is still training


def headline(records: list) -> str:
    """Describe a training run in one line: its device and its compilations."""
    sessions = sessions_of(records)
    if not sessions:
        return "Training starts: the first step is compiled or prepared"
    session = sessions[-1]
    parts = [session[0]["device"]]
    if compiled := [record for record in of_kind(session, "compile") if made_graphs(record)]:
        seconds = format_duration(sum(record["seconds"] for record in compiled))
        parts.append(f"{len(compiled)} compilation{'s' if len(compiled) > 1 else ''}, {seconds}")
    return " · ".join(parts)


def of_step(session: list[Record]) -> list[Record]:
    """Return the records of compilations of the training step."""
    return [record for record in of_kind(session, "compile") if record["what"] == "step"]


def made_graphs(compilation: Record) -> bool:
    """Return True if a compilation made a graph, or a capture."""
    return not compilation["refused"] and bool(compilation["programs"])


def step_compilations(session: list[Record]) -> tuple[list[Record], list[Record]]:
    """Return the (expected, unexpected) compilations of the training step: records, expected as many as the
    training allowed. The last may be one that was refused."""
    done = [record for record in of_step(session) if made_graphs(record)]
    slow = [record for record in done if record["seconds"] >= LONG_COMPILE_S] or done[:1]
    allowed = session[0]["max_graphs"] if session else 0
    refused = [record for record in of_step(session) if record["refused"]]
    return slow[:allowed], slow[allowed:] + refused
