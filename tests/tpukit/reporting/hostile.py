"""Runs and comparisons whose files hold a text wherever they can."""

import json

from tpukit.runs.run import Run
from tpukit_tools.measure import FORMAT

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
    about = dict(kind="evaluation", step=step, epoch=epoch, kept=False, speed=dict(seconds=1.0))
    return about | dict(scores=scores) | more


def write_run(folder, records, **config):
    """A run of these records."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dict(id="1", task="mnist", settings={}) | config))
    lines = [json.dumps(dict(record, time=0.0)) + "\n" for record in records]
    (folder / "records.jsonl").write_text("".join(lines))
    return Run(folder)


def strange_run(folder, word):
    """A run whose files hold a word wherever they can."""
    speed = SPEED | dict(memory=[[2**30, 2**34]], counters=dict(compilations=1, fallbacks={word: 3}))
    compiled = dict(kind="compile", programs=1, seconds=9.0, why=[word], refused=False)
    scores = {word: 0.5, "iou": 0.25, "beside": {word: {word: 0.5, "iou": word}}}
    start = dict(kind="start", step=0, device=word, accelerator=word, compile=word)
    records = [
        dict(start, batch_size=4, max_graphs=1, steps_per_epoch=4),
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
    (folder / "checkpoints/checkpoints.json").write_text(json.dumps({"checkpoints/step-00000008.pt": [word]}))
    return run


def strange_measurement(path, word):
    """A file of `tpukit compare` that holds a word wherever it can."""
    words = dict.fromkeys(("task", "sample", "hardware", "host", "precision"), word)
    row = words | dict(
        parameters=1,
        samples=80,
        cores=1,
        steps=20,
        step_ms=9.0,
        first_step_s=1.0,
        versions={"torch": word, word: word},
    )
    path.write_text(json.dumps(dict(format=FORMAT, rows=[row | dict(batch_size=size) for size in (8, 16)])))
    return path
