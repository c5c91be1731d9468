"""Measurements, published figures and bounds side by side, in tables, series to draw, and words."""

import dataclasses
import math

from tpukit.errors import TpukitError
from tpukit.tables import Sentences, Table
from tpukit.tools import prices as price_table
from tpukit.tools.compare.choosing import AT_BEST, BOUND, KINDS, MEASURED, PUBLISHED, Way, choose, cost_then_time
from tpukit.tools.compare.measurement import GIB, epoch_seconds, rate

# Seconds an epoch in published guides: hardware, chips, label, seconds. MSHNet on IRSTD-1k, 800 images at 256x256. Not measured by us.
PUBLISHED_EPOCHS = (
    ("TPU v2", 4, "TPU v2-8", 30.0),
    ("A100", 1, "A100", 60.0),
    ("V100", 1, "V100", 120.0),
    ("T4", 1, "T4", 180.0),
    ("CPU", 1, "CPU", 600.0),
)
PUBLISHED_WORKLOAD, PUBLISHED_IMAGES, PUBLISHED_SIZE = "mshnet", 800, 256


@dataclasses.dataclass
class Comparison:
    """Measurements, published figures and bounds side by side, and the choice. `show_comparison` shows it."""

    workload: str
    epochs: int
    images: int
    measurements: list
    plans: list
    ways: list
    choices: list
    notes: list
    asked: dict
    """deadline_h and budget_usd"""

    def tables(self):
        """Every measurement, all hardware side by side, and the choice."""
        return [*(m.table() for m in self.measurements), self.ways_table(), self.choices_table()]

    def series(self):
        """[(hardware, "measured" or "bound", [(batch size, images a second, GiB)])] for drawing."""
        found = [
            (f"{m.label}, {m.place}", "measured", [(r["batch_size"], rate(r), r["memory_bytes"] / GIB) for r in m.fitting])
            for m in self.measurements
        ]
        for plan in self.plans:
            rows = [row for row in plan.rows if row["fits"]]
            points = [(row["batch_size"], row["batch_size"] / row["bound_s"], row["peak_bytes"] / GIB) for row in rows]
            found.append((f"TPU {plan.chip}", "bound", points))
        return [(name, kind, sorted(points)) for name, kind, points in found if points]

    def ways_table(self):
        rows = [
            (
                way.label,
                way.kind,
                way.batch_size,
                f"{at_least(way)}{way.epoch_s:.4g}",
                f"{at_least(way)}{_span(way.hours(self.epochs))}",
                f"{way.start_s:.0f}" if way.start_s else "not known",
                f"{way.memory_bytes / GIB:.2f}" if way.memory_bytes else "",
            )
            for way in sorted(self.ways, key=lambda way: (KINDS.index(way.kind), way.epoch_s))
        ]
        columns = ("hardware", "what", "batch", "s an epoch", f"{self.epochs} epochs", "start, s", "peak GiB")
        return Table(f"{self.workload}, epochs of {self.images} images", columns, rows)

    def choices_table(self):
        answer = {True: "yes", False: "no", None: "perhaps"}
        rows = [
            (
                f"{choice.way.label}, {choice.place}",
                choice.way.kind,
                choice.sessions,
                _span(choice.machine_h),
                _span(choice.calendar_h),
                _money(choice.usd),
                f"{answer[choice.finishes]}{f': {choice.why_not}' if choice.why_not else ''}",
            )
            for choice in self.choices
        ]
        columns = ("hardware and place", "what", "sessions", "machine", "calendar", "cost", "finishes")
        return Table(f"{self.epochs} epochs{_within(self.asked)}", columns, rows)

    def sentences(self):
        """The choice in words, the most trustworthy first."""
        said = []
        for kind in KINDS:
            own = [choice for choice in self.choices if choice.way.kind == kind]
            if not own:
                continue
            bound = kind == BOUND
            finishing = [c for c in own if c.finishes or bound and c.why_not == AT_BEST]
            ends = "could finish" if bound else "finishes"
            if not finishing:
                perhaps = [choice for choice in own if choice.finishes is None]
                ending = perhaps or [choice for choice in own if choice.calendar_h is not None]
                closest = (
                    f" {'It may be' if perhaps else 'The soonest is'} {self._spoken(min(ending, key=_soonest))}"
                    if ending
                    else ""
                )
                said.append(f"{_named(kind)}: nothing is known to finish{_within(self.asked)}.{closest}")
                continue
            cheapest, fastest = min(finishing, key=cost_then_time), min(finishing, key=_soonest)
            said.append(f"{_named(kind)}, the cheapest that {ends}{_within(self.asked)}: {self._spoken(cheapest)}")
            if fastest != cheapest:
                said.append(f"{_named(kind)}, the fastest: {self._spoken(fastest)}")
        return Sentences([*said, *self.notes])

    def _spoken(self, choice):
        least = "at least " if choice.way.kind == BOUND else ""
        times = f"{choice.sessions} session{'s' * (choice.sessions != 1)}"
        times = "an unknown number of sessions" if choice.sessions is None else times
        where = {"local": "here", "Colab free": "free Colab"}.get(choice.place, choice.place)
        calendar = f", {_span(choice.calendar_h)} by the calendar" if choice.calendar_h > 1.01 * choice.machine_h else ""
        cost = {None: "at a cost that the price table does not know", 0: "free"}.get(
            choice.usd, f"for {least}{_money(choice.usd)}"
        )
        batch = f" at batch {choice.way.batch_size}" if choice.way.batch_size else ""
        return f"{choice.way.label}{batch}, {where}: {self.epochs} epochs take {least}{_span(choice.machine_h)} in {times}{calendar}, {cost}."


def compare(measurements, *, epochs=400, images=None, batch_size=None, plans=(), prices=None, workload=None, **asked):
    """Merge measurements of one recipe, the published figures and plans into a `Comparison`.

    images: of an epoch; those of the largest real set that was measured unless given, or of the published figures. batch_size: count with
    this one alone; each hardware's fastest unless given. plans: of `tpukit.plan`. prices: of `prices.read`. asked: what `choose` takes.
    """
    if epochs < 1 or images is not None and images < 1:
        raise TpukitError(f"epochs={epochs}, images={images}: each is at least 1")
    for name in ("deadline_h", "budget_usd", "usd_per_kwh"):
        if asked.get(name) is not None and not 0 <= asked[name] < math.inf:
            raise TpukitError(f"{name}={asked[name]}: give a number of zero or more")
    measurements = list(measurements)
    _check_same_recipe(measurements)
    workload = measurements[0].workload if measurements else workload or PUBLISHED_WORKLOAD
    real = max((m.samples for m in measurements if not m.synthetic), default=None)
    if images is None:
        default = max((m.samples for m in measurements), default=PUBLISHED_IMAGES)
        images = real or (PUBLISHED_IMAGES if workload == PUBLISHED_WORKLOAD else default)
    ways, notes = [], []
    for m in measurements:
        rows = [row for row in m.fitting if batch_size in (None, row["batch_size"]) and row["batch_size"] <= images]
        if not rows:
            notes.append(f"{m.label} is left out of the choice: it was not measured at batch {batch_size or f'<= {images}'}.")
            continue
        row = min(rows, key=lambda row: epoch_seconds(row["step_ms"] / 1e3, row["batch_size"], images))
        ways.append(
            Way(
                m.hardware,
                m.chips,
                m.label,
                MEASURED,
                epoch_seconds(row["step_ms"] / 1e3, row["batch_size"], images),
                row["batch_size"],
                row["start_s"],
                row["memory_bytes"],
                m.place,
            )
        )
    ways += _published_ways(workload, measurements, images, notes)
    ways += _bounded_ways(plans, images, batch_size)
    if real is None and measurements:
        notes.append(
            f"The images were made up; an epoch is counted as {images} of them. Real ones cost a step the same, and reading them first more."
        )
    if batch_size is None and len({way.batch_size for way in ways if way.batch_size}) > 1:
        notes.append(
            "Each hardware counts at its fastest batch size. Another batch size learns differently: --batch-size N holds it."
        )
    notes.append(
        "Hours are of training steps and starts; evaluations and checkpoints come on top. A bound is at least so long, not a forecast."
    )
    prices = price_table.read() if prices is None else prices
    if any(price.place == "Colab free" and price.hardware in {way.hardware for way in ways} for price in prices):
        notes.append(
            "Free Colab publishes no hours a week, and often ends a session before its 12 hours: count on more sessions there."
        )
    choices = choose(ways, prices, epochs=epochs, **asked)
    cards = {(price.hardware, price.place) for price in prices if price_table.HOST_BESIDES in price.source}
    if alone := sorted({(choice.way.hardware, choice.place) for choice in choices} & cards):
        named = ", ".join(f"{hardware} at {place}" for hardware, place in alone)
        notes.append(f"{named}: the cost is of the card alone, without its host machine, which is billed besides.")
    limits = {name: asked.get(name) for name in ("deadline_h", "budget_usd")}
    return Comparison(workload, epochs, images, measurements, list(plans), ways, choices, notes, limits)


def _check_same_recipe(measurements):
    for other in measurements[1:]:
        first = measurements[0]
        if other.workload != first.workload:
            raise TpukitError(
                f"{first.label} measured {first.workload}, {other.label} {other.workload}: compare one workload at a time"
            )
        names = sorted(first.recipe.keys() | other.recipe.keys())
        differing = [n for n in names if first.recipe.get(n) != other.recipe.get(n)]
        if differing:
            lines = [
                f"  {n}: {first.recipe.get(n)!r} on {first.label}, {other.recipe.get(n)!r} on {other.label}" for n in differing
            ]
            raise TpukitError("these files measured different recipes:\n" + "\n".join(lines) + "\nMeasure one of them again.")


def _published_ways(workload, measurements, images, notes):
    if workload != PUBLISHED_WORKLOAD:
        return []
    sizes = {(m.recipe.get("base_size"), m.recipe.get("crop_size")) for m in measurements}
    if sizes - {(PUBLISHED_SIZE, PUBLISHED_SIZE)}:
        notes.append(
            "The published figures are left out, because they are of images of 256x256 and other sizes were measured: an epoch of 800 took "
            + ", ".join(f"{label} {seconds:g} s" for *_, label, seconds in PUBLISHED_EPOCHS)
            + ". `tpukit compare` without files compares them alone."
        )
        return []
    return [
        Way(hardware, chips, label, PUBLISHED, seconds * images / PUBLISHED_IMAGES)
        for hardware, chips, label, seconds in PUBLISHED_EPOCHS
    ]


def _bounded_ways(plans, images, batch_size):
    from tpukit.tools.plan import CHIPS

    for plan in plans:
        rows = [
            row for row in plan.rows if row["fits"] and batch_size in (None, row["batch_size"]) and row["batch_size"] <= images
        ]
        if rows:
            row = min(rows, key=lambda row: epoch_seconds(row["bound_s"], row["batch_size"], images))
            generation, chips = plan.chip.split("-")[0], CHIPS[plan.chip].cores
            label = f"TPU {generation}{f' x {chips}' if chips > 1 else ''}"
            epoch_s = epoch_seconds(row["bound_s"], row["batch_size"], images)
            yield Way(f"TPU {generation}", chips, label, BOUND, epoch_s, row["batch_size"], 0.0, row["peak_bytes"])


def plan_recipe(measurements, chips, *, batch_size=None, say=print):
    """Ask `tpukit plan` about the recipe of some measurements (MSHNet's own where there are none) on TPUs that are not here.

    batch_size: ask about this one alone; those that were measured unless given. Takes minutes, and on first use downloads the compiler. Returns a list of plans.
    """
    from tpukit import workloads
    from tpukit.tools import plan as planner

    first = measurements[0] if measurements else None
    kind = workloads.find(first.workload if first else PUBLISHED_WORKLOAD)
    try:
        task = kind(**(first.recipe if first else {}))
    except TypeError as error:
        raise TpukitError(f"the recipe of {first.label} is of another version of tpukit ({error}): measure it again") from error
    sizes = {row["batch_size"] for m in measurements for row in m.fitting} or {task.batch_size, 32}
    sizes = {batch_size} if batch_size else sizes
    plans = []
    for chip in chips:
        if chip not in planner.CHIPS:
            raise TpukitError(f"no chip {chip!r}; there are: {', '.join(planner.CHIPS)}")
        cores = planner.CHIPS[chip].cores
        if batch_size and batch_size % cores:  # before minutes of compilation
            below = batch_size // cores * cores
            raise TpukitError(
                f"batch_size={batch_size} is the global batch, and the {cores} chips of {chip} cannot share it evenly: "
                f"use {f'{below} or ' if below else ''}{below + cores}"
            )
    for chip in chips:
        cores = planner.CHIPS[chip].cores
        asked = sorted({math.ceil(size / cores) * cores for size in sizes})
        plans.append(planner.plan(task, chip=chip, batch_sizes=asked, say=lambda text, chip=chip: say(f"{chip}: {text}")))
    return plans


# Words


def _soonest(choice):
    return (choice.calendar_h, *cost_then_time(choice))


def at_least(way):
    return ">= " if way.kind == BOUND else ""


def _named(kind):
    return kind[0].upper() + kind[1:]


def _span(hours):
    if hours is None:
        return ""
    for size, name in ((24.0, "days"), (1.0, "h"), (1 / 60, "min")):
        if hours >= 2 * size:
            return f"{hours / size:.1f} {name}"
    return f"{hours * 3600:.0f} s"


def _money(usd):
    if usd is None:
        return ""
    return (
        f"{usd:.2f} USD" if usd >= 0.01 or usd == 0 else f"{usd:.4f} USD"
    )  # no dollar sign: two of them are a formula in notebooks


def _within(asked):
    limits = []
    if asked.get("deadline_h") is not None:
        limits.append(_span(asked["deadline_h"]))
    if asked.get("budget_usd") is not None:
        limits.append(_money(asked["budget_usd"]))
    return f" within {' and '.join(limits)}" if limits else ""
