"""Records of a run in -> tables and findings in words out. Pure functions: no files, no device, no drawing."""

from tpukit.tables import Table


def scores_table(scores, title="Scores"):
    """The scores of an evaluation, and in columns beside them what the workload compares them with.

    scores: name -> number; `beside`: column -> scores of the same names; `published`: as the published code counts them.
    """
    beside = dict(scores.get("beside", {}))
    if "published" in scores:
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
    for record in records:
        if record["kind"] == "train":
            for name, key in (("loss", "loss"), ("gradient norm", "grad_norm")):
                _append(series[name], record["step"], record[key])
        elif record["kind"] == "evaluation":
            for name, value in record["scores"].items():
                if isinstance(value, float):
                    _append(series.setdefault(name, ([], [])), record["step"], value)
    return {name: points for name, points in series.items() if points[0]}


def _append(points, step, value):
    if value is not None:
        points[0].append(step)
        points[1].append(value)


def findings(records):
    """What the accelerator did in the last session of a run, as a list of sentences, the most important first."""
    starts = [i for i, r in enumerate(records) if r["kind"] == "start"]
    if not starts:
        return ["This run has not started yet."]
    start, session = records[starts[-1]], records[starts[-1] :]
    trained = [r for r in session if r["kind"] == "train"]
    said = [f"It ran on {start['device']}."]
    said += _said_of_end(session)
    if not trained:
        return [*said, "No interval of training was recorded yet."]
    said += _said_of_compilations(start, session, trained)
    said += _said_of_time(session, trained)
    return said


def _said_of_end(session):
    diverged = [r for r in session if r["kind"] == "diverged"]
    return [f"It stopped at step {diverged[-1]['step']}: loss or gradient was not a finite number."] if diverged else []


def _said_of_compilations(start, session, trained):
    compiled = [r for r in session if r["kind"] == "compile"]
    counters = trained[-1]["speed"]["counters"]
    if not counters:
        return ["Nothing is compiled on this device: PyTorch runs each operation as it comes."]
    # Programs of a few operations (fresh sums) compile in milliseconds and are not worth a word.
    large = [r for r in compiled if r["seconds"] >= 0.5] or compiled[:1]
    expected, extra = large[: start["phases"]], large[start["phases"] :]
    times = " and ".join(f"at step {r['step']} ({r['seconds']:.1f} s)" for r in expected)
    said = [f"The training step was compiled {times}; every other step reused the program."]
    if not expected:
        said = ["The training step was not compiled: this session had compiled the same program before."]
    said += [
        f"Step {r['step']} compiled again ({r['seconds']:.1f} s): a shape or a Python number changed there." for r in extra
    ]
    fallbacks = counters["fallbacks"]
    if fallbacks:
        worst = ", ".join(f"{name} ({count} times)" for name, count in sorted(fallbacks.items(), key=lambda f: -f[1])[:4])
        said.append(f"Some operations have no XLA form and ran on the CPU, each a round trip: {worst}.")
    else:
        said.append("No operation fell back to the CPU.")
    return said


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
    evaluating = sum(r["speed"]["seconds"] for r in session if r["kind"] == "evaluation")
    if evaluating:
        said.append(f"Training took {seconds:.0f} s, evaluation {evaluating:.0f} s.")
    return said


def accelerator_table(records):
    """The accelerator's counters at the end of the last session: compilations, device and transfer time, memory."""
    starts = [i for i, r in enumerate(records) if r["kind"] == "start"]
    trained = [r for r in records[starts[-1] :] if r["kind"] == "train"] if starts else []
    rows = []
    if trained:
        speed = trained[-1]["speed"]
        counters, memory = speed["counters"], speed["memory"]
        if counters:
            rows = [
                ("compilations", counters["compilations"], f"{counters['compile_s']:.1f} s"),
                ("programs run", counters["executions"], f"{counters['execute_s']:.1f} s"),
                ("sent to the device", "", f"{counters['to_device_s']:.2f} s"),
                ("read from the device", "", f"{counters['from_device_s']:.2f} s"),
                ("operations on the CPU instead", sum(counters["fallbacks"].values()), ""),
            ]
        if memory:
            peak, total = memory["peak_bytes"] / 2**30, memory["total_bytes"] / 2**30
            rows.append(("peak memory", f"{peak:.2f} GiB", f"of {total:.2f} GiB"))
        rows.append(("samples a second, last interval", f"{speed['images_per_s']:.1f}", ""))
    return Table("What the accelerator did", ("what", "count", "time"), rows)


def _number(value):
    return (
        f"{value:.3e}"
        if isinstance(value, float) and 0 < abs(value) < 1e-3
        else f"{value:.4f}"
        if isinstance(value, float)
        else value
    )
