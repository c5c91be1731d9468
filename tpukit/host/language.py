"""Say in the language of a notebook what tpukit says in English: TPUKIT_LANGUAGE=zh makes it Chinese."""

import functools
import os
import re
import tomllib
from pathlib import Path

WORDS = Path(__file__).with_name("words_zh.toml")


def is_chinese() -> bool:
    return os.environ.get("TPUKIT_LANGUAGE") == "zh"


def translate(text: str) -> str:
    """Return a text in the language of the page; as it is if there are no words for it."""
    if not is_chinese():
        return text
    if " · " in text:
        return " · ".join(map(translate, text.split(" · ")))
    for pattern, chinese in _words():
        if found := pattern.fullmatch(text):
            return chinese.format(*map(translate, found.groups()))
    return text


@functools.cache
def _words() -> list[tuple[re.Pattern[str], str]]:
    """Return (pattern of an English text, the Chinese text with {} for each group)."""
    words = tomllib.loads(WORDS.read_text(encoding="utf-8"))
    return [(re.compile(re.escape(text).replace(r"\{\}", "(.+)")), words[text]) for text in words]
