"""Which hardware finishes a training, in how many sessions, at what cost: measurements of several machines
and published figures, merged with the price table `prices.csv`, which users edit as a copy."""

import csv
import dataclasses
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tpukit import tasks
from tpukit.devices.chips import session_chips
from tpukit.host.errors import TpukitError
from tpukit.host.tables import Sentences, Table, format_duration
from tpukit.reporting import display, figures
from tpukit.runs.run import settings_dict
from tpukit.tools.measure.timing import Measurement, epoch_seconds
from tpukit.training.task import Task

PRICES = Path(__file__).parents[1] / "prices.csv"
CARD_ALONE = "its host machine is billed separately"  # in the source of such a price
# MSHNet on IRSTD-1k, 800 images of 256x256: hardware, chips, label, seconds per epoch in guides on the web.
PUBLISHED_EPOCHS = (
    ("TPU v2", 4, "TPU v2-8", 30.0),
    ("A100", 1, "A100", 60.0),
    ("V100", 1, "V100", 120.0),
    ("T4", 1, "T4", 180.0),
    ("CPU", 1, "CPU", 600.0),
)
PUBLISHED_TASK, PUBLISHED_IMAGES, PUBLISHED_SIZE = "mshnet", 800, 256
BASES = ("measured", "published, not measured")  # the more trustworthy first
WEEK_H = 168.0
MAX_SESSIONS = 10_000  # a training that needs more of them never ends


@dataclasses.dataclass(frozen=True)
class Price:
    """One kind of hardware at one place: a row of `prices.csv`. None: no trustworthy figure was found."""

    hardware: str  # one chip or card: "TPU v5e", "T4", "RTX 4090", "CPU" ...
    place: str  # "Google Cloud", "Colab", "Colab free", "Kaggle", "local"
    usd_per_hour: float | None = None  # of one chip or card, on demand; 0 where it is free
    spot_usd_per_hour: float | None = None  # of spare capacity, which can be taken away at any time
    session_h: float | None = None  # hours of the longest session, where there is a limit
    week_h: float | None = None  # hours per week, where there is a limit
    as_of: str = ""  # year and month of the figures
    source: str = ""

    def per_hour(self, *, chips: int = 1, spot: bool = False) -> float | None:
        """USD per hour. Google Cloud alone sells spot capacity; elsewhere spot costs the same."""
        spot = spot and (self.place == "Google Cloud" or self.spot_usd_per_hour is not None)
        usd = self.spot_usd_per_hour if spot else self.usd_per_hour
        return None if usd is None else chips * usd


def read_prices(path: Path | str = PRICES) -> list[Price]:
    """The rows of the price table, or of an edited copy. Raises TpukitError that names line and column."""
    names = [field.name for field in dataclasses.fields(Price)]
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:  # spreadsheets write a byte order mark
            reader = csv.DictReader(file)
            rows = [(f"prices {path}, line {reader.line_num}", row) for row in reader if any(row.values())]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        advice = f"copy {PRICES} there, and edit the copy"
        raise TpukitError(f"prices {path}: cannot be read ({error}); {advice}") from error
    if missing := [name for name in names if name not in (reader.fieldnames or ())]:
        raise TpukitError(f"prices {path}, line 1: no column {', '.join(missing)}")
    return [Price(**{name: _parse_cell(where, name, row) for name in names}) for where, row in rows]


def _parse_cell(where: str, name: str, row: dict[str, Any]) -> Any:
    if None in row or None in row.values():
        raise TpukitError(f"{where}: expected as many columns as line 1 has; quote a comma in a text")
    cell = row[name].strip()
    if not name.endswith(("_hour", "_h")):
        return cell
    if not cell:
        return None
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf or value == 0 and name.endswith("_h"):
        raise TpukitError(f"{where}, column {name}: {cell!r} is not a possible number; empty means unknown")
    return value


def prices_table(prices: list[Price]) -> Table:
    """The rows of the price table, for people."""
    columns = ("hardware", "place", "USD per hour", "spot", "session, h", "week, h", "as of", "source")
    rows = [[f"{c:g}" if isinstance(c, float) else c for c in dataclasses.astuple(price)] for price in prices]
    return Table("Prices of one chip or card, and how long a session may be", columns, rows)


def sessions_needed(
    train_h: float,
    *,
    start_h: float = 0.0,
    lost_h: float = 0.0,
    session_h: float | None = None,
    week_h: float | None = None,
) -> tuple[int, float, float] | None:
    """(sessions, hours on the machine, hours on the calendar) of a training, or None where it never ends.

    Every session starts up for `start_h`. One that is cut off also loses `lost_h`, the work since its last
    checkpoint. A session lasts at most `session_h`, all sessions of a week at most `week_h`; what a week has
    left is not used where it is too short to train."""
    longest_h = session_h or math.inf
    week_h = week_h if week_h and week_h < WEEK_H else math.inf
    rounding_h = 1e-9  # sums of hours are exact to this
    sessions = weeks = 0
    used_h = week_used_h = trained_h = 0.0
    while sessions < MAX_SESSIONS:
        length_h = min(longest_h, week_h - week_used_h)
        needed_h = start_h + train_h - trained_h
        if needed_h <= length_h + rounding_h:
            return sessions + 1, used_h + needed_h, weeks * WEEK_H + week_used_h + needed_h
        if length_h > start_h + lost_h + rounding_h:
            sessions += 1
            used_h += length_h
            week_used_h += length_h
            trained_h += length_h - start_h - lost_h
        elif week_used_h:
            weeks += 1
            week_used_h = 0.0
        else:
            return None
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Offer:
    """The whole training on one kind of hardware at one place. None: not known, or it never ends there."""

    hardware: str
    chips: int
    label: str
    basis: str  # one of BASES: what `epoch_s` comes from
    epoch_s: float  # of training alone, without evaluations and checkpoints
    batch_size: int | None = None
    start_s: float = 0.0  # from the start of a session to the end of its first step; 0 where it is not known
    measured_at: str = ""
    place: str = ""
    sessions: int | None = None
    machine_h: float | None = None
    calendar_h: float = math.inf
    usd: float | None = None
    obstacle: str = ""  # why it does not finish within deadline and budget, or why that is not known

    @property
    def name(self) -> str:
        batch = f" at batch {self.batch_size}" if self.batch_size else ""
        is_elsewhere = _without_tier(self.measured_at) != _without_tier(self.place)
        elsewhere = f" (measured at {self.measured_at})" if self.measured_at and is_elsewhere else ""
        return f"{self.label}{batch}{f', {self.place}' if self.place else ''}{elsewhere}"

    @property
    def cost_then_time(self) -> tuple[float, float]:
        return math.inf if self.usd is None else self.usd, self.calendar_h


def _without_tier(place: str) -> str:
    return place.removesuffix(" free")


def offers(
    estimates: list[Offer],
    prices: list[Price],
    *,
    epochs: int,
    deadline_h: float = math.inf,
    budget_usd: float = math.inf,
    spot: bool = False,
) -> list[Offer]:
    """Every estimate at every place that has its hardware: those that finish first, then the cheapest."""
    found = []
    for one in estimates:
        for price in _places(one, estimates, prices):
            found.append(
                dataclasses.replace(one, place=price.place, obstacle="never ends within its sessions")
            )
            needed = sessions_needed(
                epochs * one.epoch_s / 3600,
                start_h=one.start_s / 3600,
                lost_h=Task.save_every_s / 3600,
                session_h=price.session_h,
                week_h=price.week_h,
            )
            if needed is None:
                continue
            sessions, machine_h, calendar_h = needed
            usd_per_hour = price.per_hour(chips=one.chips, spot=spot)
            usd = None if usd_per_hour is None else usd_per_hour * machine_h
            is_limited = price not in prices and price.place != "local"
            obstacles = {
                "too late": calendar_h > deadline_h,
                "too expensive": usd is not None and usd > budget_usd,
                "limits not known": is_limited,
                "cost not known": usd is None and budget_usd < math.inf,
            }
            found[-1] = dataclasses.replace(
                one,
                place=price.place,
                sessions=None if is_limited else sessions,
                machine_h=machine_h,
                calendar_h=calendar_h,
                usd=usd,
                obstacle=", ".join(what for what, applies in obstacles.items() if applies),
            )
    return sorted(found, key=lambda o: (bool(o.obstacle), BASES.index(o.basis), o.cost_then_time))


def _places(one: Offer, estimates: list[Offer], prices: list[Price]) -> Iterator[Price]:
    """The prices of the places that have this hardware in this number; and where it was measured."""
    same = [other for other in estimates if (other.hardware, other.chips) == (one.hardware, one.chips)]
    measured_at = {_without_tier(other.measured_at) for other in same}
    own = _without_tier(one.measured_at)
    is_listed = False
    for price in prices:
        limit = session_chips(price.hardware, price.place) or math.inf
        if price.hardware != one.hardware or one.chips > limit:
            continue
        place = _without_tier(price.place)
        # One CPU says nothing of another; and what was measured at a place counts there.
        if place == own or one.hardware != "CPU" and not (own and place in measured_at):
            is_listed = is_listed or place == own
            yield price
    if own and not is_listed:
        yield Price(one.hardware, own)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The offers, the best first, and notes on their figures. `show_comparison` shows it."""

    title: str
    epochs: int
    limits: str  # " within 3.0 days and 10.00 USD"
    offers: list[Offer]
    notes: list[str]

    def table(self) -> Table:
        """A row for each offer."""
        columns = ("hardware and place", "basis", "s per epoch", "sessions", "machine", "calendar", "cost")
        rows = [
            (
                offer.name,
                offer.basis,
                f"{offer.epoch_s:.4g}",
                offer.sessions,
                _hours(offer.machine_h),
                _hours(offer.calendar_h),
                _usd(offer.usd),
                offer.obstacle or "yes",
            )
            for offer in self.offers
        ]
        return Table(f"{self.title}{self.limits}", (*columns, "finishes"), rows)

    def sentences(self) -> Sentences:
        """The cheapest and the fastest offer in words, the more trustworthy basis first; then the notes."""
        found = []
        for basis in BASES:
            own = [offer for offer in self.offers if offer.basis == basis]
            possible = [offer for offer in own if not offer.obstacle]
            if own and not possible:
                closest = min(own, key=lambda offer: offer.calendar_h)
                words = f"nothing is known to finish{self.limits}. The closest is {self._describe(closest)}"
                found.append(f"{basis.capitalize()}: {words}")
            chosen: dict[Offer, str] = {}
            if possible:
                chosen[min(possible, key=lambda offer: offer.cost_then_time)] = "cheapest"
                chosen.setdefault(min(possible, key=lambda offer: offer.cost_then_time[::-1]), "fastest")
            for offer, which in chosen.items():
                words = f"the {which} that finishes{self.limits}: {self._describe(offer)}"
                found.append(f"{basis.capitalize()}, {words}")
        return Sentences([*found, *self.notes])

    def _describe(self, offer: Offer) -> str:
        if offer.machine_h is None:
            return f"{offer.name}: {offer.obstacle}."
        sessions = f"{offer.sessions or 'an unknown number of'} session{'' if offer.sessions == 1 else 's'}"
        if offer.calendar_h > offer.machine_h:
            sessions += f" ({_hours(offer.calendar_h)} on the calendar)"
        cost = "free" if offer.usd == 0 else f"cost {_usd(offer.usd)}"
        obstacle = f" ({offer.obstacle})" if offer.obstacle else ""
        duration = f"{self.epochs} epochs take {_hours(offer.machine_h)} in {sessions}"
        return f"{offer.name}: {duration}, {cost}{obstacle}."

    def figure(self) -> Any:
        """Hours on the machine and US dollars, a bar for each offer that ends."""
        shown = [offer for offer in reversed(self.offers) if offer.machine_h is not None]
        figure, ((hours, cost),) = figures.subplots(1, 2, (9.6, 1.2 + 0.27 * max(len(shown), 3)))
        styles = zip(BASES, (dict(facecolor=figures.BLUE), dict(facecolor=figures.GREY, hatch="//")))
        for basis, look in styles:
            rows = [row for row, offer in enumerate(shown) if offer.basis == basis]
            for axis, name in ((hours, "machine_h"), (cost, "usd")) if rows else ():
                values = [getattr(shown[row], name) or 0 for row in rows]
                bars = axis.barh(rows, values, height=0.65, edgecolor="white", label=basis, **look)
                texts = [
                    "" if getattr(shown[row], name) is None else f" {value:.3g}"
                    for row, value in zip(rows, values)
                ]
                axis.bar_label(bars, texts, fontsize=7)
        for axis, what in ((hours, "hours on the machine"), (cost, "USD")):
            axis.set_xlabel(f"{what}, {self.epochs} epochs", fontsize=9)
            axis.margins(x=0.2)
            axis.set_yticks(range(len(shown)), [])
            figures.style(axis)
        hours.set_yticklabels([figures.label(f"{offer.label}, {offer.place}") for offer in shown])
        figure.legend(*hours.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)
        return figure


def show_comparison(comparison: Comparison, picture: Path | None = None) -> None:
    """Show what `compare` found: table, bars, and the choice in words. picture: a PNG file for the bars."""
    display.present(comparison.table())
    display.present_figure(comparison.figure(), picture)
    display.present(comparison.sentences())


def _hours(hours: float | None) -> str:
    return format_duration(None if hours in (None, math.inf) else 3600 * hours)


def _usd(usd: float | None) -> str:
    return "not known" if usd is None else f"{usd:.2f} USD"  # two dollar signs are a formula in notebooks


def compare(
    measurements: Iterable[Measurement],
    *,
    epochs: int = 400,
    images: int | None = None,
    batch_size: int | None = None,
    prices: list[Price] | None = None,
    deadline_h: float | None = None,
    budget_usd: float | None = None,
    spot: bool = False,
) -> Comparison:
    """Merge measurements of one recipe and the published figures into a `Comparison`.

    images: per epoch; by default those of the largest measured set that is real, or of the published figures.
    batch_size: count with this one alone; by default with each hardware's fastest.
    Raises TpukitError for measurements of different recipes."""
    for name, count in dict(epochs=epochs, images=images, batch_size=batch_size).items():
        if count is not None and count < 1:
            raise TpukitError(f"{name}={count}: it must be 1 or more")
    limits = {"deadline_h": deadline_h, "budget_usd": budget_usd}
    limits = {name: limit for name, limit in limits.items() if limit is not None}
    if wrong := {name: limit for name, limit in limits.items() if not 0 <= limit < math.inf}:
        raise TpukitError(f"{', '.join(f'{n}={v}' for n, v in wrong.items())}: it must be zero or more")
    measurements, prices = list(measurements), read_prices() if prices is None else prices
    _check_same_recipe(measurements)
    task = measurements[0].task if measurements else PUBLISHED_TASK
    real = [m.samples for m in measurements if not m.synthetic]
    synthetic = [m.samples for m in measurements if task != PUBLISHED_TASK]
    images = images or max(real or synthetic, default=PUBLISHED_IMAGES)
    estimates, notes = [], []
    for m in measurements:
        usable = [
            Offer(
                hardware=m.hardware,
                chips=m.chips,
                label=m.label,
                basis=BASES[0],
                epoch_s=epoch_seconds(row["step_ms"] / 1e3, row["batch_size"], images),
                batch_size=row["batch_size"],
                start_s=row["start_s"],
                measured_at=m.place,
            )
            for row in m.fitting
            if row["batch_size"] <= images and batch_size in (None, row["batch_size"])
        ]
        estimates += sorted(usable, key=lambda one: one.epoch_s)[:1]
        if not usable:
            notes.append(
                f"{m.label} is left out: it was not measured at batch {batch_size or f'<= {images}'}."
            )
    sizes = {m.recipe.get(name) for m in measurements for name in ("base_size", "crop_size")}
    if task == PUBLISHED_TASK and sizes <= {PUBLISHED_SIZE}:
        for hardware, chips, label, epoch_s in PUBLISHED_EPOCHS:
            epoch_s *= images / PUBLISHED_IMAGES
            published = Offer(hardware=hardware, chips=chips, label=label, basis=BASES[1], epoch_s=epoch_s)
            estimates.append(published)
    elif task == PUBLISHED_TASK:
        notes.append("The published figures are left out: they are of images of 256x256, these are not.")
    if measurements and all(m.synthetic for m in measurements):
        notes.append(f"The images are synthetic, {images} to an epoch. A step costs the same with real ones.")
    notes.append("Hours count training steps and start-up; evaluations and checkpoints come on top.")
    found = offers(estimates, prices, epochs=epochs, spot=spot, **limits)
    alone = {(price.hardware, price.place) for price in prices if CARD_ALONE in price.source}
    if cards := sorted({offer.hardware for offer in found if (offer.hardware, offer.place) in alone}):
        notes.append(f"{', '.join(cards)} at Google Cloud: the cost is of the card alone; {CARD_ALONE}.")
    words = [_hours(limit) if name == "deadline_h" else _usd(limit) for name, limit in limits.items()]
    within = f" within {' and '.join(words)}" if words else ""
    return Comparison(f"{task}, {epochs} epochs of {images} images", epochs, within, found, notes)


def _check_same_recipe(measurements: list[Measurement]) -> None:
    for other in measurements[1:]:
        first = measurements[0]
        one, two = first.file or first.label, other.file or other.label
        if other.task != first.task:
            raise TpukitError(f"{one} measured {first.task}, {two} {other.task}: compare one task at a time")
        # A file of an earlier version, which did not have a setting yet, was measured as by its default.
        defaults = settings_dict(tasks.find(first.task)()) if first.task in tasks.TASKS else {}
        a, b = defaults | first.recipe, defaults | other.recipe
        names = sorted(first.recipe.keys() | other.recipe.keys())
        lines = [
            f"  {n}: {a.get(n)!r} in {one}, {b.get(n)!r} in {two}" for n in names if a.get(n) != b.get(n)
        ]
        if lines:
            advice = "Measure one of them again."
            raise TpukitError("\n".join(["these files measured different recipes:", *lines, advice]))
