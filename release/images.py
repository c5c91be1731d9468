"""`python -m release.images`: what the images of Colab and Kaggle have now that release/images.toml has not.

Reads the public lists that images.toml names, compares them, and writes the text of an issue: each
difference, and what it would break. Exit code 0: nothing new; 1: differences; 2: a list could not be read.
Needs Python alone. What the lists say is foreign: of their text only names, versions and numbers of a known
form get into the issue."""

import argparse
import re
import sys
import tomllib
import urllib.request
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path

from tpukit.devices import LIBTPU_RELEASES
from tpukit.host.environment import release

ROOT = Path(__file__).parent.parent
ADDRESS = "https://raw.githubusercontent.com/"
LIMIT = 1 << 20  # bytes of a list; the longest has 15,000
LINE = 1000  # characters of a line that is read
NAME, VERSION = r"[A-Za-z0-9][A-Za-z0-9._-]{0,60}", r"[0-9][A-Za-z0-9.!+_]{0,40}"
PIN = re.compile(rf"(?<![\w.-])(?P<name>{NAME})(?:\[[\w, -]*\])?==(?P<version>{VERSION})")
BARE = re.compile(rf"(?P<name>{NAME})(?:\[[\w, -]*\])?\s*(?:[<>~!;#@].*)?")
WHEEL = re.compile(rf"/(?P<name>{NAME}?)-(?P<version>{VERSION}?)(?:%2B\w+)?-(?:cp|py)\d+-[^/]*\.whl")
VARIABLE = re.compile(r"(?P<name>[A-Z_]{1,40})=(?P<value>[\w.:-]{1,60})")
PYTHON = re.compile(r"(?:Python |BASE_IMAGE=python:)(?P<version>3\.\d{1,2})\b")
PYTHONS = ("3.11", "3.12", "3.13")
# Whose private calls tpukit/devices/xla_private.py knows.
TORCH_XLA = ((2, 8), (2, 9))


@dataclass
class Image:
    """What the lists of an image say."""

    python: str = ""
    # normalised name -> version, empty where the list names none
    packages: dict[str, str] = field(default_factory=dict)


def main():
    parser = argparse.ArgumentParser(prog="python -m release.images", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="write the text there instead of printing it")
    out = parser.parse_args().out
    known = tomllib.loads((ROOT / "release/images.toml").read_text())
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    differences, sources = {}, {}
    for name, about in known.items():
        try:
            found = read([(path, fetch(path)) for path in about["lists"]])
        except (OSError, HTTPException, ValueError) as error:
            print(f"images: the list of {name} could not be read: {error}", file=sys.stderr)
            sys.exit(2)
        differences[name] = compare(about, found, needed)
        sources[name] = about["lists"]
    text = issue(differences, sources)
    if out:
        out.write_text(text)
    else:
        print(text, end="")
    sys.exit(1 if any(differences.values()) else 0)


def fetch(path: str) -> str:
    """The text of a public file. path: OWNER/REPOSITORY/HEAD/FILE on GitHub.

    Raises:
        OSError: it is not there, or did not come within 30 seconds.
        ValueError: it is larger than a list can be.
    """
    with urllib.request.urlopen(ADDRESS + path, timeout=30) as answer:
        content = answer.read(LIMIT + 1)
    if len(content) > LIMIT:
        raise ValueError(f"{path} has more than {LIMIT} bytes")
    return content.decode(errors="replace")


def read(files: list[tuple[str, str]]) -> Image:
    """An image from the (path, text) of its lists: pip-freeze, requirements, os-info, config.txt, Dockerfile.

    Raises ValueError if they name no Python or no torch: then their form has changed.
    """
    image, variables = Image(), {}
    for path, text in files:
        lines = [line.strip() for line in text.splitlines() if len(line) <= LINE]
        kind = path.rpartition("/")[2]
        for line in lines:
            if kind.startswith(("os-info", "config")) and (python := PYTHON.match(line)):
                image.python = image.python or python["version"]
            if kind.startswith("config") and (variable := VARIABLE.fullmatch(line)):
                variables[variable["name"]] = variable["value"]
            if kind.startswith("Dockerfile") and not line.startswith("#"):
                image.packages |= {normal(pin["name"]): public(pin["version"]) for pin in PIN.finditer(line)}
            if kind.startswith(("pip-freeze", "requirements")) and not line.startswith("#"):
                for name, value in variables.items():
                    line = line.replace(f"${{{name}}}", value)
                # The last `name` of a line with an address is the wheel's; one of git has no version.
                if found := WHEEL.search(line) or PIN.match(line):
                    image.packages[normal(found["name"])] = public(found["version"])
                elif "://" not in line.partition(" ")[0] and (found := BARE.fullmatch(line)):
                    image.packages.setdefault(normal(found["name"]), "")
    if not image.python or "torch" not in image.packages:
        names = ", ".join(path for path, _ in files)
        raise ValueError(f"{names}: no Python or no torch is named there: these files have another form now")
    return image


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def public(version: str) -> str:
    """A version without its local part: 2.11.0 of 2.11.0+cu128."""
    return version.partition("+")[0]


def compare(known: dict, found: Image, needed: list[str]) -> list[tuple[str, str]]:
    """(what is different, what it would break) of an image, those that break training first.

    known: the image's entry in images.toml. needed: dependencies of tpukit, as in pyproject.toml.
    """
    different = []  # (what, what of tpukit it would break or nothing, what else it would make wrong)
    if found.python != known["python"]:
        what = f"Python `{known['python']}` is now `{found.python}`"
        broken = "" if found.python in PYTHONS else f"tpukit supports {', '.join(PYTHONS)}"
        different.append((what, broken, "its twin has another Python"))
    unlisted = {normal(name) for name in known.get("unlisted", [])}
    for package in known["packages"]:
        name, _, version = package.partition("==")
        name = normal(name)
        here = found.packages.get(name)
        if here is None and name not in unlisted:
            broken = breaks_when_gone(name, needed)
            different.append((f"`{name}` is gone", broken, "its twin has a package that the image has not"))
        elif here and version and here != version:
            what = f"`{name}` `{version}` is now `{here}`"
            different.append((what, breaks(name, here, found), "its twin has another version"))
    for name in map(normal, known["lacks"]):
        if (here := found.packages.get(name)) is not None:
            what = f"`{name}`{f' `{here}`' if here else ''} is there now"
            different.append((what, "", "images.toml says that the image lacks it, and so may the pages"))
    different.sort(key=lambda one: not one[1])
    return [(what, broken or other) for what, broken, other in different]


def breaks_when_gone(name: str, needed: list[str]) -> str:
    """What a package that is no longer there would break; empty where it is nothing of tpukit."""
    if name == "torch-xla":
        return "no training on its TPU but by torch_tpu"
    if name in {normal(re.split(r"[<>=~!;\[ ]", one)[0]) for one in needed}:
        return "tpukit needs it, and notebooks install nothing there: `import tpukit` or a command fails"
    return ""


def breaks(name: str, version: str, image: Image) -> str:
    """What another version of a package would break; empty where it is not known to break anything."""
    if name == "torch-xla" and release(version) not in TORCH_XLA:
        return "tpukit calls private names of torch_xla 2.8 and 2.9 (tpukit/devices/xla_private.py)"
    xla = image.packages.get("torch-xla")
    if name in ("torch", "torch-xla") and xla and release(image.packages["torch"]) != release(xla):
        return "torch and torch_xla of two releases do not load together"
    if name == "libtpu" and release(version, 3) not in LIBTPU_RELEASES:
        return (
            "the tasks give their compiler flags to known releases alone (LIBTPU_RELEASES in tpukit/devices)"
        )
    if name in ("jax", "jaxlib", "libtpu") and xla:
        return "CDEIT's attention kernels are written by this jax and read by this libtpu: `make twins` tells"
    return ""


def issue(differences: dict[str, list[tuple[str, str]]], sources: dict[str, list[str]]) -> str:
    """The text of an issue. Its words are ours; versions and names of the lists stand in code marks."""
    lines = [
        "The images of Colab and Kaggle by their public lists, beside `release/images.toml`.",
        "",
    ]
    for name, found in differences.items():
        lines += [f"## {name}", ""]
        if found:
            lines += ["| what changed | what it would break |", "|---|---|"]
            lines += [f"| {what} | {broken} |" for what, broken in found]
        else:
            lines += ["Nothing new."]
        lines += ["", "Read: " + ", ".join(f"`{path}`" for path in sources[name]), ""]
    lines += [
        "A list can be ahead of what users get by a day or two. What it leaves open, as Kaggle's"
        " does for jax, is not compared.",
        "",
        "What to do: correct `release/images.toml`, run `make twins`, then correct the pages.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
