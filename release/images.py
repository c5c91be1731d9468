"""`python -m release.images`: what the images of Colab and Kaggle have now that release/images.toml has not.

Reads the public lists that images.toml names, and prints the differences as a table. Exit code 0: none; 1:
some; 2: a list could not be read. Of the lists' text only names and versions of a known form are printed."""

import re
import sys
import tomllib
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path

KNOWN = tomllib.loads(Path(__file__).with_name("images.toml").read_text())
ADDRESS = "https://raw.githubusercontent.com/"
COLAB = "colab-image"
MOST_BYTES = 1 << 20  # of a list; the longest has 15,000
NAME, VERSION = r"[A-Za-z0-9][A-Za-z0-9._-]{0,60}", r"[0-9][A-Za-z0-9.!_]{0,40}"
PIN = re.compile(rf"(?<![\w.-])(?P<name>{NAME})(?:\[[\w, -]*\])?==(?P<version>{VERSION})")
WHEEL = re.compile(rf"/(?P<name>{NAME}?)-(?P<version>{VERSION}?)(?:%2B\w+)?-(?:cp|py)\d+-[^/]*\.whl")
BARE = re.compile(rf"({NAME})(?:\[[\w, -]*\])?\s*(?:[<>~!;#].*)?")
VARIABLE = re.compile(r"([A-Z_]{1,40})=([\w.:-]{1,60})")
PYTHON = re.compile(r"(?:Python |BASE_IMAGE=python:|ARG PACKAGE_PATH=/usr/local/lib/python)(3\.\d{1,2})\b")
# Kaggle's images without a TPU are built upon one of Colab's, of this day.
BASE = re.compile(r"FROM \S{1,90}:release-colab-external-images_(?P<version>\d{8})-")


def main():
    rows = []
    for image, known in KNOWN.items():
        try:
            python, packages = read("\n".join(map(fetch, known["lists"])))
        except (OSError, HTTPException, ValueError) as error:
            print(f"the lists of {image} could not be read: {error}", file=sys.stderr)
            sys.exit(2)
        rows += [(image, *row) for row in differences(known, python, packages)]
    if rows:
        print("| image | what | release/images.toml | now |\n|---|---|---|---|")
        print(*(f"| {' | '.join(row)} |" for row in rows), sep="\n")
        print("\nCorrect `release/images.toml`, run `make twins`, then correct the pages.")
    sys.exit(1 if rows else 0)


def fetch(path: str) -> str:
    """Return the text of OWNER/REPOSITORY/HEAD/FILE on GitHub. Raises OSError where it cannot be had."""
    with urllib.request.urlopen(ADDRESS + path, timeout=30) as answer:
        return answer.read(MOST_BYTES).decode(errors="replace")


def read(text: str) -> tuple[str, dict[str, str]]:
    """Return the Python of an image and its packages, name -> version or "", from the text of its lists.

    Raises ValueError if they name no Python or no torch: then their form has changed."""
    lines = [line.strip() for line in text.splitlines() if len(line) < 1000]
    lines = [line for line in lines if not line.startswith("#")]
    pythons = [found[1] for line in lines if (found := PYTHON.match(line))]
    variables = [found.groups() for line in lines if (found := VARIABLE.fullmatch(line))]
    packages = {}
    for line in lines:
        for name, value in variables:
            line = line.replace(f"${{{name}}}", value)
        if found := BARE.fullmatch(line):
            packages.setdefault(normal(found[1]), "")
        for found in (*PIN.finditer(line), *WHEEL.finditer(line)):
            packages[normal(found["name"])] = found["version"]
        if found := BASE.match(line):
            packages[COLAB] = found["version"]
    if not pythons or not packages.keys() & {"torch", COLAB}:
        raise ValueError("no Python or no torch is named there, so their form has changed")
    return pythons[0], packages


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def differences(known: dict, python: str, packages: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield (what, as images.toml has it, as it is now) of an image. known: its entry in images.toml."""
    if python != known["python"]:
        yield "Python", known["python"], python
    unlisted = known.get("unlisted", [])
    for package in [*known["packages"], *known.get("built_upon", [])]:
        name, _, version = package.partition("==")
        now = packages.get(normal(name))
        if now is None and name not in unlisted:
            yield name, version or "there", "gone"
        if now and version and now != version:
            yield name, version, now
    for name in known["lacks"]:
        if normal(name) in packages:
            yield name, "not there", packages[normal(name)] or "there"


if __name__ == "__main__":
    main()
