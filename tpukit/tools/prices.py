"""What hardware costs and how long it may be held: the one table of prices, `prices.csv`, to be edited as a copy.

An empty field is a figure that no trustworthy source gave. Prices change; each row says when and where its figures were read.
"""

import csv
import dataclasses
import io
import re
import shutil
from pathlib import Path

from tpukit.host.errors import TpukitError
from tpukit.host.tables import Table

USD_PER_KWH = 0.30  # of electricity for a local card; an option wherever it is used
SHIPPED = Path(__file__).with_name("prices.csv")
HOST_BESIDES = "its host machine is billed besides"
PLACES = ("Google Cloud", "Colab", "Colab free", "Kaggle", "local")


@dataclasses.dataclass(frozen=True)
class Price:
    """One kind of hardware at one place: a row of the table."""

    hardware: str
    """one chip or card: "TPU v5e", "T4", "RTX 4090", "CPU" ... (one chip of a TPU v2 or v3 has 2 cores)"""
    place: str
    """one of PLACES"""
    usd_per_hour: float | None
    """of one chip or card, on demand; 0 where it is free; None for a local one, which costs its electricity"""
    spot_usd_per_hour: float | None
    """of spare capacity, which can be taken away at any time"""
    session_h: float | None
    """hours of the longest session; None where there is no limit"""
    week_h: float | None
    """hours a week; None where there is no limit"""
    watts: float | None
    """board power of a local card"""
    as_of: str
    """year-month of the figures"""
    source: str
    """where the figures are from; says HOST_BESIDES where they are of the card alone"""

    def per_hour(self, *, chips=1, spot=False, usd_per_kwh=USD_PER_KWH):
        """USD an hour of so many chips or cards, or None where the table does not say."""
        if self.place == "local" and self.watts is not None and self.usd_per_hour is None:
            return chips * self.watts / 1000 * usd_per_kwh
        # Only Google Cloud sells spare capacity: elsewhere an empty spot figure takes nothing away from the usual one.
        spare = spot and (self.place == "Google Cloud" or self.spot_usd_per_hour is not None)
        usd = self.spot_usd_per_hour if spare else self.usd_per_hour
        return None if usd is None else chips * usd


COLUMNS = tuple(field.name for field in dataclasses.fields(Price))
NUMBERS = tuple(field.name for field in dataclasses.fields(Price) if field.type == float | None)


def read(path=None):
    """The rows of the shipped table, or of an edited copy of it, as a list of `Price`.

    Raises TpukitError that names line and column of what is wrong.
    """
    path = Path(path) if path else SHIPPED
    try:
        text = path.read_text(encoding="utf-8-sig")  # as spreadsheets write it
        lines = csv.reader(io.StringIO(text))
        numbered = [(lines.line_num, cells) for cells in lines]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TpukitError(
            f"prices {path}: cannot be read ({error}); `tpukit compare --prices-out {path}` writes a table to edit"
        ) from error
    head = tuple(numbered[0][1]) if numbered else ()
    if missing := [name for name in COLUMNS if name not in head]:
        raise TpukitError(f"prices {path}, line 1: no column {', '.join(missing)}; a table has {', '.join(COLUMNS)}")
    prices, seen = [], {}
    for number, cells in numbered[1:]:
        if not any(cells):
            continue
        where = f"prices {path}, line {number}"
        if len(cells) != len(head):
            raise TpukitError(
                f"{where}: {len(cells)} cells, but line 1 has {len(head)} columns; is a comma missing, or not quoted?"
            )
        row = {name: cell.strip() for name, cell in zip(head, cells) if name in COLUMNS}
        price = Price(**{name: _number(where, name, cell) if name in NUMBERS else cell for name, cell in row.items()})
        _check(where, price)
        key = (price.hardware, price.place)
        if key in seen:
            raise TpukitError(f"{where}: {price.hardware} at {price.place} is also in line {seen[key]}; keep one")
        seen[key] = number
        prices.append(price)
    return prices


def _number(where, name, cell):
    if not cell:
        return None
    try:
        value = float(cell)
    except ValueError:
        value = float("nan")
    if not 0 <= value < float("inf"):
        raise TpukitError(
            f"{where}, column {name}: {cell!r} is no number of zero or more; leave it empty where it is not known"
        )
    return value


def _check(where, price):
    if not price.hardware:
        raise TpukitError(f"{where}, column hardware: empty")
    if price.place not in PLACES:
        raise TpukitError(f"{where}, column place: {price.place!r} is none of {', '.join(PLACES)}")
    if not re.fullmatch(r"\d{4}-\d\d", price.as_of):
        raise TpukitError(f"{where}, column as_of: {price.as_of!r} is no year and month, like 2026-11")
    for name in ("session_h", "week_h"):
        if getattr(price, name) == 0:
            raise TpukitError(f"{where}, column {name}: no session fits into 0 hours; leave it empty where there is no limit")


def copy(path):
    """Put a copy of the shipped table at `path`, to be edited."""
    path = Path(path)
    if path.exists():
        raise TpukitError(f"{path} is there already: choose another name, or read it with --prices {path}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(SHIPPED, path)
    except OSError as error:
        raise TpukitError(f"{path} cannot be written ({error.strerror or error}): choose another place") from error
    return path


def table(prices):
    """The rows as a Table for people."""
    columns = ("hardware", "place", "USD an hour", "spot", "session, h", "week, h", "watts", "as of", "source")
    number = lambda value: None if value is None else f"{value:g}"  # noqa: E731
    rows = [
        [number(value) if name in NUMBERS else value for name, value in dataclasses.asdict(price).items()] for price in prices
    ]
    return Table("Prices of one chip or card, and how long it may be held", columns, rows)


def find(prices, hardware, place):
    """The row of some hardware at a place, upper and lower case alike. Raises TpukitError that names what there is."""
    for price in prices:
        if (price.hardware.lower(), price.place.lower()) == (hardware.lower(), place.lower()):
            return price
    there = ", ".join(price.hardware for price in prices if price.place.lower() == place.lower())
    if not there:
        raise TpukitError(f"no prices at {place!r}; there are those of {', '.join(sorted({p.place for p in prices}))}")
    raise TpukitError(f"no price of {hardware!r} at {place}; there are: {there}")
