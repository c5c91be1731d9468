"""Measurements, published figures and bounds side by side, in tables, series to draw, and words."""

import dataclasses
import math

from tpukit.host.errors import TpukitError
from tpukit.host.tables import GIB, Sentences, Table, format_duration
from tpukit.tools import prices as price_table
from tpukit.tools.compare.choosing import AT_BEST, BOUND, KINDS, MEASURED, PUBLISHED, Way, choose, cost_then_time
from tpukit.tools.compare.measurement import epoch_seconds, rate

# Seconds an epoch in published guides: hardware, chips, label, seconds. MSHNet on IRSTD-1k, 800 images at 256x256. Not measured
# by us.
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
                f"{way.label}, {way.place}" if way.place else way.label,
                way.kind,
                way.batch_size,
                f"{at_least(way)}{way.epoch_s:.4g}",
                f"{at_least(way)}{_hours(way.hours(self.epochs))}",
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
                choice.way.kind + (f" at {choice.elsewhere}" if choice.elsewhere else ""),
                choice.sessions,
                _hours(choice.machine_h),
                _hours(choice.calendar_h),
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
        calendar = f", {_hours(choice.calendar_h)} by the calendar" if choice.calendar_h > 1.01 * choice.machine_h else ""
        cost = {None: "at a cost that the price table does not know", 0: "free"}
        cost = cost.get(choice.usd, f"for {least}{_money(choice.usd)}")
        batch = f" at batch {choice.way.batch_size}" if choice.way.batch_size else ""
        takes = f"{self.epochs} epochs take {least}{_hours(choice.machine_h)} in {times}{calendar}, {cost}"
        return f"{choice.way.label}{batch}, {where}{_elsewhere(choice)}: {takes}."


def compare(measurements, *, epochs=400, images=None, batch_size=None, plans=(), prices=None, workload=None, **asked):
    """Merge measurements of one recipe, the published figures and plans into a `Comparison`.

    images: of an epoch; those of the largest real set that was measured unless given, or of the published figures.
    batch_size: count with this one alone; each hardware's fastest unless given. plans: of `tpukit.plan`. prices: of
    `prices.read`. asked: what `choose` takes.
    """
    _check(epochs, images, asked)
    measurements = list(measurements)
    _check_same_recipe(measurements)
    workload = measurements[0].workload if measurements else workload or PUBLISHED_WORKLOAD
    images = images or _images_of(measurements, workload)
    notes = []
    ways = [
        *_measured_ways(measurements, images, batch_size, notes),
        *_published_ways(workload, measurements, images, notes),
        *_bounded_ways(plans, images, batch_size),
    ]
    prices = price_table.read() if prices is None else prices
    choices = choose(ways, prices, epochs=epochs, **asked)
    if measurements and all(m.synthetic for m in measurements):
        notes.append(
            f"The images were made up; an epoch is counted as {images} of them. Real ones cost a step the same, and reading "
            "them first more."
        )
    if batch_size is None and len({way.batch_size for way in ways if way.batch_size}) > 1:
        notes.append(
            "Each hardware counts at its fastest batch size. Another batch size learns differently: --batch-size N holds it."
        )
    notes += _notes_on_hours_and_costs(choices, prices)
    if unsaid := [way.label for way in ways if way.kind == PUBLISHED and way not in [c.way for c in choices]]:
        notes.append(f"{', '.join(unsaid)} as published is left out of the choice: which one that was is not said.")
    limits = {name: asked.get(name) for name in ("deadline_h", "budget_usd")}
    return Comparison(workload, epochs, images, measurements, list(plans), ways, choices, notes, limits)


def _check(epochs, images, asked):
    if epochs < 1 or images is not None and images < 1:
        raise TpukitError(f"epochs={epochs}, images={images}: each is at least 1")
    for name in ("deadline_h", "budget_usd", "usd_per_kwh"):
        if asked.get(name) is not None and not 0 <= asked[name] < math.inf:
            raise TpukitError(f"{name}={asked[name]}: give a number of zero or more")


def _images_of(measurements, workload):
    """How many images an epoch has: as many as the largest real set, or as the published figures where all were made up."""
    real = [m.samples for m in measurements if not m.synthetic]
    if not real and workload == PUBLISHED_WORKLOAD:
        return PUBLISHED_IMAGES
    return max(real or [m.samples for m in measurements], default=PUBLISHED_IMAGES)


def _notes_on_hours_and_costs(choices, prices):
    yield (
        "Hours are of training steps and starts; evaluations and checkpoints come on top. A bound is at least so long, not a "
        "forecast."
    )
    offered = {(choice.way.hardware, choice.place) for choice in choices}
    if any(place == "Colab free" for _, place in offered):
        yield (
            "Free Colab publishes no hours a week, and often ends a session before its 12 hours: count on more sessions there."
        )
    cards = {(price.hardware, price.place) for price in prices if price_table.HOST_BESIDES in price.source}
    if alone := sorted(offered & cards):
        named = ", ".join(f"{hardware} at {place}" for hardware, place in alone)
        yield f"{named}: the cost is of the card alone, without its host machine, which is billed besides."


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
                f"  {n}: {first.recipe.get(n)!r} in {first.file or first.label}, "
                f"{other.recipe.get(n)!r} in {other.file or other.label}"
                for n in differing
            ]
            raise TpukitError("these files measured different recipes:\n" + "\n".join(lines) + "\nMeasure one of them again.")


def _measured_ways(measurements, images, batch_size, notes):
    for m in measurements:
        rows = [row for row in m.fitting if batch_size in (None, row["batch_size"]) and row["batch_size"] <= images]
        if not rows:
            notes.append(f"{m.label} is left out of the choice: it was not measured at batch {batch_size or f'<= {images}'}.")
            continue
        epoch_s, row = _fastest(rows, images, lambda row: row["step_ms"] / 1e3)
        more = (row["batch_size"], row["start_s"], row["memory_bytes"], m.place)
        yield Way(m.hardware, m.chips, m.label, MEASURED, epoch_s, *more)


def _published_ways(workload, measurements, images, notes):
    if workload != PUBLISHED_WORKLOAD:
        return []
    sizes = {(m.recipe.get("base_size"), m.recipe.get("crop_size")) for m in measurements}
    if sizes - {(PUBLISHED_SIZE, PUBLISHED_SIZE)}:
        notes.append(
            "The published figures are left out, because they are of images of 256x256 and other sizes were measured: an epoch "
            f"of 800 took {', '.join(f'{label} {seconds:g} s' for *_, label, seconds in PUBLISHED_EPOCHS)}. "
            "`tpukit compare` without files compares them alone."
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
            epoch_s, row = _fastest(rows, images, lambda row: row["bound_s"])
            generation, chips = plan.chip.split("-")[0], CHIPS[plan.chip].cores
            label = f"TPU {generation}{f' x {chips}' if chips > 1 else ''}"
            yield Way(f"TPU {generation}", chips, label, BOUND, epoch_s, row["batch_size"], 0.0, row["peak_bytes"])


def _fastest(rows, images, step_s):
    """(seconds of an epoch, row) of the batch size with the shortest epoch. step_s: row -> seconds of a step."""
    epochs = [(epoch_seconds(step_s(row), row["batch_size"], images), row) for row in rows]
    return min(epochs, key=lambda epoch: epoch[0])


def plan_recipe(measurements, chips, *, batch_size=None, say=print):
    """Ask `tpukit plan` about the recipe of some measurements (MSHNet's own where there are none) on TPUs that are not here.

    batch_size: ask about this one alone; those that were measured unless given. Takes minutes, and on first use downloads the
    compiler. Returns a list of plans.
    """
    if not chips:  # and torch is not needed
        return []
    from tpukit import workloads
    from tpukit.devices.runtime import check_batch
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
        if batch_size is not None:
            check_batch(batch_size, planner.CHIPS[chip].cores, f"cores of {chip}")  # before minutes of compilation
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


def _hours(hours):
    return format_duration(None if hours is None else 3600 * hours)


def _elsewhere(choice):
    return f" (measured at {choice.elsewhere})" if choice.elsewhere else ""


def _money(usd):
    if usd is None:
        return "not known"
    # No dollar sign: two of them are a formula in notebooks.
    return f"{usd:.2f} USD" if usd >= 0.01 or usd == 0 else f"{usd:.4f} USD"


def _within(asked):
    limits = []
    if asked.get("deadline_h") is not None:
        limits.append(_hours(asked["deadline_h"]))
    if asked.get("budget_usd") is not None:
        limits.append(_money(asked["budget_usd"]))
    return f" within {' and '.join(limits)}" if limits else ""
