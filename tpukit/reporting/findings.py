"""Records of a run in -> tables and findings in words out. Pure functions: no files, no device, no drawing."""

import math

from tpukit.host.tables import GIB, Table, format_duration
from tpukit.runs.run import LONG_COMPILE_S

# What is read here of a record, by its kind: a type; a tuple of what it may be, None standing for what may be missing too;
# [of every item, ...], or [of the first, of the second]; {name: of its value}, or {...: of every value}.
_COUNTERS = dict.fromkeys(("compilations", "compile_s", "executions", "execute_s", "to_device_s", "from_device_s"), float)
_SPEED = dict.fromkeys(("seconds", "images_per_s", "wait_s"), float)
_SPEED |= dict.fromkeys(("to_device_s", "from_device_s"), (float, None))
_SPEED |= dict(memory=[[float, float], ...], counters=({**_COUNTERS, "fallbacks": {...: int}}, {...: ()}))
SHAPES = dict(
    start=dict(device=str, phases=int, batch_size=(int, None)),
    train=dict(loss=(float, None), grad_norm=(float, None), speed=_SPEED),
    evaluation=dict(epoch=int, scores=dict(beside=({...: dict}, None), published=(dict, None)), speed=dict(seconds=float)),
    compile=dict(seconds=float, what=(str, None), why=([str, ...], None)),
)
_LIVE = dict(step=int, total=int, unit=str)


def whole(records):
    """The records without the damaged ones: a bit that flipped on a disk can leave JSON, with a name or a value less."""
    return [r for r in records if _fits(r, dict(kind=str, step=int)) and _fits(r, SHAPES.get(r["kind"], {}))]


def _fits(value, shape):
    if isinstance(shape, tuple):
        return any(_fits(value, one) for one in shape)
    if isinstance(shape, list):
        of_each = [shape[0]] * len(value) if shape[-1] is ... and isinstance(value, list) else shape
        return isinstance(value, list) and len(value) == len(of_each) and all(map(_fits, value, of_each))
    if isinstance(shape, dict):
        names = dict.fromkeys(value, shape[...]) if ... in shape and isinstance(value, dict) else shape
        return isinstance(value, dict) and all(_fits(value.get(name), of_it) for name, of_it in names.items())
    if shape is None or isinstance(value, bool):
        return value is shape
    if shape in (int, float):
        return isinstance(value, (int, shape)) and abs(value) < 2**63  # neither NaN nor infinity is
    return isinstance(value, shape)


def scores_table(scores, title="Scores"):
    """The scores of an evaluation, and in columns beside them what the workload compares them with.

    scores: name -> number; `beside`: column -> scores of the same names; `published`: as the published code counts them.
    """
    beside = dict(scores.get("beside") or {})
    if scores.get("published"):
        beside["as the published code counts"] = scores["published"]
    rows = [
        (name, _number(value), *(_number(other.get(name, "")) for other in beside.values()))
        for name, value in scores.items()
        if isinstance(value, (int, float))
    ]
    return Table(title, ("score", "value", *beside), rows)


def settings_table(config):
    """A workload's settings. config: dict(workload, settings)."""
    return Table(f"Settings of {config['workload']}", ("setting", "value"), config["settings"].items())


def curves(records):
    """dict of series for drawing: name -> (steps, values). Names: loss, gradient norm, and every evaluation score."""
    series = {"loss": ([], []), "gradient norm": ([], [])}
    for record in whole(records):
        if record["kind"] == "train":
            for name, key in (("loss", "loss"), ("gradient norm", "grad_norm")):
                _append(series[name], record["step"], record.get(key))
        elif record["kind"] == "evaluation":
            for name, value in record["scores"].items():
                if isinstance(value, float):
                    _append(series.setdefault(name, ([], [])), record["step"], value)
    return {name: points for name, points in series.items() if points[0]}


def _append(points, step, value):
    if value is not None and math.isfinite(value):
        points[0].append(step)
        points[1].append(value)


def findings(records):
    """What the accelerator did in the last session of a run, as a list of sentences, the most important first."""
    session = _last_session(records)
    damaged = len(records) - len(whole(records))
    said = [f"Left out: {damaged} damaged record{'s' * (damaged > 1)}."] * bool(damaged)
    if not session:
        return said or ["This run has not started yet."]
    start = session[0]
    trained = [r for r in session if r["kind"] == "train"]
    said += [f"It ran on {start['device']}."]
    said += _said_of_end(session)
    said += _said_of_compilations(start, session, trained)
    return said + (_said_of_time(session, trained) if trained else ["No interval of training was recorded yet."])


def _last_session(records):
    """The whole records of the last session that did something; of the last one, where none did. A finished run that is started
    again does nothing."""
    records = whole(records)
    starts = [i for i, r in enumerate(records) if r["kind"] == "start"]
    sessions = [records[a:b] for a, b in zip(starts, [*starts[1:], None])]
    worked = [session for session in sessions if any(r["kind"] in ("train", "compile") for r in session)]
    return (worked or sessions or [[]])[-1]


def _said_of_end(session):
    diverged = [r for r in session if r["kind"] == "diverged"]
    return [f"It stopped at step {diverged[-1]['step']}: loss or gradient was not a finite number."] if diverged else []


def _said_of_compilations(start, session, trained):
    counters = trained[-1]["speed"]["counters"] if trained else None
    if trained and not counters:
        if start.get("torch_compile", "no") != "no":
            return [f"torch.compile made the model's programs ({start['torch_compile']}); it does not tell when."]
        return ["Nothing is compiled on this device: PyTorch runs each operation as it comes."]
    expected, extra, refused, others = _compilations(start, session)
    said = [f"The training step was compiled {_when(expected)}; every other step reused the program."]
    if not expected:
        said = ["The training step was not compiled: this session had compiled the same program before."] if trained else []
    said += [
        f"Step {r['step']} compiled again ({r['seconds']:.1f} s){_because(r) or ', though no argument changed'}." for r in extra
    ]
    said += [f"Step {r['step']} was one program too many{_because(r)}. It ended the run there." for r in refused]
    for what in dict.fromkeys(map(_what, others)):
        said.append(f"Besides, {what} was compiled {_when([r for r in others if _what(r) == what])}.")
    fallbacks = counters["fallbacks"] if counters else None
    if fallbacks:
        worst = ", ".join(f"{name} ({count} times)" for name, count in sorted(fallbacks.items(), key=lambda f: -f[1])[:4])
        said.append(
            f"Some operations have no XLA form and ran on the CPU, each a round trip: {worst}. "
            "`tpukit report RUN --trace 5` names their lines."
        )
    elif counters:
        said.append("No operation fell back to the CPU.")
    return said


def _compilations(start, session):
    """Records of compilations: (of the step, as many as it has phases; more of it; those refused; of other functions)."""
    compiled = [r for r in session if r["kind"] == "compile"]
    of_step = [r for r in compiled if _what(r) == "step"]
    done = [r for r in of_step if not r.get("refused")]
    large = [r for r in done if r["seconds"] >= LONG_COMPILE_S] or done[:1]
    others = [r for r in compiled if r not in of_step and r["seconds"] >= LONG_COMPILE_S]
    return large[: start["phases"]], large[start["phases"] :], [r for r in of_step if r.get("refused")], others


def _what(compiled):
    return compiled.get("what") or "step"


def _when(compiled):
    return " and ".join(f"at step {r['step']} ({r['seconds']:.1f} s{_because(r, ', ')})" for r in compiled)


def _because(record, how=" because "):
    return how + "; ".join(record["why"]) if record.get("why") else ""


def _said_of_time(session, trained):
    seconds = sum(r["speed"]["seconds"] for r in trained)
    waited = sum(r["speed"]["wait_s"] for r in trained)
    steady = [r["speed"]["images_per_s"] for r in trained]
    share = waited / max(seconds, 1e-9)
    said = [f"Fastest interval: {max(steady):.1f} samples a second."]
    if share > 0.1:
        said.append(f"The device waited for data {share:.0%} of the time: raise num_workers, or shrink the images once.")
    else:
        said.append(f"Waiting for data took {share:.1%} of the training time.")
    if not trained[-1]["speed"]["memory"]:
        said.append("How much of its memory was used, this device does not tell.")
    evaluating = sum(r["speed"]["seconds"] for r in session if r["kind"] == "evaluation")
    if evaluating:
        said.append(f"Training took {seconds:.0f} s, evaluation {evaluating:.0f} s.")
    return said


def live_table(name, records, live, checkpoints, age_s):
    """A run as it stands. live: of `Run.read_progress`. age_s: seconds since that was written, None where it never was."""
    rows, records = [], whole(records)
    starts = [i for i, r in enumerate(records) if r["kind"] == "start"]
    session = records[starts[-1] :] if starts else []
    if not session or age_s is None or not _fits(live, _LIVE):
        return Table(f"{name}: has not started yet", ("what", "now"), rows)
    rows.append(("device", session[0]["device"]))
    share = live["step"] / max(live["total"], 1)
    rows.append((live["unit"], f"{live['step']} of {live['total']} ({share:.1%}), {_ago(age_s)}"))
    rows += [(what, live[what]) for what in ("epoch", "loss") if live.get(what)]
    if trained := [r["speed"] for r in session if r["kind"] == "train"]:
        rate, wait = trained[-1]["images_per_s"], trained[-1]["wait_s"] / max(trained[-1]["seconds"], 1e-9)
        rows.append(("speed", f"{rate:.1f} samples a second, waiting for data {wait:.1%} of the time"))
        left = (live["total"] - live["step"]) * _batch_size(session)
        if left and live["unit"] == "step" and rate > 0:
            rows.append(("left", f"about {format_duration(left / rate)} of training, evaluations besides"))
    if evaluated := [r for r in session if r["kind"] == "evaluation"]:
        scores = ", ".join(f"{n} {v:.4g}" for n, v in evaluated[-1]["scores"].items() if isinstance(v, float))
        rows.append((f"scores of epoch {evaluated[-1]['epoch'] + 1}", scores))
    _, late, _, _ = _compilations(session[0], session)
    if late:
        rows.append(("compiled again", "at step " + ", ".join(str(r["step"]) for r in late)))
    steps = _steps_of(checkpoints)
    rows.append(("last checkpoint", f"step {steps[0]}" if steps else "none yet"))
    return Table(name, ("what", "now"), rows)


def is_over(live, checkpoints):
    """Whether nothing will follow: after its last step a training evaluates, and the checkpoint of that step comes last."""
    if not _fits(live, _LIVE) or live["step"] < live["total"]:
        return False
    return live["unit"] != "step" or any(step >= live["total"] for step in _steps_of(checkpoints))


def _steps_of(checkpoints):
    return [c["step"] for c in checkpoints if _fits(c, dict(step=int))] if isinstance(checkpoints, list) else []


def _ago(seconds):
    if seconds < 10:
        return "just now"
    return f"{format_duration(seconds)} ago{': it waits, compiles, evaluates, or is gone' if seconds > 60 else ''}"


def accelerator_tables(records):
    """What the accelerator did in the last session, as tables: compilations with their causes, the time of a step, memory,
    counters."""
    session = _last_session(records)
    trained = [r for r in session if r["kind"] == "train"]
    tables, seen = [], set()
    if compiled := [r for r in session if r["kind"] == "compile"]:
        rows = []
        for r in compiled:
            what = _what(r)
            why = "; ".join(r.get("why") or []) or ("no argument changed" if what in seen else "the first time")
            rows.append((r["step"], what, "refused" if r.get("refused") else f"{r['seconds']:.1f}", why))
            seen.add(what)
        tables.append(Table("Compilations", ("step", "function", "seconds", "why"), rows))
    if not trained:
        return tables
    rows = [
        (
            f"{i['from']} to {i['to']}",
            *(f"{i[part]:.2f}" for part in ("step_ms", "wait_ms", "to_device_ms", "from_device_ms")),
            f"{i['images_per_s']:.1f}",
        )
        for i in _some(intervals(records))
    ]
    columns = ("steps", "ms a step", "waiting for data", "sending", "reading", "samples a second")
    tables.append(Table("Where a step's time went, ms a step", columns, rows))
    if memory := trained[-1]["speed"]["memory"]:
        rows = [
            (n, f"{peak / GIB:.2f}", f"{total / GIB:.2f}", f"{peak / max(total, 1):.0%}")
            for n, (peak, total) in enumerate(memory)
        ]
        tables.append(Table("Memory", ("device", "peak, GiB", "of GiB", ""), rows))
    if counters := trained[-1]["speed"]["counters"]:
        rows = [
            ("programs compiled", counters["compilations"], f"{counters['compile_s']:.1f} s"),
            ("programs run", counters["executions"], f"{counters['execute_s']:.1f} s"),
            ("sent to the device", "", f"{counters['to_device_s']:.2f} s"),
            ("read from the device", "", f"{counters['from_device_s']:.2f} s"),
            *((f"{name} on the CPU instead", count, "") for name, count in counters["fallbacks"].items()),
        ]
        tables.append(Table("The accelerator's counters", ("what", "count", "time"), rows))
    return tables


def _some(rows, most=12):
    """Up to so many of the rows, evenly, the last among them."""
    step = max(1, -(-len(rows) // most))
    return rows[len(rows) - 1 :: -step][::-1] if rows else []


def intervals(records):
    """The intervals between two readings of the last session, in milliseconds a step: a list of dict(from, to, step_ms,
    wait_ms, to_device_ms, from_device_ms, images_per_s, memory). A wait is for data; sending and reading go on beside the
    device's work."""
    session = _last_session(records)
    found = []
    for record in session:
        if record["kind"] != "train":
            continue
        speed = record["speed"]
        steps = max(1, round(speed["images_per_s"] * speed["seconds"] / _batch_size(session)))
        part = {f"{way}_ms": 1e3 * (speed.get(f"{way}_s") or 0.0) / steps for way in ("wait", "to_device", "from_device")}
        found.append(
            {
                "from": record["step"] - steps + 1,
                "to": record["step"],
                "step_ms": 1e3 * speed["seconds"] / steps,
                **part,
                "images_per_s": speed["images_per_s"],
                "memory": speed["memory"],
            }
        )
    return found


def _batch_size(session):
    return max(session[0].get("batch_size") or 1, 1)


def compiled_at(records):
    """Steps of the last session at which the training step was compiled."""
    session = _last_session(records)
    expected, again, _, _ = _compilations(session[0], session) if session else ((), (), (), ())
    return [r["step"] for r in (*expected, *again)]


def _number(value):
    if not isinstance(value, float):
        return value
    return f"{value:.3e}" if 0 < abs(value) < 1e-3 else f"{value:.4f}"
