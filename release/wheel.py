"""`make wheel`: builds the wheel and the sdist, in outputs/package/, and tries the wheel in clean
environments.

Both are built of the last commit, so that nothing untracked gets in. The first environment holds torch and
the wheel, and nothing else of this machine; each extra then gets one of its own above it. In each the wheel
trains MNIST for an epoch, on synthetic digits without network, answers every `--help`, and uses what the
extra is for. Needs git, the package index and a few gigabytes, which are removed again. `python -m
release.wheel export eit` tries these extras alone."""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
OUT = ROOT / "outputs/package"
PACKED = ("pyproject.toml", "README.md", "LICENSE", "tpukit")  # what setuptools is given
EXTRAS = tuple(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
# Beside the package: what setuptools writes.
WRITTEN = ("PKG-INFO", "setup.cfg", "tpukit.egg-info/")
HELPS = """
from tpukit import cli, leaves
from tpukit.cli.commands import COMMANDS
for words in [[], *([name] for name in COMMANDS), *(["train", task] for task in leaves.tasks())]:
    assert cli.main([*words, "--help"]) == 0, words
"""
# What is tried in every environment, in an empty folder, after `--help`; then, with an extra, what it is for.
TRAIN = "-m tpukit train mnist --epochs 1 --run run"
USES = {
    "plan": "-c 'import torch_xla'",
    "images": "-c 'import pyarrow, timm, torchvision'",
    "eit": "-m tpukit simulate eit --out tank --samples 2 --test-samples 1 --workers 1",
    "remote": "-c 'import fsspec, gcsfs, huggingface_hub, s3fs'",
    "export": "-m tpukit export run --to onnx",
    "send": "-m kaggle --version",
    "text": "-c 'import peft, transformers'",
}
NOWHERE = "http://127.0.0.1:9"  # as a proxy: no package reaches the network
OFFLINE = dict(TPUKIT_OFFLINE="1", http_proxy=NOWHERE, https_proxy=NOWHERE)


def main():
    parser = argparse.ArgumentParser(prog="python -m release.wheel", description=__doc__.partition("\n")[0])
    parser.add_argument("extras", nargs="*", help=f"of {', '.join(EXTRAS)} (default: all of these)")
    parser.add_argument("--torch", default=" ".join(pins()), help="packages for pip (default: %(default)s)")
    given = parser.parse_args()
    if unknown := {*given.extras} - {*EXTRAS}:
        parser.error(f"no extra is called {', '.join(sorted(unknown))}; there are {', '.join(EXTRAS)}")
    try:
        wheel = build(OUT)
        OUT.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=OUT.parent) as folder:
            try_out(wheel, given.torch.split(), given.extras or list(EXTRAS), Path(folder))
    except ValueError as error:
        sys.exit(f"make wheel: {error}")
    except subprocess.CalledProcessError as error:
        command = shlex.join(map(str, error.cmd))
        output = f"{error.stdout}{error.stderr}"[-4000:]
        sys.exit(f"make wheel: this failed, with exit code {error.returncode}: {command}\n{output}")


def pins() -> list[str]:
    """The releases of torch and torchvision that the tests run with."""
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    return [line for line in lines if line.startswith(("torch==", "torchvision=="))]


def build(out: Path) -> Path:
    """Build the last commit into the folder `out`, which is emptied before. Returns the wheel.

    Raises ValueError if the packages do not hold what they should, or this is no git checkout.
    """
    listed = subprocess.run(["git", "ls-files", "-z", "tpukit"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        raise ValueError(f"{ROOT} is not a git checkout: clone the repository with git")
    shutil.rmtree(out, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder, "commit.zip")
        run(["git", "archive", "-o", archive, "HEAD", *PACKED], cwd=ROOT)
        with zipfile.ZipFile(archive) as commit:
            commit.extractall(Path(folder, "commit"))
        run([sys.executable, "-m", "build", "--outdir", out, Path(folder, "commit")])
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    check_names(wheel, sdist, set(listed.stdout.split("\0")[:-1]))
    print(f"{wheel.name} and {sdist.name}: {out}", flush=True)
    return wheel


def check_names(wheel: Path, sdist: Path, tracked: set[str]) -> None:
    """Raise ValueError unless both packages hold every tracked file of tpukit/, and nothing else."""
    with zipfile.ZipFile(wheel) as packed:
        ours = {name for name in packed.namelist() if ".dist-info/" not in name}
    with tarfile.open(sdist) as packed:
        names = {entry.name.partition("/")[2] for entry in packed if entry.isfile()}
    theirs = {name for name in names if not name.startswith(WRITTEN)} - {*PACKED}
    for package, held in ((wheel, ours), (sdist, theirs)):
        if missing := sorted(tracked - held):
            raise ValueError(
                f"{package.name} lacks {', '.join(missing)}: name them in pyproject.toml, package-data"
            )
        if surplus := sorted(held - tracked):
            raise ValueError(
                f"{package.name} holds {', '.join(surplus)}, which git does not track in tpukit/"
            )


def try_out(wheel: Path, torch: list[str], extras: list[str], folder: Path) -> None:
    """Use the wheel with torch alone, then with each extra."""
    (folder / "torch.txt").write_text("".join(f"{pin}\n" for pin in torch))
    base = environment(folder / "base", [torch[0], str(wheel)], folder / "torch.txt")
    use(base, folder / "none", [TRAIN])
    print("the wheel and torch alone: ok", flush=True)
    for extra in extras:
        wanted = [f"tpukit[{extra}] @ {wheel.as_uri()}"]
        python = environment(folder / extra, wanted, folder / "torch.txt", above=base)
        use(python, folder / f"of-{extra}", [TRAIN, *([USES[extra]] if extra in USES else [])])
        print(f"tpukit[{extra}]: ok", flush=True)
        shutil.rmtree(folder / extra)


def environment(folder: Path, wanted: list[str], constraints: Path, above: Path | None = None) -> Path:
    """Make a virtual environment with the packages that are wanted. Returns its python.

    above: python of an environment whose packages it sees too, so that torch lies on the disk once.
    """
    # One above another gets no pip of its own: pip brings a setuptools that would hide the one below.
    run([sys.executable, "-m", "venv", *(["--without-pip"] if above else []), folder])
    python = folder / "bin/python"
    if above:
        where = "import sysconfig; print(sysconfig.get_path('purelib'))"
        here, there = (run([one, "-c", where]).strip() for one in (python, above))
        Path(here, "above.pth").write_text(there + "\n")
    pip = [above or python, "-m", "pip", "--python", python]
    run([*pip, "install", "--no-cache-dir", "-c", constraints, *wanted])
    run([*pip, "check"])
    return python


def use(python: Path, folder: Path, commands: list[str]) -> None:
    """Run commands of this python in the new folder, without network or other packages of this machine."""
    folder.mkdir()
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environ = inherited | OFFLINE | {"HOME": str(folder)}
    for command in (f"-c {shlex.quote(HELPS)}", *commands):
        run([python, *shlex.split(command)], cwd=folder, env=environ)


def run(command: Sequence[object], **settings: Any) -> str:
    """Run a command. Returns its output; raises CalledProcessError, with the output, if it fails."""
    words = [str(word) for word in command]
    return subprocess.run(words, check=True, capture_output=True, text=True, **settings).stdout


if __name__ == "__main__":
    main()
