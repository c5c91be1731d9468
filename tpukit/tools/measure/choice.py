"""In how many sessions, hours and dollars which hardware does a whole training: by the measurements of
several machines, published figures, and the price table `prices.csv`, which users edit as a copy."""

import csv
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tpukit.devices.chips import session_chips
from tpukit.host.errors import TpukitError
from tpukit.host.tables import Table, format_duration
from tpukit.reporting import display, figures
from tpukit.tools.measure.timing import PUBLISHED, Measurement
from tpukit.training.task import Task

PRICES = Path(__file__).with_name("prices.csv")
WEEK_H = 168.0
MAX_SESSIONS = 10_000  # a training that needs more of them never ends

# Prices and sessions


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
        """USD per hour, on spot where that is sold."""
        usd = self.spot_usd_per_hour if spot and self.spot_usd_per_hour is not None else self.usd_per_hour
        return None if usd is None else chips * usd


COLUMNS = tuple(field.name for field in dataclasses.fields(Price))


def read_prices(path: Path | str = PRICES) -> list[Price]:
    """The rows of the price table, or of an edited copy. Raises TpukitError that names the row."""
    prices, number = [], 1
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:  # spreadsheets write a byte order mark
            for number, row in enumerate(csv.DictReader(file), 2):
                if None in row or None in (row.get(name) for name in COLUMNS):
                    raise ValueError(f"it has other columns than {PRICES.name}: quote a comma in a text")
                if any(row.values()):
                    prices.append(Price(*(_parse_cell(name, row[name]) for name in COLUMNS)))
    except (OSError, ValueError, csv.Error) as error:
        raise TpukitError(f"prices {path}, row {number}: {error}. Edit a copy of {PRICES}") from error
    return prices


def _parse_cell(column: str, cell: str) -> Any:
    if not column.endswith(("_hour", "_h")):
        return cell.strip()
    value = float(cell) if cell.strip() else None
    if value is not None and not 0 <= value < math.inf:
        raise ValueError(f"{column} is {value}")
    return value


def prices_table(prices: list[Price]) -> Table:
    """The rows of the price table, for people."""
    rows = [dataclasses.astuple(price) for price in prices]
    return Table("Prices of one chip or card, and limits", COLUMNS, rows)


def sessions_needed(
    train_h: float, price: Price, *, start_h: float = 0.0, lost_h: float = 0.0
) -> tuple[int, float, float] | None:
    """(sessions, hours on the machine, hours on the calendar) of a training, or None where it never ends.

    Every session starts up for `start_h`. One that is cut off also loses `lost_h`, the work since its last
    checkpoint. A session lasts at most `session_h`, all sessions of a week at most `week_h`; what a week has
    left is not used where it is too short to train."""
    session_h, week_h = (math.inf if limit is None else limit for limit in (price.session_h, price.week_h))
    rounding_h = 1e-9  # sums of hours are exact to this
    sessions = weeks = 0
    used_h = week_used_h = 0.0
    while sessions < MAX_SESSIONS:
        length_h = min(session_h, week_h - week_used_h)
        last_h = start_h + train_h
        if last_h <= length_h + rounding_h:
            return sessions + 1, used_h + last_h, weeks * WEEK_H + week_used_h + last_h
        if length_h > start_h + lost_h + rounding_h:
            sessions += 1
            used_h += length_h
            week_used_h += length_h
            train_h -= length_h - start_h - lost_h
        elif week_used_h:
            weeks += 1
            week_used_h = 0.0
        else:
            break
    return None


# The comparison


class Offer(NamedTuple):
    """The whole training on one kind of hardware at one place."""

    name: str
    basis: str
    epoch_s: float  # without evaluations and checkpoints
    sessions: int
    machine_h: float
    calendar_h: float
    usd: float | None  # None: not known

    def words(self) -> tuple[str, str, str]:
        """Hours on the machine, hours on the calendar, and the cost."""
        cost = f"{self.usd:.2f} USD" if self.usd else "free"  # two dollar signs are a formula in notebooks
        hours = [format_duration(3600 * hours) for hours in (self.machine_h, self.calendar_h)]
        return hours[0], hours[1], "cost not known" if self.usd is None else cost


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Offers: what was measured before what was published, the cheaper and then the faster first."""

    title: str
    offers: list[Offer]

    def table(self) -> Table:
        """A row for each offer."""
        columns = ("hardware and place", "basis", "s per epoch", "sessions", "machine", "calendar", "cost")
        rows = [(o.name, o.basis, f"{o.epoch_s:.4g}", o.sessions, *o.words()) for o in self.offers]
        return Table(self.title, columns, rows)

    def figure(self) -> Any:
        """Hours on the machine and the cost, a bar for each offer: blue if measured, else grey."""
        shown = self.offers[::-1]
        figure, ((axis,),) = figures.subplots(1, 1, (9.6, 1.2 + 0.27 * max(len(shown), 3)))
        colours = [figures.BLUE if offer.basis == "measured" else figures.GREY for offer in shown]
        bars = axis.barh(range(len(shown)), [offer.machine_h for offer in shown], color=colours)
        texts = [" {0}, {2}; {basis}".format(*offer.words(), basis=offer.basis) for offer in shown]
        axis.bar_label(bars, texts, fontsize=7, color=figures.GREY)
        axis.set_yticks(range(len(shown)), [figures.label(offer.name) for offer in shown])
        axis.margins(x=0.5)
        figures.finish(axis, self.title, "hours on the machine (training steps and start-up), and cost")
        axis.grid(False, axis="y")  # its lines would strike the labels through
        return figure


def compare(
    measurements: Sequence[Measurement],
    *,
    epochs: int = 400,
    prices: Sequence[Price] = (),
    spot: bool = False,
) -> Comparison:
    """Merge measurements of one recipe and the published figures.

    An epoch has the images of the largest measured set, or of the published figures, and each machine counts
    with its fastest batch size. prices: by default the shipped ones. Raises TpukitError for measurements of
    different recipes."""
    if epochs < 1:
        raise TpukitError(f"epochs={epochs}: it must be 1 or more")
    first, *others = measurements or PUBLISHED
    for other in others:
        if differing := _differences(first, other):
            one, two = (f"{m.label} ({m.place})" for m in (first, other))
            raise TpukitError("\n".join([f"{one} and {two} measured different recipes:", *differing]))
    images = max(m.samples for m in measurements or PUBLISHED)
    joined = [*measurements, *(m for m in PUBLISHED if not _differences(first, m))]
    joined.sort(key=lambda m: m.epoch_s(images), reverse=True)
    fastest = {(m.label, m.place): m for m in joined}.values()
    prices = prices or read_prices()
    found = []
    for m in fastest:
        for price in _places(m, prices):
            found += _offers(m, price, m.epoch_s(images), epochs, spot)

    def rank(offer: Offer) -> tuple:
        usd = math.inf if offer.usd is None else offer.usd
        return offer.basis, usd, offer.calendar_h

    title = f"{first.task}, {epochs} epochs of {images} images, no evaluations"
    return Comparison(title, sorted(found, key=rank))


def _differences(first: Measurement, other: Measurement) -> list[str]:
    """The settings that both know, and in which they differ."""
    one, two = (m.recipe | dict(task=m.task) for m in (first, other))
    names = sorted(one.keys() & two.keys())
    return [f"  {name}: {one[name]!r} and {two[name]!r}" for name in names if one[name] != two[name]]


def _places(m: Measurement, prices: Sequence[Price]) -> list[Price]:
    """The prices of the places that have this hardware in this number; and where it was measured."""
    found = []
    for price in prices:
        limit = session_chips(price.hardware, price.place) or math.inf
        is_own = price.place.removesuffix(" free") == m.place
        if price.hardware == m.hardware and m.chips <= limit and (is_own or m.hardware != "CPU"):
            found.append(price)  # one CPU says nothing of another
    is_listed = any(price.place.removesuffix(" free") == m.place for price in found)
    return found if is_listed or not m.place else [*found, Price(m.hardware, m.place)]


def _offers(m: Measurement, price: Price, epoch_s: float, epochs: int, spot: bool) -> list[Offer]:
    """What it takes at one place; nothing where it never ends."""
    start_h, lost_h = m.start_s / 3600, Task.save_every_s / 3600
    needed = sessions_needed(epochs * epoch_s / 3600, price, start_h=start_h, lost_h=lost_h)
    if needed is None:
        return []
    usd_per_hour = price.per_hour(chips=m.chips, spot=spot)
    usd = None if usd_per_hour is None else usd_per_hour * needed[1]
    name, basis = f"{m.label}, {price.place}", "published, not measured"
    if m.place:
        name, basis = f"{m.label} at batch {m.batch_size}, {price.place}", "measured"
        if m.place != price.place.removesuffix(" free"):
            name += f" (measured at {m.place})"
    name += " (card without its host)" if "the card alone" in price.source else ""
    return [Offer(name, basis, epoch_s, *needed, usd)]


def show_comparison(comparison: Comparison, picture: Path | None = None) -> None:
    """Show what `compare` found as a table and as bars. picture: a PNG file for the bars."""
    display.present(comparison.table())
    display.present_figure(comparison.figure(), picture)
