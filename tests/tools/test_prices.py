"""The price table: the shipped one, edited copies, and every way in which a copy can be wrong."""

import tomllib

import pytest

from tests.conftest import ROOT
from tests.tools.compare.samples import price
from tpukit import TpukitError
from tpukit.tools import prices
from tpukit.tools.compare import comparison


def find(table, hardware, place):
    (row,) = [row for row in table if (row.hardware, row.place) == (hardware, place)]
    return row


def test_the_shipped_prices_name_the_source_of_every_figure_and_are_shipped():
    table = prices.read()
    assert all(p.source and p.as_of <= "2026-11" for p in table)
    assert find(table, "TPU v5e", "Kaggle").week_h == 20
    assert find(table, "TPU v5e", "Google Cloud").usd_per_hour == 1.2
    for chip, units in (("TPU v5e", 3.14), ("TPU v6e", 3.71)):
        of_colab = find(table, chip, "Colab")
        assert (
            of_colab.usd_per_hour == pytest.approx(units * 0.0999, abs=5e-4)
            and "not checked" in of_colab.source
        )
    assert "12 h" in find(table, "T4", "Kaggle").source and "9 h" in find(table, "T4", "Kaggle").source
    for hardware, *_ in comparison.PUBLISHED_EPOCHS:
        assert any(p.hardware == hardware for p in table), hardware
    assert {p.hardware for p in table if p.excludes_host} == {"T4", "L4", "V100", "P100"}
    shipped = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert "prices.csv" in shipped["tpukit.tools"]


def test_an_edited_copy_of_the_prices_is_read_as_a_spreadsheet_leaves_it(tmp_path):
    copy = prices.copy(tmp_path / "mine.csv")
    lines = [line for line in copy.read_text().splitlines() if not line.startswith("T4,Colab,")]
    copy.write_text("\ufeff" + "\r\n".join([*lines, "", ",,,,,,,", "T4,Colab, 0.5 ,,,,2026-12,my own"]))
    found = find(prices.read(copy), "T4", "Colab")
    assert (found.usd_per_hour, found.session_h, found.as_of) == (0.5, None, "2026-12")
    edited = copy.read_text()
    with pytest.raises(TpukitError, match="mine.csv"):
        prices.copy(copy)
    assert copy.read_text() == edited


@pytest.mark.parametrize(
    "line, named",
    [
        ("T4,Colab,cheap,,,,2026-11,x", "line 2, column usd_per_hour: 'cheap'"),
        ("T4,Colab,-1,,,,2026-11,x", "line 2, column usd_per_hour: '-1'"),
        ("T4,Colab,nan,,,,2026-11,x", "line 2, column usd_per_hour: 'nan'"),
        ("T4,Colab,1,,inf,,2026-11,x", "line 2, column session_h: 'inf'"),
        ("T4,Colab,1,,0,,2026-11,x", "line 2, column session_h: '0'"),
        ("T4,Mars,1,,,,2026-11,x", "line 2, column place: 'Mars'"),
        ("T4,Colab,1,2026-11,x", "line 2.* 8 columns"),
        ("T4,Colab,1,,,,2026-11,x,y", "line 2.* 8 columns"),
        ("T4,Colab,1,,,,2026-11,x\nT4,Colab,2,,,,2026-11,x", "line 3: T4 at Colab"),
    ],
)
def test_a_bad_price_table_is_named_by_line_and_column(line, named, tmp_path):
    path = tmp_path / "bad.csv"
    path.write_text(f"{','.join(prices.COLUMNS)}\n{line}\n")
    with pytest.raises(TpukitError, match=f"bad.csv, {named}"):
        prices.read(path)


def test_a_table_without_a_column_or_a_file_is_named(tmp_path):
    (tmp_path / "short.csv").write_text("hardware,place\nT4,Colab\n")
    with pytest.raises(TpukitError, match="line 1.* usd_per_hour, spot_usd_per_hour"):
        prices.read(tmp_path / "short.csv")
    (tmp_path / "empty.csv").touch()
    with pytest.raises(TpukitError, match="line 1.* hardware, place"):
        prices.read(tmp_path / "empty.csv")
    with pytest.raises(TpukitError, match="none.csv.* --prices-out") as caught:
        prices.read(tmp_path / "none.csv")
    assert isinstance(caught.value.__cause__, OSError)


def test_a_local_card_costs_what_an_edited_table_says():
    assert price("RTX 3090", "local", 0.14).per_hour(chips=2, spot=True) == pytest.approx(0.28)
    assert price("CPU", "local", None).per_hour() is None


def test_spot_is_google_clouds_and_what_is_free_elsewhere_stays_free():
    assert price(spot_usd_per_hour=0.25).per_hour(chips=4, spot=True) == 1.0
    assert price(usd=1.0).per_hour(spot=True) is None  # a spot price of Google Cloud that nobody knows
    assert price(place="Kaggle", usd=0.0).per_hour(spot=True) == 0.0
    assert price(place="Colab", usd=0.2).per_hour(spot=True) == 0.2


def test_a_table_of_prices_leads_with_what_is_free_and_what_the_user_changed_and_folds_the_rest():
    shipped = prices.read()
    mine = [price("T4", "Colab", 0.5), price("RTX 3090", "local", 0.14), price(usd=None)]
    shown = prices.table([*shipped, *mine])
    assert {row[1] for row in shown.rows[:-3]} == {"Kaggle", "Colab free"} and {
        row[2] for row in shown.rows[:-3]
    } == {"0"}
    assert [row[:3] for row in shown.rows[-3:]] == [
        ("T4", "Colab", "0.5"),
        ("RTX 3090", "local", "0.14"),
        ("T4", "Google Cloud", ""),
    ]
    assert len(shown.rows) + len(shown.folded) == len(shipped) + 3 and str(len(shown.folded)) in shown.summary
    assert not {"0"} & {row[2] for row in shown.folded}


def test_the_table_for_people_has_a_row_for_each_price_with_empty_cells_for_what_is_unknown():
    shown = prices.table([price(usd=None, session_h=9.0)])
    assert shown.rows == [("T4", "Google Cloud", "", "", "9", "", "2026-11", "test")]
