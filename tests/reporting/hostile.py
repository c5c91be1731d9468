"""Runs and comparisons whose files hold a text wherever they can."""

import json

from tpukit.runs.run import Run

# What a file may hold that a stranger gave away: markup of notebooks, of rich, of matplotlib, and what a
# terminal obeys.
EVIL = (
    "$\\frac$<script>alert(1)</script><img src=x onerror=alert(1)>`<img"
    " src='https://a.example/b.png'>\n\n# x\n"
    "[x](javascript:alert(1))![x](https://a.example/b.png)|a|b|\n|-|-|\n[/b][link=https://a.example]$\\href{javascript:x}{y}$"
    "</li></ul></td></table></style><script>\x1b[2J\x1b]0;x\x07\x9b\u202e\ud800&lt;script&gt;\\"
)


def strange_run(folder, word):
    """A run whose files hold a word wherever they can."""
    counters = dict.fromkeys(
        ("compilations", "compile_s", "executions", "execute_s", "to_device_s", "from_device_s"), 1
    )
    speed = dict(
        seconds=2.0,
        images_per_s=8.0,
        wait_s=0.5,
        memory=[[2**30, 2**34]],
        counters={**counters, "fallbacks": {word: 3}},
    )
    compiled = dict(kind="compile", programs=1, seconds=9.0, why=[word], refused=False)
    records = [
        dict(kind="start", step=0, device=word, accelerator=word, batch_size=4, torch_compile=word),
        dict(compiled, step=1, what="step"),
        dict(compiled, step=2, what="step"),
        dict(compiled, step=3, what="step", refused=True),
        dict(compiled, step=4, what=word),
        dict(kind="train", step=4, epoch=0, loss=1.0, grad_norm=1.0, speed=speed),
        dict(kind="train", step=8, epoch=0, loss=0.5, grad_norm=1.0, speed=speed),
        dict(kind=word, step=8, note=word),
        dict(
            kind="evaluation",
            step=8,
            epoch=1,
            scores={word: 0.5, "iou": 0.25, "beside": {word: {word: 0.5, "iou": word}}},
            speed=dict(seconds=1.0),
        ),
    ]
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dict(task=word, settings={word: word})))
    (folder / "records.jsonl").write_text(
        "".join(json.dumps(dict(record, time=0.0)) + "\n" for record in records)
    )
    (folder / "progress.json").write_text(
        json.dumps(dict(step=4, total=9, unit=word, name=word, epoch=word, loss=word))
    )
    (folder / "checkpoints/checkpoints.json").write_text(json.dumps([dict(file=word, step=8, sha256=word)]))
    return Run.find(folder)


def strange_measurement(path, word):
    """A file of `tpukit compare` that holds a word wherever it can."""
    times = dict(first_step_s=2.0, start_s=3.0, step_ms=9.0, step_ms_low=8.0, step_ms_high=10.0, wait_ms=1.0)
    row = dict(times, batch_size=8, fits=True, timed_steps=20, compiled_late=0, memory_bytes=2**30)
    kept = dict(
        format="tpukit comparison 1",
        tpukit=word,
        date=word,
        hardware=word,
        chips=1,
        accelerator="cuda",
        place=word,
        device=word,
    )
    kept |= dict(
        cores=1,
        precision=word,
        python=word,
        versions={word: word},
        task=word,
        recipe={word: word},
    )
    kept |= dict(
        samples=80,
        rows=[row, dict(row, batch_size=16), dict(batch_size=32, fits=False, why=word)],
    )
    path.write_text(json.dumps(kept))
    return path
