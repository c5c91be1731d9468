"""Measurements, published figures and full-rate times side by side: tables, series to draw, and sentences."""

import dataclasses
import math

from tpukit import tasks
from tpukit.devices.chips import MACHINES
from tpukit.host.errors import TpukitError
from tpukit.host.tables import GIB, Sentences, Table, format_duration
from tpukit.runs.run import settings_dict
from tpukit.tools import prices as price_table
from tpukit.tools.compare.choosing import BASES, FULL_RATE, MEASURED, PUBLISHED, Estimate, choose
from tpukit.tools.compare.measurement import epoch_seconds, rate

# MSHNet on IRSTD-1k, 800 images of 256x256: hardware, chips, label, seconds per epoch in published guides.
# Not measured by us.
PUBLISHED_EPOCHS = (
    ("TPU v2", 4, "TPU v2-8", 30.0),
    ("A100", 1, "A100", 60.0),
    ("V100", 1, "V100", 120.0),
    ("T4", 1, "T4", 180.0),
    ("CPU", 1, "CPU", 600.0),
)
PUBLISHED_TASK, PUBLISHED_IMAGES, PUBLISHED_SIZE = "mshnet", 800, 256


@dataclasses.dataclass
class Comparison:
    """Estimates of every hardware, and the candidates for the whole training. `tpukit.show_comparison` shows
    it."""

    task: str
    epochs: int
    images: int
    deadline_h: float | None
    budget_usd: float | None
    measurements: list
    plans: list
    estimates: list
    candidates: list
    notes: list

    def tables(self):
        return [*(m.table() for m in self.measurements), self.estimates_table(), self.candidates_table()]

    def series(self):
        """[(hardware, "measured" or "full rate", [(batch size, images per second, GiB)])] for drawing."""
        found = []
        for m in self.measurements:
            points = [(row["batch_size"], rate(row), row["memory_bytes"] / GIB) for row in m.fitting]
            found.append((f"{m.label}, {m.place}", "measured", sorted(points)))
        for plan in self.plans:
            rows = [row for row in plan.rows if row["fits"]]
            points = [
                (row["batch_size"], row["batch_size"] / full_rate_s(row), row["peak_bytes"] / GIB)
                for row in rows
            ]
            found.append((f"TPU {plan.chip}", "full rate", sorted(points)))
        return [line for line in found if line[2]]

    def estimates_table(self):
        rows = []
        for one in sorted(self.estimates, key=lambda one: (BASES.index(one.basis), one.epoch_s)):
            rows.append(
                (
                    f"{one.label}, {one.place}" if one.place else one.label,
                    one.basis,
                    one.batch_size,
                    f"{one.epoch_s:.4g}",
                    _format_hours(one.hours(self.epochs)),
                    f"{one.start_s:.0f}" if one.start_s else "not known",
                    f"{one.memory_bytes / GIB:.2f}" if one.memory_bytes else "",
                )
            )
        columns = (
            "hardware",
            "basis",
            "batch",
            "s per epoch",
            f"{self.epochs} epochs",
            "start, s",
            "peak GiB",
        )
        return Table(f"{self.task}, epochs of {self.images} images", columns, rows)

    def candidates_table(self):
        rows = []
        for c in self.candidates:
            answer = {True: "yes", False: "no", None: "perhaps"}[c.finishes]
            rows.append(
                (
                    f"{c.estimate.label}, {c.place}",
                    c.estimate.basis + (f" at {c.measured_elsewhere}" if c.measured_elsewhere else ""),
                    c.sessions,
                    _format_hours(c.machine_h),
                    _format_hours(c.calendar_h),
                    _format_usd(c.usd),
                    f"{answer}: {c.why}" if c.why else answer,
                )
            )
        columns = ("hardware and place", "basis", "sessions", "machine", "calendar", "cost", "finishes")
        return Table(f"{self.epochs} epochs{self._limits()}", columns, rows)

    def sentences(self):
        """The choice in words, the most trustworthy basis first."""
        found = []
        for basis in BASES:
            own = [c for c in self.candidates if c.estimate.basis == basis]
            # At full rate nothing is known to finish; what counts is that nothing speaks against it.
            possible = [c for c in own if c.finishes or basis == FULL_RATE and not c.why]
            name, limits = basis.capitalize(), self._limits()
            if possible:
                cheapest = min(possible, key=lambda c: c.cost_then_time)
                fastest = min(possible, key=lambda c: c.time_then_cost)
                ends = "could finish" if basis == FULL_RATE else "finishes"
                found.append(f"{name}, the cheapest that {ends}{limits}: {self._describe(cheapest)}")
                if fastest != cheapest:
                    found.append(f"{name}, the fastest that {ends}{limits}: {self._describe(fastest)}")
            elif own:
                ending = [c for c in own if c.calendar_h is not None]
                closest = min(ending, key=lambda c: [c.finishes is False, *c.time_then_cost], default=None)
                closest = f" The closest is {self._describe(closest)}" if closest else ""
                found.append(f"{name}: nothing is known to finish{limits}.{closest}")
        return Sentences([*found, *self.notes])

    def _limits(self):
        limits = [] if self.deadline_h is None else [_format_hours(self.deadline_h)]
        limits += [] if self.budget_usd is None else [_format_usd(self.budget_usd)]
        return f" within {' and '.join(limits)}" if limits else ""

    def _describe(self, candidate):
        estimate, usd = candidate.estimate, candidate.usd
        take = "would take" if estimate.basis == FULL_RATE else "take"
        epochs = f"{self.epochs} epochs" if self.epochs > 1 else "1 epoch"
        batch = f" at batch {estimate.batch_size}" if estimate.batch_size else ""
        elsewhere = f" (measured at {candidate.measured_elsewhere})" if candidate.measured_elsewhere else ""
        sessions = (
            f"{candidate.sessions or 'an unknown number of'} session{'' if candidate.sessions == 1 else 's'}"
        )
        calendar = ""
        if candidate.calendar_h > 1.01 * candidate.machine_h:
            calendar = f", {_format_hours(candidate.calendar_h)} of calendar time"
        if usd is None:
            cost = "at an unknown cost, which is not in the price table"
        else:
            cost = f"for {_format_usd(usd)}" if usd else "free"
        takes = f"{epochs} {take} {_format_hours(candidate.machine_h)} in {sessions}{calendar}, {cost}."
        return f"{estimate.label}{batch}, {candidate.place}{elsewhere}: {takes}"


def compare(
    measurements,
    *,
    epochs=400,
    images=None,
    batch_size=None,
    plans=(),
    prices=None,
    deadline_h=None,
    budget_usd=None,
    spot=False,
):
    """Merge measurements of one recipe, the published figures and plans into a `Comparison`.

    images: per epoch; by default those of the largest real set that was measured, or of the published
    figures. batch_size: count with this one alone; by default with each hardware's fastest. plans: of
    `tpukit.plan`. prices: of `prices.read`. Raises TpukitError for measurements of different recipes."""
    counts = dict(epochs=epochs, images=images, batch_size=batch_size)
    if wrong := {name: count for name, count in counts.items() if count is not None and count < 1}:
        raise TpukitError(
            f"{', '.join(f'{name}={count}' for name, count in wrong.items())}: it must be 1 or more"
        )
    limits = dict(deadline_h=deadline_h, budget_usd=budget_usd)
    for name, limit in limits.items():
        if limit is not None and not 0 <= limit < math.inf:
            raise TpukitError(f"{name}={limit}: it must be zero or more")
    measurements = list(measurements)
    _check_same_recipe(measurements)
    task = measurements[0].task if measurements else PUBLISHED_TASK
    published = task == PUBLISHED_TASK
    real = [m.samples for m in measurements if not m.synthetic]
    synthetic = [m.samples for m in measurements if not published]
    images = images or max(real or synthetic, default=PUBLISHED_IMAGES)
    estimates, notes = [], []
    for m in measurements:
        if fastest := _fastest(_measured(m, images), images, batch_size):
            estimates.append(fastest)
        else:
            notes.append(
                f"{m.label} is left out: it was not measured at batch {batch_size or f'<= {images}'}."
            )
    planned = [_fastest(_at_full_rate(plan, images), images, batch_size) for plan in plans]
    estimates += [one for one in planned if one]
    sizes = {m.recipe.get(name) for m in measurements for name in ("base_size", "crop_size")}
    if published and sizes <= {PUBLISHED_SIZE}:
        for hardware, chips, label, epoch_s in PUBLISHED_EPOCHS:
            epoch_s *= images / PUBLISHED_IMAGES
            estimates.append(
                Estimate(hardware=hardware, chips=chips, label=label, basis=PUBLISHED, epoch_s=epoch_s)
            )
    elif published:
        notes.append(
            "The published figures are left out, because they are of images of 256x256 and other sizes were"
            " measured: `tpukit compare` without files shows them."
        )
    prices = price_table.read() if prices is None else prices
    candidates = choose(estimates, prices, epochs=epochs, spot=spot, **limits)
    notes += _notes(measurements, images, estimates, candidates, prices)
    return Comparison(
        task, epochs, images, deadline_h, budget_usd, measurements, list(plans), estimates, candidates, notes
    )


def _notes(measurements, images, estimates, candidates, prices):
    """What a reader of the figures has to know."""
    if measurements and all(m.synthetic for m in measurements):
        yield (
            f"The images are synthetic; an epoch is counted as {images} of them. A step costs the same with"
            " real ones."
        )
    if len({one.batch_size for one in estimates if one.batch_size}) > 1:
        yield (
            "Each hardware counts at its fastest batch size. Results depend on that: --batch-size N sets one"
            " for all."
        )
    yield "Hours count training steps and start-up; evaluations and checkpoints come on top."
    if any(c.place == "Colab free" for c in candidates):
        yield (
            "Free Colab publishes no weekly hours and often ends a session early: expect more sessions there."
        )
    cards = {(price.hardware, price.place) for price in prices if price.excludes_host}
    if cards := sorted(cards & {(c.estimate.hardware, c.place) for c in candidates}):
        names = ", ".join(f"{hardware} at {place}" for hardware, place in cards)
        yield f"{names}: the cost is of the card alone; its host machine is billed separately."


def _check_same_recipe(measurements):
    for other in measurements[1:]:
        first = measurements[0]
        one, two = first.file or first.label, other.file or other.label
        if other.task != first.task:
            raise TpukitError(f"{one} measured {first.task}, {two} {other.task}: compare one task at a time")
        names = sorted(first.recipe.keys() | other.recipe.keys())
        # A file of an earlier version, which did not have a setting yet, was measured as by its default.
        known = first.task in tasks.TASKS
        defaults = settings_dict(tasks.find(first.task)()) if known else {}
        one_recipe, other_recipe = defaults | first.recipe, defaults | other.recipe
        settings = [(name, one_recipe.get(name), other_recipe.get(name)) for name in names]
        if lines := [f"  {name}: {a!r} in {one}, {b!r} in {two}" for name, a, b in settings if a != b]:
            raise TpukitError(
                "these files measured different recipes:\n"
                + "\n".join(lines)
                + "\nMeasure one of them again."
            )


def _measured(m, images):
    """An Estimate for each batch size of a measurement."""
    about = dict(hardware=m.hardware, chips=m.chips, label=m.label, basis=MEASURED, place=m.place)
    for row in m.fitting:
        figures = {name: row[name] for name in ("batch_size", "start_s", "memory_bytes")}
        yield Estimate(
            epoch_s=epoch_seconds(row["step_ms"] / 1e3, row["batch_size"], images), **figures, **about
        )


def full_rate_s(row):
    """Seconds of a plan's row with nothing else in the way: the longer of its FLOP time and its HBM time."""
    return max(row["flop_s"], row["hbm_s"])


def _at_full_rate(plan, images):
    """An Estimate for each batch size of a plan."""
    machine = MACHINES[plan.chip]
    label = machine.chip.name + (f" x {machine.chips}" if machine.chips > 1 else "")
    about = dict(hardware=machine.chip.name, chips=machine.chips, label=label, basis=FULL_RATE)
    for row in plan.rows:
        if row["fits"]:
            epoch_s = epoch_seconds(full_rate_s(row), row["batch_size"], images)
            yield Estimate(
                epoch_s=epoch_s, batch_size=row["batch_size"], memory_bytes=row["peak_bytes"], **about
            )


def _fastest(estimates, images, batch_size):
    """The one with the shortest epoch, or of the given batch size; None where no batch is usable."""
    usable = [one for one in estimates if one.batch_size <= images and batch_size in (None, one.batch_size)]
    return min(usable, key=lambda one: one.epoch_s, default=None)


def plan_recipe(measurements, chips, *, batch_size=None, log=print):
    """Plans (see `tpukit.plan`) of the measured recipe, or MSHNet's own, on TPUs that are not here.

    batch_size: plan this one alone; by default those that were measured. Takes minutes, and on first use
    downloads the compiler."""
    if not chips:  # and torch is not needed
        return []
    from tpukit import tasks
    from tpukit.tools import plan as planner

    recipe = measurements[0].recipe if measurements else {}
    task = tasks.find(measurements[0].task if measurements else PUBLISHED_TASK)
    try:
        task = task(**recipe)
    except TypeError as error:
        raise TpukitError(
            f"the measured recipe is of another version of tpukit ({error}): measure it again"
        ) from error
    sizes = {row["batch_size"] for m in measurements for row in m.fitting} or {task.batch_size, 32}
    asked = {}
    for chip in chips:
        cores = MACHINES[chip].chips if chip in MACHINES else 1
        rounded_up = {math.ceil(size / cores) * cores for size in sizes}  # so that the cores can share them
        asked[chip] = [batch_size] if batch_size is not None else sorted(rounded_up)
        planner.check(chip, "train", asked[chip])  # all of them before minutes of compilation
    return [
        planner.plan(task, chip=chip, batch_sizes=sizes, log=lambda text, chip=chip: log(f"{chip}: {text}"))
        for chip, sizes in asked.items()
    ]


def _format_hours(hours):
    return format_duration(None if hours is None else 3600 * hours)


def _format_usd(usd):
    if usd is None:
        return "not known"
    return f"{usd:.2f} USD"  # no dollar sign: two of them are a formula in notebooks
