"""Say in the language of a notebook what reporting says in English: TPUKIT_LANGUAGE=zh makes it Chinese."""

import functools
import os
import re
import tomllib
from pathlib import Path
from typing import Any

from tpukit.host.tables import Sentences, Table

WORDS = Path(__file__).with_name("words_zh.toml")
# How the files of fonts with Chinese signs begin, on Linux, macOS and Windows; matplotlib brings none.
CHINESE_FONTS = (
    *("NotoSansCJK", "NotoSansSC", "SourceHanSans", "wqy-microhei", "wqy-zenhei", "DroidSansFallback"),
    *("PingFang", "Hiragino Sans GB", "msyh", "simhei"),
)


def is_chinese() -> bool:
    return os.environ.get("TPUKIT_LANGUAGE") == "zh"


@functools.cache
def fonts() -> list[str]:
    """Return the family of an installed font with Chinese signs, which matplotlib then knows; or nothing."""
    from matplotlib import font_manager

    for path in sorted(font_manager.findSystemFonts()):
        if Path(path).name.startswith(CHINESE_FONTS):
            font_manager.fontManager.addfont(path)
            return [font_manager.FontProperties(fname=path).get_name()]
    return []


def translate(text: str, *, drawn: bool = False) -> str:
    """Return a text in the language of the page; as it is if there are no words for it, or, when it is to be
    drawn, no font."""
    if not is_chinese() or (drawn and not fonts()):
        return text
    for pattern, chinese in _words():
        if found := pattern.fullmatch(text):
            return chinese.format(*map(translate, found.groups()))
    return " · ".join(map(translate, text.split(" · "))) if " · " in text else text


@functools.cache
def _words() -> list[tuple[re.Pattern[str], str]]:
    """Return (pattern of an English text, the Chinese text with {} for each group)."""
    words = tomllib.loads(WORDS.read_text(encoding="utf-8"))
    return [(re.compile(re.escape(text).replace(r"\{\}", "(.+)")), words[text]) for text in words]


def translated(thing: Any) -> Any:
    """Return a table or sentences in the language of the page, and anything else as it is."""
    if not is_chinese():
        return thing
    if isinstance(thing, Sentences):
        return type(thing)(map(translate, thing))
    if not isinstance(thing, Table):
        return thing
    rows, folded = ([map(translate, row) for row in part] for part in (thing.rows, thing.folded))
    columns = map(translate, thing.columns)
    return Table(translate(thing.title), columns, rows, folded=folded, summary=translate(thing.summary))
