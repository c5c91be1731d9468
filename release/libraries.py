"""`python -m release.libraries`: draws the table of docs/TRAINING.md that sets one loop in four libraries
side by side, as docs/libraries.svg; that of the Chinese page, too. No figure stands here: all are the
table's."""

import html
import re
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"
PAGES = {"TRAINING.md": "libraries.svg", "TRAINING.zh-CN.md": "libraries.zh-CN.svg"}
FIRST = "| | torch_xla "  # how the table's head begins
YES, NO = ("yes", "是"), ("no", "by hand", "否", "自己写")  # anything else is: in part
LEGEND = {
    "libraries.svg": ("yes", "in part", "no, by hand"),
    "libraries.zh-CN.svg": ("是", "部分", "否，自己写"),
}
LEFT, COLUMN, ROW, BARS, TOP = 236, 122, 27, 96, 44  # pixels
STYLE = """\
text { font: 14px sans-serif; fill: #24292f } .light { fill: #57606a } .plain { fill: #0072b2 }
.more { fill: #0072b2; opacity: .4 } .ring { fill: none; stroke: #0072b2; stroke-width: 1.6 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .light { fill: #9198a1 } .plain, .more { fill: #58a6d6 } .ring { stroke: #58a6d6 } }"""


def main():
    for page, picture in PAGES.items():
        (DOCS / picture).write_text(draw(table_of(DOCS / page), LEGEND[picture]))


def table_of(page: Path) -> list[list[str]]:
    """Return the cells of the table: its head, the lines changed, and a row for each promise."""
    _, head, rest = page.read_text().partition(f"\n{FIRST}")
    lines = (FIRST + rest.partition("\n\n")[0]).splitlines()
    assert head, f"{page} has no table that begins with {FIRST!r}"
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [rows[0], *rows[2:]]


def draw(table: list[list[str]], legend: tuple[str, ...]) -> str:
    """Return an SVG: a bar for each library, light up to its lines with a resume, and a dot for each promise.
    legend: the words for a full, a half and an empty dot."""
    (_, *libraries), (lines, *counts), *promises = table
    pairs = [list(map(int, re.findall(r"\d+", count))) for count in counts]
    unit, floor = BARS / max(map(max, pairs)), TOP + BARS
    changed, resume = re.split(r"[;；] *", lines)
    parts = [text(0, floor - 24, changed), text(0, floor - 6, resume, "light")]
    for column, (library, (plain, resumed)) in enumerate(zip(libraries, pairs)):
        x = middle(column)
        parts.append(text(x, 16, library.split()[0], anchor="middle"))
        parts.append(bar(x, floor, unit * plain, "plain"))
        parts.append(bar(x, floor - unit * plain, unit * (resumed - plain), "more"))
        parts.append(text(x + 22, floor - unit * plain + 14, plain))
        parts.append(text(x + 22, floor - unit * resumed + 4, resumed, "light"))
    for row, (promise, *kept) in enumerate(promises):
        y = floor + ROW * (row + 1)
        parts.append(text(0, y + 5, promise))
        parts += [dot(middle(column), y, share(word)) for column, word in enumerate(kept)]
    y = floor + ROW * (len(promises) + 1) + 6
    for column, (word, filled) in enumerate(zip(legend, (1, 0.5, 0))):
        parts += [dot(middle(column), y, filled), text(middle(column) + 14, y + 5, word, "light")]
    size = f'width="{middle(len(libraries)) - COLUMN // 2}" height="{y + 16}"'
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{STYLE}</style>\n{body}\n</svg>\n'


def share(word: str) -> float:
    """Return how much of a promise a cell keeps: 1, 0.5 or 0."""
    return 1 if word in YES else 0 if word in NO else 0.5


def middle(column):
    return LEFT + COLUMN * column + COLUMN // 2


def text(x, y, words, kind="", anchor="start"):
    kind = f' class="{kind}"' if kind else ""
    return f'<text x="{x}" y="{y:.0f}" text-anchor="{anchor}"{kind}>{html.escape(str(words))}</text>'


def bar(x, floor, height, kind):
    place = f'x="{x - 18}" y="{floor - height:.1f}" width="36" height="{height:.1f}"'
    return f'<rect {place} class="{kind}"/>'


def dot(x, y, filled):
    """A ring, of which nothing, the left half or all is filled."""
    ring = f'<circle cx="{x}" cy="{y}" r="7" class="ring"/>'
    half = f'<path d="M{x} {y - 7}a7 7 0 0 0 0 14z" class="plain"/>' if filled else ""
    rest = f'<path d="M{x} {y - 7}a7 7 0 0 1 0 14z" class="plain"/>' if filled == 1 else ""
    return ring + half + rest


if __name__ == "__main__":
    main()
