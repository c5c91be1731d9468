"""What hardware costs and how long a session may be: the price table `prices.csv`, which users edit as a
copy.

An empty field means that no trustworthy source gave the figure. Prices change; each row says when and where
it was read."""

import csv
import dataclasses
import io
import math
import shutil
from pathlib import Path

from tpukit.host.errors import TpukitError
from tpukit.host.tables import Table

HOST_BILLED_SEPARATELY = (
    "its host machine is billed separately"  # of a source whose figure is of the card alone
)
SHIPPED = Path(__file__).with_name("prices.csv")
PLACES = ("Google Cloud", "Colab", "Colab free", "Kaggle", "local")


@dataclasses.dataclass(frozen=True)
class Price:
    """One kind of hardware at one place: a row of the table."""

    hardware: str  # one chip or card: "TPU v5e", "T4", "RTX 4090", "CPU" ...
    place: str  # one of PLACES
    usd_per_hour: float | None = None  # of one chip or card, on demand; 0 where it is free
    spot_usd_per_hour: float | None = None  # of spot capacity, which can be taken away at any time
    session_h: float | None = None  # hours of the longest session, where there is a limit
    week_h: float | None = None  # hours per week, where there is a limit
    as_of: str = ""  # year and month of the figures
    source: str = ""

    @property
    def excludes_host(self):
        """Whether the price is of the card alone, without the machine around it."""
        return HOST_BILLED_SEPARATELY in self.source

    def per_hour(self, *, chips=1, spot=False):
        """USD per hour of the given number of chips or cards; None where it is not known."""
        # Only Google Cloud sells spot capacity: elsewhere an empty spot price means that the usual price
        # applies.
        spot = spot and (self.place == "Google Cloud" or self.spot_usd_per_hour is not None)
        usd = self.spot_usd_per_hour if spot else self.usd_per_hour
        return None if usd is None else chips * usd


COLUMNS = tuple(field.name for field in dataclasses.fields(Price))
NUMBERS = tuple(field.name for field in dataclasses.fields(Price) if field.type == float | None)


def read(path=None):
    """The rows of the shipped table, or of an edited copy, as a list of `Price`. Raises TpukitError with line
    and column."""
    path = Path(path or SHIPPED)
    try:
        reader = csv.DictReader(
            io.StringIO(path.read_text(encoding="utf-8-sig"))
        )  # spreadsheets write a byte order mark
        rows = [(f"prices {path}, line {reader.line_num}", row) for row in reader if any(row.values())]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        advice = f"`tpukit compare --prices-out {path}` writes a table to edit"
        raise TpukitError(f"prices {path}: cannot be read ({error}); {advice}") from error
    if missing := [name for name in COLUMNS if name not in (reader.fieldnames or ())]:
        raise TpukitError(
            f"prices {path}, line 1: no column {', '.join(missing)}; a table has {', '.join(COLUMNS)}"
        )
    prices = {}
    for where, row in rows:
        if None in row or None in row.values():
            raise TpukitError(
                f"{where}: it has not the {len(reader.fieldnames)} columns of line 1; quote a comma in a text"
            )
        price = Price(
            **{name: _parse_cell(f"{where}, column {name}", name, row[name].strip()) for name in COLUMNS}
        )
        if (price.hardware, price.place) in prices:
            raise TpukitError(f"{where}: {price.hardware} at {price.place} is listed twice; keep one")
        prices[price.hardware, price.place] = price
    return list(prices.values())


def _parse_cell(where, name, cell):
    if name == "place" and cell not in PLACES:
        raise TpukitError(f"{where}: {cell!r} is not one of {', '.join(PLACES)}")
    if name not in NUMBERS:
        return cell
    if not cell:
        return None
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf or value == 0 and name in ("session_h", "week_h"):
        raise TpukitError(
            f"{where}: {cell!r} is not a possible number; leave it empty where it is unknown or without limit"
        )
    return value


def copy(path):
    """Write a copy of the shipped table to `path`, to be edited."""
    path = Path(path)
    if path.exists():
        raise TpukitError(f"{path} already exists: choose another name, or read it with --prices {path}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(SHIPPED, path)
    except OSError as error:
        raise TpukitError(
            f"{path} cannot be written ({error.strerror or error}): choose another place"
        ) from error
    return path


def table(prices):
    """The rows as a Table for people. What is free, and what the user added or changed, comes first; the rest
    is folded."""
    shipped = read()
    folded = [price for price in prices if price in shipped and price.usd_per_hour != 0]
    rows = [price for price in prices if price not in folded]
    columns = ("hardware", "place", "USD per hour", "spot", "session, h", "week, h", "as of", "source")
    return Table(
        "Prices of one chip or card, and how long a session may be",
        columns,
        map(_cells, rows),
        folded=map(_cells, folded),
        summary=f"{len(folded)} more rows, not free or of unknown price",
    )


def _cells(price):
    return [f"{cell:g}" if isinstance(cell, float) else cell for cell in dataclasses.astuple(price)]
