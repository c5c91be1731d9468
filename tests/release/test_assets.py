"""A release: one version in all places, its notes from the changelog, files with their checksums; what
an installation asks for."""

import contextlib
import hashlib
import io
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

import tpukit
from release import assets, wheel
from tests.conftest import ROOT

CHANGELOG = """\
# Changelog

## [Unreleased]

- later

## [{version}] - 2026-11-26

### Added

- a thing

## [0.0.1] - 2026-01-01

- old

[Unreleased]: https://example.org/a
"""
CITATION = "cff-version: 1.2.0\nversion: {version}\ndate-released: {date}\n"
VERSION = tpukit.__version__


def tree(folder, version=VERSION, date="2026-11-26", changelog=CHANGELOG, cited=VERSION):
    (folder / "CHANGELOG.md").write_text(changelog.format(version=version))
    (folder / "CITATION.cff").write_text(CITATION.format(version=cited, date=date))
    return folder


def test_this_tree_has_one_version_and_a_section_of_it():
    assert assets.check(f"v{VERSION}", ROOT)
    assert re.fullmatch(r"\d+\.\d+\.\d+", VERSION)


def test_the_notes_are_the_newest_released_section_alone(tmp_path):
    assert assets.check(f"v{VERSION}", tree(tmp_path)) == "### Added\n\n- a thing"


@pytest.mark.parametrize(
    "tag, about, named",
    [
        ("v9.9.9", {}, "the tag says v9.9.9"),
        (VERSION, {}, "the tag says"),
        (f"v{VERSION}", {"version": "9.9.9"}, "CHANGELOG.md says v9.9.9"),
        (f"v{VERSION}", {"cited": "9.9.9"}, "CITATION.cff says v9.9.9"),
        (f"v{VERSION}", {"date": "2026-11-25"}, "2026-11-25"),
        (f"v{VERSION}", {"changelog": "## [Unreleased]\n"}, "no section"),
        (f"v{VERSION}", {"changelog": "## [{version}]\n\n- a thing\n"}, "needs its day"),
        (f"v{VERSION}", {"changelog": "## [{version}] - tomorrow\n\n- a thing\n"}, "needs its day"),
        (f"v{VERSION}", {"changelog": "## [{version}] - 2026-11-26\n\n## [0.0.1] - 2026\n"}, "is empty"),
    ],
)
def test_a_release_whose_versions_or_days_differ_is_refused(tag, about, named, tmp_path):
    with pytest.raises(ValueError, match=re.escape(named)):
        assets.check(tag, tree(tmp_path, **about))


PARTS = ("outputs/package/tpukit-1.whl", "dist/a.ipynb", "dist/zh-CN/a.ipynb", "dist/executed/a.ipynb")


def build(folder, names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def test_a_release_holds_every_part_with_its_checksum(tmp_path):
    build(tmp_path, PARTS)
    out = tmp_path / "outputs/release"
    files = assets.collect(tmp_path, out, "notes")
    assert {path.name for path in out.iterdir()} == {path.name for path in files} | {assets.NOTES}
    for line in (out / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((out / name).read_bytes()).hexdigest() == digest
    assert len((out / "SHA256SUMS").read_text().splitlines()) == len(files) - 1
    assert zipfile.ZipFile(out / "notebooks.zip").namelist() == ["a.ipynb", "zh-CN/a.ipynb"]
    before = (out / "SHA256SUMS").read_bytes()
    assets.collect(tmp_path, out, "notes")
    assert (out / "SHA256SUMS").read_bytes() == before


@pytest.mark.parametrize("missing", ["outputs/package", "dist/executed"])
def test_a_release_of_which_a_part_was_not_built_names_the_command(missing, tmp_path):
    build(tmp_path, [name for name in PARTS if not name.startswith(missing)])
    with pytest.raises(ValueError, match="make (wheel|executed)"):
        assets.collect(tmp_path, tmp_path / "out", "notes")
    assert not (tmp_path / "out").exists()


def packages(folder, names):
    """A wheel and an sdist with these files of tpukit/, as setuptools writes them."""
    with zipfile.ZipFile(folder / "t.whl", "w") as packed:
        for name in [*names, "tpukit-1.dist-info/METADATA"]:
            packed.writestr(name, "")
    with tarfile.open(folder / "t.tar.gz", "w:gz") as packed:
        for name in [*names, "PKG-INFO", "pyproject.toml", "tpukit.egg-info/SOURCES.txt"]:
            packed.addfile(tarfile.TarInfo(f"tpukit-1/{name}"), io.BytesIO())
    return folder / "t.whl", folder / "t.tar.gz"


@pytest.mark.parametrize(
    "names, named",
    [
        (["tpukit/a.py", "tpukit/b.toml"], None),
        (["tpukit/a.py"], "lacks tpukit/b.toml"),
        (["tpukit/a.py", "tpukit/b.toml", "tests/test_a.py"], "holds tests/test_a.py"),
        (["tpukit/a.py", "tpukit/b.toml", "notebooks/a.ipynb"], "holds notebooks/a.ipynb"),
    ],
)
def test_packages_hold_what_git_tracks_of_the_library_and_nothing_else(names, named, tmp_path):
    files = packages(tmp_path, names)
    refused = pytest.raises(ValueError, match=re.escape(named)) if named else contextlib.nullcontext()
    with refused:
        wheel.check_names(*files, {"tpukit/a.py", "tpukit/b.toml"})


def test_every_extra_is_used_for_what_it_is_there():
    assert {*wheel.USES} == {*wheel.EXTRAS} - {"all"}


@pytest.mark.skipif(not shutil.which("make"), reason="no make here")
@pytest.mark.parametrize(
    "lacking, message",
    [
        ("sys.version_info = (3, 10, 13)", "3.11 to 3.13"),
        ("sys.modules['ensurepip'] = None", "apt install python3-venv"),
    ],
)
def test_make_says_what_a_python_lacks_before_it_installs_anything(lacking, message, tmp_path):
    for file in ("Makefile", "requirements.txt", "pyproject.toml"):
        shutil.copy(ROOT / file, tmp_path)
    python = tmp_path / "python"  # answers `-c PROGRAM` alone
    python.write_text(
        f'#!/bin/sh\nexec {sys.executable} -c "import sys; {lacking}; exec(sys.argv[2])" "$@"\n'
    )
    python.chmod(0o755)
    ran = subprocess.run(["make", "test", f"PYTHON={python}"], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode and message in ran.stdout and not (tmp_path / ".venv").exists()


def test_an_environment_for_conda_holds_what_requirements_hold_and_the_pythons_that_are_supported():
    text = (ROOT / "environment.yml").read_text()
    assert re.search(r"- pip:\n\s+- -r requirements\.txt\n", text)
    supported = re.search(r'requires-python = "([^"]+)"', (ROOT / "pyproject.toml").read_text())[1]
    assert f"python{supported.replace(' ', '')}" in text.replace(" ", "")
