"""The drawings of the pages: `release.gallery` trains what they show and writes them.

A card is a picture of the gallery: one size for all, to be shown at half of it, on an opaque light ground, so
that it looks the same on a light and on a dark page."""

import io
import itertools

import numpy as np
from matplotlib.figure import Figure
from scipy import special

from tpukit.reporting import findings
from tpukit.runs.run import Run
from tpukit.tasks.mshnet import scores

CARD = (8.0, 5.0)  # inches
DPI = 100
GROUND, INK, QUIET = "#f6f8fa", "#1f2328", "#6e7781"
# Of Okabe and Ito: told apart with every common colour blindness.
BLUE, ORANGE, PINK, YELLOW = "#56B4E9", "#D55E00", "#CC79A7", "#F0E442"
TITLE, TEXT = 17, 14  # points: at half width 8 and 7
COLOURS = 128  # of a card's palette, and as many greys
MARKED = 40  # evaluations of a curve, at most, that are points on it
ZOOM, RING = 24, 8  # pixels: side of the window that is enlarged, and around a region
# What a dark page needs in an SVG of matplotlib, which writes its colours as styles.
DARK = """@media (prefers-color-scheme: dark) {
  [style*="stroke: #1f2328"] { stroke: #c9d1d9 !important; }
  [style*="stroke: #0072b2"] { stroke: #58a6d6 !important; }
  [style*="fill: #0072b2"] { fill: #58a6d6 !important; }
  g[id^="text_"] * { fill: #c9d1d9 !important; }
}
"""


# Small targets in infrared images


def examine(image: np.ndarray, label: np.ndarray, logits: np.ndarray) -> dict:
    """What a picture shows of a test image. image: (1 or 3, H, W) uint8. label: (H, W) bool. logits: (H, W).

    Returns image (H, W), label and predicted (H, W) bool, iou, and the regions that are found, missed and
    false, by the rule of Pd."""
    predicted = logits > special.logit(0.5)
    false = scores.regions(predicted)
    regions = dict(found=[], missed=[])
    for target in scores.regions(label):
        matched, false = scores.match([target], false)
        regions["found" if matched else "missed"].append(target)
    union = np.count_nonzero(label | predicted)
    iou = np.count_nonzero(label & predicted) / union if union else 1.0
    return dict(regions, false=false, image=image[0], label=label, predicted=predicted, iou=iou)


def choose(samples: list[dict]) -> list[int]:
    """Numbers of five test images: three whose targets are all found, one with a missed target, one with a
    false alarm. Fewer where a kind is missing.

    Of each kind those with two targets found or more, and of these the scenes with the most contrast: their
    IoU is not looked at. Regions are far enough apart to be marked."""

    def is_clear(sample):
        centres = [centre for kind in ("found", "missed", "false") for _, centre in sample[kind]]
        height, width = sample["label"].shape
        edges = [min(row, column, height - row, width - column) for row, column in centres]
        apart = [np.hypot(*np.subtract(*pair)) for pair in itertools.combinations(centres, 2)]
        return min(edges, default=0) > RING and min(apart, default=99) > 3 * RING

    def rank(number):
        sample = samples[number]
        return -min(len(sample["found"]), 2), -sample["image"].std(), number

    def of_kind(missed, false):
        return sorted(
            (
                number
                for number, sample in enumerate(samples)
                if sample["found"]
                and (len(sample["missed"]), len(sample["false"])) == (missed, false)
                and is_clear(sample)
            ),
            key=rank,
        )

    return [*of_kind(0, 0)[:3], *of_kind(1, 0)[:1], *of_kind(0, 1)[:1]]


def detections(samples: list[dict], size: tuple[float, float], text: float) -> Figure:
    """Test images with their targets marked, and below each a window of it enlarged. samples: of `examine`.
    size: in inches. text: size of the letters in points."""
    figure = blank(size)
    axes = figure.subplots(2, len(samples), squeeze=False)
    for (above, below), sample in zip(axes.T, samples):
        for kind, marker, colour in MARKS:
            for _, (row, column) in sample[kind]:
                above.plot(column, row, marker, ms=text * 1.1, mec=colour, mfc="none", mew=2.2)
        shown = sample["missed"] or sample["false"] or [max(sample["found"])]
        top, left = _corner(shown[0][1], sample["label"].shape)
        window = sample["image"][top : top + ZOOM, left : left + ZOOM]
        for axis, part in ((above, sample["image"]), (below, window)):  # each has the greys of its own part
            bare(axis)
            axis.imshow(sample["image"], cmap="gray", vmin=int(part.min()), vmax=int(part.max()) + 1)
        corners = [left, left + ZOOM, left + ZOOM, left, left], [top, top, top + ZOOM, top + ZOOM, top]
        above.plot(*(np.array(corners) - 0.5), color="white", ls=":", lw=1)
        for mask, colour, dashes in (("label", YELLOW, "-"), ("predicted", BLUE, "--")):
            if sample[mask].any():
                below.contour(sample[mask], [0.5], colors=colour, linewidths=2.2, linestyles=dashes)
        below.set(xlim=(left - 0.5, left + ZOOM - 0.5), ylim=(top + ZOOM - 0.5, top - 0.5))
        words = [f"{len(sample[kind])} {name}" for kind, name in NAMES.items() if sample[kind]]
        above.set_title(", ".join(words), fontsize=text, color=INK)
        below.set_xlabel(f"image IoU {sample['iou']:.2f}", fontsize=text, color=INK)
    looks = [dict(marker=m, mec=c, label=NAMES[k], ms=text * 0.9, ls="", mew=2.2) for k, m, c in MARKS]
    looks += [dict(color="#b8a800", label="labelled", lw=2.2)]
    looks += [dict(color=BLUE, ls="--", label="predicted", lw=2.2)]
    lines = [axes[0, 0].plot([], [], mfc="none", **look)[0] for look in looks]
    figure.legend(
        handles=lines, loc="outside lower center", ncols=5, fontsize=text, frameon=False, columnspacing=1.2
    )
    return figure


MARKS = (("found", "o", BLUE), ("missed", "s", ORANGE), ("false", "^", PINK))
NAMES = dict(found="found", missed="missed", false="false alarm")


def _corner(centre, shape):
    """Top and left of a window of `ZOOM` pixels around a centre, within an image of a shape (H, W)."""
    return np.clip(np.round(centre).astype(int) - ZOOM // 2, 0, np.subtract(shape, ZOOM))


# The curves of a long run


def story(run: Run) -> dict:
    """How a run has gone, from its records alone: steps, epochs (finished ones), of (epochs asked for),
    interruptions, hours (of training steps and evaluations, without the time between the sessions), best (the
    evaluation whose weights are kept: its epoch, counted from 1, and scores) and versions."""
    records = findings.valid_records(run.records())
    evaluations = [record for record in records if record["kind"] == "evaluation"]
    starts = [record for record in records if record["kind"] == "start"]
    timed = [record for record in records if record["kind"] in ("train", "evaluation")]
    kept = [record for record in evaluations if record.get("kept")]
    return dict(
        steps=max(record["step"] for record in records),
        epochs=len(evaluations),
        of=run.config["settings"]["epochs"],
        interruptions=len(starts) - 1,
        interrupted_at=[record["step"] for record in starts[1:]],
        hours=sum(record["speed"]["seconds"] for record in timed) / 3600,
        best=dict(kept[-1]["scores"], epoch=kept[-1]["epoch"] + 1) if kept else None,
        versions=starts[-1]["versions"],
    )


def in_words(values: dict) -> str:
    """Figures for the pages, in one line: numbers with four digits, dicts in brackets, no curves."""

    def one(value):
        if isinstance(value, dict):
            return f"({in_words(value)})"
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    return ", ".join(f"{name} {one(value)}" for name, value in values.items() if name not in ("roc",))


def curves(run: Run) -> str:
    """Loss, IoU and Pd of a run over its epochs as SVG, with the paper's scores and the interruptions."""
    records = run.records()
    series, labels = findings.curves(records), findings.labels_of(run.config)
    per_epoch = findings.steps_per_epoch(records)
    warm_up = run.config["settings"]["warm_epoch"] + 1
    figure = Figure(figsize=(12.6, 2.9), layout="constrained")
    figure.patch.set_alpha(0)
    for axis, (name, title) in zip(figure.subplots(1, 3), dict(loss="loss", iou="IoU", pd="Pd").items()):
        epochs, values = series[name]
        axis.patch.set_alpha(0)
        size = 3.5 if name != "loss" and len(values) <= MARKED else 0
        axis.plot(epochs, values, color="#0072b2", lw=1.6 if size else 1.2, marker="o", ms=size)
        if name == "loss":
            axis.set_ylim(0, None)
            if warm_up < max(epochs):
                axis.axvline(warm_up, color=QUIET, ls=":", lw=1.2)
                beside, side = (4, "left") if warm_up < max(epochs) / 2 else (-4, "right")
                axis.annotate("warm-up ends", (warm_up, 0), (beside, 4), textcoords="offset points", ha=side)
            interrupted_at = story(run)["interrupted_at"]
            for step in interrupted_at:
                axis.plot(step / per_epoch, 0.02, "|", color=ORANGE, ms=14, mew=2, transform=bottom(axis))
            if interrupted_at:
                axis.plot([], [], "|", color=ORANGE, ms=9, mew=2, ls="", label="interrupted, resumed")
                axis.legend(fontsize=9, frameon=False, loc="upper left")
        else:
            axis.set_ylim(0, 1)
            if published := labels.published.get(name):  # of the paper's data alone
                axis.axhline(published, color=QUIET, ls="--", lw=1.2)
                axis.annotate(
                    f"the paper, after 400 epochs: {published:.3f}", (0.02, published), (0, 3),
                    axis.get_yaxis_transform(), textcoords="offset points", fontsize=9,
                )  # fmt: skip
        if name == labels.score:
            best, epoch = max(zip(values, epochs))
            axis.plot(epoch, best, marker="*", ms=13, color=ORANGE)
            axis.annotate(f"best {best:.3f}", (epoch, best), (0, -28), textcoords="offset points", ha="right")
        axis.set_title(title, loc="left", fontsize=11)
        axis.set_xlabel("epoch", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
        axis.spines[["left", "bottom"]].set_color(INK)
        axis.tick_params(labelsize=9, color=INK)
    svg = io.StringIO()
    figure.savefig(svg, format="svg", metadata=dict(Date=None))
    return svg.getvalue().replace("</style>", f"\n{DARK}</style>", 1)


def bottom(axis):
    """x in data, y as a share of the height."""
    return axis.get_xaxis_transform()


# Cards


def blank(size=CARD) -> Figure:
    return Figure(figsize=size, facecolor=GROUND, layout="constrained", dpi=DPI)


def bare(axis) -> None:
    axis.set(xticks=(), yticks=())
    axis.spines[:].set_color(QUIET)


def panels(rows: list[list[tuple[str, np.ndarray]]], title: str) -> Figure:
    """A card of rows of (words, picture). Pictures: (H, W) or (H, W, 3)."""
    figure = blank()
    axes = figure.subplots(len(rows), len(rows[0]), squeeze=False)
    for axis, (words, picture) in zip(axes.flat, itertools.chain(*rows)):
        bare(axis)
        axis.imshow(picture, cmap="gray", interpolation="nearest")
        axis.set_title(words, fontsize=TEXT, color=INK)
    figure.suptitle(title, fontsize=TITLE, color=INK)
    return figure


def confusion(counts: np.ndarray, classes: list[str], mistakes: list, title: str) -> Figure:
    """A card: test images by class and prediction, beside mistakes. counts: (K, K). mistakes: (words,
    picture)."""
    figure = blank()
    left, right = figure.subfigures(1, 2, width_ratios=(1.25, 1))
    for part in (left, right):
        part.set_facecolor(GROUND)
    axis = left.subplots()
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    axis.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    for row, column in itertools.product(range(len(classes)), repeat=2):
        if count := counts[row, column]:
            colour = "white" if shares[row, column] > 0.5 else INK
            axis.text(column, row, f"{count:g}", ha="center", va="center", fontsize=9, color=colour)
    axis.set_xticks(range(len(classes)), classes, fontsize=TEXT)
    axis.set_yticks(range(len(classes)), classes, fontsize=TEXT)
    axis.set_xlabel("predicted", fontsize=TEXT)
    axis.set_ylabel("class", fontsize=TEXT)
    for axis, (words, picture) in zip(right.subplots(2, 2).flat, mistakes):
        bare(axis)
        axis.imshow(picture, cmap="gray", interpolation="nearest")
        axis.set_title(words, fontsize=TEXT - 1, color=ORANGE)
    figure.suptitle(title, fontsize=TITLE, color=INK)
    return figure


def bars(names: list[str], series: dict[str, list[float]], texts: list[str], title: str, unit: str) -> Figure:
    """A card of horizontal bars. series: name -> a value for each of `names`, drawn side by side. texts:
    beside the longest bar of each name."""
    figure = blank()
    axis = figure.subplots()
    axis.set_facecolor(GROUND)
    height = 0.8 / len(series)
    places = np.arange(len(names))[::-1]
    for number, ((name, values), colour) in enumerate(zip(series.items(), ("#0072B2", "#E69F00"))):
        axis.barh(places - number * height, values, height, color=colour, label=name)
    for place, *values, text in zip(places, *series.values(), texts):
        axis.annotate(
            text, (max(values), place - 0.4 + 0.4 / len(series)), (5, 0), textcoords="offset points",
            va="center", fontsize=TEXT, color=INK,
        )  # fmt: skip
    axis.set_yticks(places - 0.4 + 0.4 / len(series), names, fontsize=TEXT)
    axis.tick_params(axis="x", labelsize=TEXT - 2)
    axis.set_xlabel(unit, fontsize=TEXT)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_xlim(0, 1.6 * max(max(values) for values in series.values()))
    if len(series) > 1:
        axis.legend(fontsize=TEXT, frameon=False, loc="upper right")
    figure.suptitle(title, fontsize=TITLE, color=INK)
    return figure


def words(lines: list[tuple[str, str]], title: str) -> Figure:
    """A card of up to six pairs of code and what is said of it; long ones are cut."""
    figure = blank()
    axis = figure.subplots()
    axis.set_axis_off()
    for number, (code, advice) in enumerate(lines[:6]):
        top = 1 - number / 6
        mono = dict(family="monospace", weight="bold", color=ORANGE)
        axis.text(0, top, _cut(code, 58), va="top", fontsize=TEXT, parse_math=False, **mono)
        axis.text(0.02, top - 0.07, _cut(advice, 74), va="top", fontsize=TEXT, parse_math=False, color=INK)
    figure.suptitle(title, fontsize=TITLE, color=INK)
    return figure


def _cut(text, limit):
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def png(figure: Figure) -> bytes:
    """A figure as a PNG of few colours: some tens of kilobytes."""
    from PIL import Image

    written = io.BytesIO()
    figure.savefig(written, format="png", dpi=DPI)
    return shrink(Image.open(written))


def shrink(picture, ground: str = GROUND, colours: int = COLOURS) -> bytes:
    """A PIL image as a PNG of so many colours and as many greys, over a ground where it is transparent."""
    from PIL import Image

    rgba = picture.convert("RGBA")
    picture = Image.alpha_composite(Image.new("RGBA", rgba.size, ground), rgba).convert("RGB")
    # Greys and colours apart: else the few coloured pixels of a picture that is mostly grey lose their
    # colour.
    pixels = np.asarray(picture).reshape(-1, 3)
    coloured = pixels[np.ptp(pixels, axis=1) > 12]
    entries = np.repeat(np.linspace(0, 255, colours).astype(np.uint8), 3).tolist()
    if len(coloured):
        entries += Image.fromarray(coloured[None]).quantize(colours).getpalette()[: 3 * colours]
    palette = Image.new("P", (1, 1))
    palette.putpalette(entries)
    out = io.BytesIO()
    picture.quantize(palette=palette, dither=Image.Dither.NONE).save(out, "PNG", optimize=True)
    return out.getvalue()
