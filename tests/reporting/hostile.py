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
SPEED = dict(seconds=2.0, images_per_s=8.0, wait_s=0.5, memory=[], counters={})


def evaluated(step, epoch, scores, **more):
    """The record of an evaluation."""
    about = dict(kind="evaluation", step=step, epoch=epoch, speed=dict(seconds=1.0))
    return about | dict(scores=scores) | more


def write_run(folder, records, **config):
    """A run of these records."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dict(task="mnist", settings={}) | config))
    lines = [json.dumps(dict(record, time=0.0)) + "\n" for record in records]
    (folder / "records.jsonl").write_text("".join(lines))
    return Run(folder)


def strange_run(folder, word):
    """A run whose files hold a word wherever they can."""
    speed = SPEED | dict(memory=[[2**30, 2**34]], counters=dict(compilations=1, fallbacks={word: 3}))
    compiled = dict(kind="compile", programs=1, seconds=9.0, why=[word], refused=False)
    scores = {word: 0.5, "iou": 0.25, "beside": {word: {word: 0.5, "iou": word}}}
    records = [
        dict(kind="start", step=0, device=word, accelerator=word, batch_size=4, torch_compile=word),
        dict(compiled, step=1, what="step"),
        dict(compiled, step=2, what="step"),
        dict(compiled, step=3, what="step", refused=True),
        dict(compiled, step=4, what=word),
        dict(kind="train", step=4, epoch=0, loss=1.0, grad_norm=1.0, speed=speed),
        dict(kind="train", step=8, epoch=0, loss=0.5, grad_norm=1.0, speed=speed),
        dict(kind=word, step=8, note=word),
        evaluated(8, 1, scores),
    ]
    run = write_run(folder, records, task=word, settings={word: word})
    progress = dict(step=4, total=9, unit=word, name=word, epoch=word, loss=word)
    (folder / "progress.json").write_text(json.dumps(progress))
    (folder / "checkpoints/checkpoints.json").write_text(json.dumps([dict(file=word, step=8, sha256=word)]))
    return run


def strange_measurement(path, word):
    """A file of `tpukit compare` that holds a word wherever it can."""
    row = dict(batch_size=8, fits=True, timed_steps=20, compiled_late=0, memory_bytes=2**30)
    row |= dict(first_step_s=2.0, start_s=3.0, step_ms=9.0, step_ms_low=8.0, step_ms_high=10.0, wait_ms=1.0)
    words = ("tpukit", "date", "hardware", "place", "device", "precision", "python", "task")
    kept = dict.fromkeys(words, word) | dict(versions={word: word}, recipe={word: word})
    kept |= dict(format="tpukit comparison 1", accelerator="cuda", chips=1, cores=1)
    path.write_text(json.dumps(kept | dict(samples=80, rows=[row, dict(row, batch_size=16)])))
    return path
