"""Report the accelerator's work in a run, from its records. Pure functions, as in findings.py."""

import math

from tpukit.host.tables import Table
from tpukit.host.text import format_duration
from tpukit.reporting import device_words, findings

# Times of an interval by their names in the report -> field of the record's `speed`.
TIMES = {
    "step": "seconds",
    "waiting for data": "wait_s",
    device_words.SENDING: "to_device_s",
    device_words.READING: "from_device_s",
}


def describe(records: list) -> list[str]:
    """Describe the accelerator's work in the last session of a run, in sentences, the most important first,
    and how long all sessions took."""
    session = findings.last_session(records)
    if not session:
        return ["This run has not started yet."]
    worked = findings.worked_sessions(records)
    which = f"The last of {len(worked)} sessions" if len(worked) > 1 else "It"
    where = f"{which} ran on {session[0]['device']}."
    speeds = [record["speed"] for record in findings.of_kind(session, "train")]
    return [where, *_describe_graphs(session, speeds), *_describe_time(speeds, worked)]


def _describe_graphs(session, speeds):
    """Describe what was compiled or captured, and what ran on the CPU instead."""
    is_xla = not speeds or bool(speeds[-1]["counters"])
    if not is_xla and session[0].get("accelerator") == "tpu":
        return ["torch_tpu compiled the model and the predictions; it does not report when."]
    sentences = []
    made = "compiled" if is_xla else "captured"
    expected, unexpected = findings.step_compilations(session)
    if expected:
        form = "" if is_xla else " as a CUDA graph"
        steps = " and ".join(f"at step {r['step']} ({r['seconds']:.1f} s{_why(r, ', ')})" for r in expected)
        sentences.append(f"The training step was {made}{form} {steps}; every other step reused that graph.")
    for record in unexpected:
        reason = _why(record, " because ") or ", though no argument changed"
        end = ", which ended the run" if record["refused"] else ""
        sentences.append(f"Step {record['step']} {made} again ({record['seconds']:.1f} s){reason}{end}.")
    if not is_xla:
        for record in findings.of_step(session):
            if not findings.made_graphs(record):
                reason = _why(record, ", because ")
                sentences.append(f"The training step is not captured as a CUDA graph{reason}.")
        if session[0].get("compile") == "yes":
            sentences.append("torch.compile compiled the loss; it does not report when.")
        return sentences or [device_words.NOTHING_COMPILES]
    if speeds and not expected:
        sentences.append("The training step was not compiled: this session had already compiled this graph.")
    if speeds:
        fallbacks = speeds[-1]["counters"].get("fallbacks") or {}
        hint = " `tpukit report RUN --trace` names their lines." if fallbacks else ""
        sentences.append(device_words.describe_fallbacks(fallbacks) + hint)
    return sentences


def _why(compilation, before=""):
    """Return the causes of a compilation, with a text before them; nothing if it has none."""
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
        sum(record["speed"]["seconds"] for session in worked for record in findings.of_kind(session, kind))
        for kind in ("train", "evaluation")
    )
    where = f" in {len(worked)} sessions" if len(worked) > 1 else ""
    durations = [format_duration(seconds) for seconds in (training, evaluating)]
    return [*sentences, f"Training took {durations[0]}, evaluation {durations[1]}{where}."]


def intervals(records: list) -> list[dict]:
    """Return the intervals between two metric syncs of the last session, in milliseconds per step.

    Each is dict(from, to, images_per_s, and the names of `TIMES`). The host waits for data; sending and
    reading overlap with the device's work."""
    session = findings.last_session(records)
    spans = []
    for record in findings.of_kind(session, "train"):
        speed, batch_size = record["speed"], session[0]["batch_size"]
        steps = max(1, round(speed["images_per_s"] * speed["seconds"] / batch_size))
        span = {"from": record["step"] - steps + 1, "to": record["step"]}
        times = {name: 1e3 * (speed.get(field) or 0.0) / steps for name, field in TIMES.items()}
        spans.append(span | times | dict(images_per_s=speed["images_per_s"]))
    return spans


def accelerator_tables(records: list) -> list[Table]:
    """Return tables of the last session: compilations with their causes, the time of a step, memory."""
    session = findings.last_session(records)
    compilations, seen = [], set()
    for record in findings.of_kind(session, "compile"):
        function = record["what"]
        reason = _why(record) or ("no argument changed" if function in seen else "the first time")
        seconds = "refused" if record["refused"] else f"{record['seconds']:.1f}"
        compilations.append((record["step"], f"{function}()", seconds, reason))
        seen.add(function)
    spans, steps = intervals(records), []
    timed = [name for name in TIMES if any(f"{span[name]:.2f}" != "0.00" for span in spans)]
    stride = math.ceil(len(spans) / 12) or 1  # at most 12, the last among them
    for span in spans[(len(spans) - 1) % stride :: stride]:
        times = [f"{span[name]:.2f}" for name in timed]
        steps.append((f"{span['from']}–{span['to']}", *times, f"{span['images_per_s']:.1f}"))
    trained = findings.of_kind(session, "train")
    memory = trained[-1]["speed"]["memory"] if trained else []
    tables = (
        Table("Compilations", ("step", "function", "seconds", "why"), compilations),
        Table("Where a step's time went, ms per step", ("steps", *timed, "samples per second"), steps),
        device_words.memory_table(memory),
    )
    return [table for table in tables if table.rows]
