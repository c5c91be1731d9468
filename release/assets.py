"""`make release TAG=v0.1.0`: what a release on GitHub gets, in outputs/release/.

The wheel and the sdist (`make wheel`), the built notebooks (`make notebooks`), the same executed on a CPU
(`make executed`), SHA256SUMS, and beside them notes.md: the section of CHANGELOG.md. `--check` only
compares the versions."""

import argparse
import datetime
import hashlib
import re
import shutil
import sys
import zipfile
from pathlib import Path

import tpukit

ROOT = Path(__file__).parent.parent
NOTES = "notes.md"  # the only file of the folder that is not uploaded
SECTION = re.compile(r"^## \[(?P<version>[^\]]+)\](?: - (?P<date>\S+))?[ \t]*$", re.MULTILINE)


def main():
    parser = argparse.ArgumentParser(prog="python -m release.assets", description=__doc__.partition("\n")[0])
    parser.add_argument("tag", help="v and the version: v0.1.0")
    parser.add_argument("--check", action="store_true", help="compare the versions, write nothing")
    given = parser.parse_args()
    try:
        notes = check(given.tag, ROOT)
        if not given.check:
            collect(ROOT, ROOT / "outputs/release", notes)
    except ValueError as error:
        sys.exit(f"make release: {error}")


def check(tag: str, root: Path) -> str:
    """The changelog's section of the release that `tag` names.

    Raises:
        ValueError: the tag, `tpukit.__version__`, CITATION.cff and the newest section of CHANGELOG.md do not
            all name one version and one date.
    """
    version, date, notes = newest_section((root / "CHANGELOG.md").read_text())
    cited = cited_as((root / "CITATION.cff").read_text())
    found = {
        "the tag": tag,
        "tpukit/__init__.py": f"v{tpukit.__version__}",
        "CITATION.cff": f"v{cited['version']}",
        "CHANGELOG.md": f"v{version}",
    }
    if len(set(found.values())) > 1:
        listed = ", ".join(f"{place} says {value}" for place, value in found.items())
        raise ValueError(f"a release has one version, but {listed}. Correct them, then tag again")
    if date != cited["date-released"]:
        raise ValueError(
            f"CHANGELOG.md dates {version} {date}, CITATION.cff {cited['date-released']}: write the same day"
        )
    return notes


def newest_section(changelog: str) -> tuple[str, str, str]:
    """(version, date, text) of the newest release in a changelog, which stands below "Unreleased"."""
    headings = list(SECTION.finditer(changelog))
    for heading, following in zip(headings, [*headings[1:], None], strict=True):
        if heading["version"].lower() == "unreleased":
            continue
        text = changelog[heading.end() : following.start() if following else None]
        text = re.split(r"^\[[^\]]+\]: ", text, maxsplit=1, flags=re.MULTILINE)[0].strip()
        try:
            datetime.date.fromisoformat(heading["date"] or "")
        except ValueError:
            raise ValueError(
                f"CHANGELOG.md: the heading of {heading['version']} needs its day, like"
                f" `## [{heading['version']}] - 2026-11-26`"
            ) from None
        if not text:
            raise ValueError(f"CHANGELOG.md: the section of {heading['version']} is empty")
        return heading["version"], heading["date"], text
    raise ValueError("CHANGELOG.md has no section of a release, like `## [0.1.0] - 2026-11-26`")


def cited_as(citation: str) -> dict[str, str]:
    """version and date-released of CITATION.cff; a field that is not there is empty."""
    fields = {}
    for name in ("version", "date-released"):
        found = re.search(rf"^{name}: *['\"]?([^'\"\s]+)", citation, re.MULTILINE)
        fields[name] = found[1] if found else ""
    return fields


def collect(root: Path, out: Path, notes: str) -> list[Path]:
    """Write the new folder `out`. Returns its files, but notes.md.

    Raises ValueError if something has not been built.
    """
    parts = {
        "make wheel": sorted((root / "outputs/package").glob("tpukit-*")),
        "make notebooks": sorted((root / "dist").glob("*.ipynb"))
        + sorted((root / "dist/zh-CN").glob("*.ipynb")),
        "make executed": sorted((root / "dist/executed").rglob("*.ipynb")),
    }
    for command, files in parts.items():
        if not files:
            raise ValueError(f"what `{command}` writes is not there: run it first")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for path in parts["make wheel"]:
        shutil.copy(path, out)
    pack(out / "notebooks.zip", parts["make notebooks"], root / "dist")
    pack(out / "notebooks-executed-on-cpu.zip", parts["make executed"], root / "dist/executed")
    files = sorted(out.iterdir())
    sums = "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files)
    (out / "SHA256SUMS").write_text(sums)
    (out / NOTES).write_text(notes + "\n")
    print(f"{out}:", *(path.name for path in files), "SHA256SUMS", NOTES)
    return [*files, out / "SHA256SUMS"]


def pack(archive: Path, files: list[Path], top: Path) -> None:
    """Write a zip archive of files, named from the folder `top`. Equal files give equal bytes."""
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        for path in files:
            entry = zipfile.ZipInfo(path.relative_to(top).as_posix())
            entry.external_attr = 0o644 << 16
            packed.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)


if __name__ == "__main__":
    main()
