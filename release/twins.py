"""`make twins`: runs every built notebook in environments like those of Colab and Kaggle, in an empty folder,
without network.

A twin is a virtual environment in .twins/ with the Python, the torch and the packages of an image
(images.toml), and the image's variables and folder. It has no accelerator: the notebooks run on the CPU, with
small settings, and of CDEIT's kernels it is seen only that the image's jax lowers them. This machine's own
folders stay as they are: /content exists for the run alone, in a namespace. The table of results goes into
docs/STATUS.md and its Chinese page. Needs Linux with unshare, about 18 GB, and an hour. `python -m
release.twins kaggle-tpu mnist` runs what has these words in its name, and changes no page."""

import argparse
import datetime
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import nbformat

from release import notebooks

ROOT = notebooks.ROOT
TWINS = ROOT / ".twins"
IMAGES = tomllib.loads((ROOT / "release/images.toml").read_text())  # name -> what is copied of it
SETTINGS = dict(
    ACCELERATOR="cpu", EPOCHS=2, WARM_EPOCH=1, IMAGE_SIZE=32, BATCH_SIZE=4, CORES=2, SAMPLES=8, STEPS=2
)
SETTINGS_OF = {
    "mnist_quickstart": dict(BATCH_SIZE=64),
    "gpu_to_tpu_migration": dict(BATCH_SIZE=32),
    "hardware_check": dict(REHEARSE=True, ONLY="precision"),
}
KERNELS = ROOT / "tpukit/tasks/cdeit/tpu/kernels.py"
# notebook -> the package that not every image has
NEEDS_INTERNET = {"finetune_llm": "peft"}
CELL_LIMIT_S = 600
VERSIONS = ("torch", "torch-xla", "jax", "libtpu")  # that the table names
# XLA optimises less, as in the Makefile: a step compiles in a third of the time.
ON_CPU = {
    "PJRT_DEVICE": "CPU",
    "XLA_FLAGS": "--xla_llvm_disable_expensive_passes=true --xla_backend_optimization_level=0",
}
# A root folder with this machine's folders and the image's; of the network, the loopback, which a kernel
# needs.
SANDBOX = """\
set -e
root=$1 folder=$2 work=$3; shift 3
ip link set lo up
mount -t tmpfs none "$root"
for path in /*; do
    if [ -L "$path" ]; then cp -a "$path" "$root/"
    elif [ -d "$path" ]; then mkdir "$root$path"; mount --rbind "$path" "$root$path"; fi
done
mkdir -p "$root$folder"
mount --bind "$work" "$root$folder"
chroot=$(PATH="$PATH:/usr/sbin:/sbin" command -v chroot)  # no user but root has it on the path in Debian
exec "$chroot" "$root" env -C "$folder" "$@"
"""
TRANSLATED = "zh-CN/"
BEGIN, END = "<!-- make twins -->", "<!-- end of make twins -->"
PAGES = {  # page -> its sentences; a result's state names its sentence
    "docs/STATUS.md": dict(
        when="`make twins`, {date}, tree {tree}; small settings: seconds compare notebooks, not machines.",
        translated="The {count} Chinese notebooks, whose code is the same, ended in the same way.",
        notebook="notebook",
        ok="ok, {seconds} s",
        other="ok, {seconds} s, but with tpukit from {copy}",
        internet="asks for the internet in cell {cell}: the image has no {package}",
        failed="**failed** in cell {cell}: `{error}`",
        refused="**refused** by the image's jax: `{error}`",
    ),
    "docs/STATUS.zh-CN.md": dict(
        when="`make twins`，{date}，代码树 {tree}；用的是缩小的设置，所以秒数只能比较笔记本，不能比较机器。",
        translated="{count} 个中文笔记本的代码相同，结果也相同。",
        notebook="笔记本",
        ok="通过，{seconds} 秒",
        other="通过，{seconds} 秒，但 tpukit 来自 {copy}",
        internet="在第 {cell} 个单元格要求联网：镜像中没有 {package}",
        failed="在第 {cell} 个单元格**失败**：`{error}`",
        refused="镜像的 jax **拒绝**：`{error}`",
    ),
}


def main():
    parser = argparse.ArgumentParser(prog="python -m release.twins", description=__doc__.partition("\n")[0])
    parser.add_argument("only", nargs="*", help="parts of names of notebooks and images")
    only = parser.parse_args().only
    if not shutil.which("unshare"):
        sys.exit("make twins: needs Linux with unshare (util-linux), which runs notebooks without network")
    dist = ROOT / "dist"
    books = {path.relative_to(dist).with_suffix("").as_posix(): path for path in notebooks.build(dist)}
    heads, results = {}, {}
    for image in chosen(IMAGES, only):
        try:
            heads[image] = make(image)
        except LookupError as error:
            heads[image] = str(error)
            print(f"{image}: {error}", flush=True)
            continue
        if "torch-xla" not in IMAGES[image]["lacks"]:
            results[KERNELS.stem, image] = lower_kernels(image)
            print(f"{image}: {KERNELS.stem}: {results[KERNELS.stem, image]}", flush=True)
        for name in chosen(books, only):
            results[name, image] = run(books[name], name, image)
            print(f"{image}: {name}: {results[name, image]}", flush=True)
    for page, words in PAGES.items():
        section = table(heads, results, words, datetime.date.today())
        if only:
            print(section)
        else:
            text = (ROOT / page).read_text()
            (ROOT / page).write_text(
                text[: text.index(BEGIN)] + f"{BEGIN}\n{section}\n" + text[text.index(END) :]
            )
    sys.exit(any(result["state"] in ("failed", "other", "refused") for result in results.values()))


def tree():
    """Twelve digits of a checksum of the library and the notebooks: of which tree a table of results is."""
    digest = hashlib.sha256()
    for folder in ("tpukit", "notebooks"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(f"{path.relative_to(ROOT).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def chosen(names, only):
    """The names with one of these parts, or all if there are none."""
    return [name for name in names if any(part in slug(name) for part in only)] or list(names)


# Environments


def make(image):
    """Make the virtual environment of an image, unless it is there. Returns its versions.

    Raises LookupError: there is no such Python, or a package is there that the image lacks.
    """
    wanted, folder = IMAGES[image], TWINS / slug(image)
    made_of, done = json.dumps([wanted["python"], wanted["packages"]]), folder / "made_of.json"
    if not done.exists() or done.read_text() != made_of:
        python = interpreter(wanted["python"], os.environ)
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([python, "-m", "venv", folder], check=True)
        # environments share the files of packages
        uv = ["uv", "pip", "install", "--python", folder / "bin/python"]
        pip = [folder / "bin/pip", "install", "--no-cache-dir"]
        subprocess.run([*(uv if shutil.which("uv") else pip), "--quiet", *wanted["packages"]], check=True)
        kernel = folder / "share/jupyter/kernels/twin/kernel.json"
        kernel.parent.mkdir(parents=True)
        command = [str(folder / "bin/python"), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        kernel.write_text(json.dumps(dict(argv=command, display_name=image, language="python")))
        done.write_text(made_of)
    site = [str(path) for path in folder.glob("lib/python*/site-packages")]
    versions = {
        one.name.lower().replace("_", "-"): one.version for one in importlib.metadata.distributions(path=site)
    }
    surplus = [package for package in wanted["lacks"] if package in versions]
    if surplus:
        raise LookupError(
            f"its twin has {', '.join(surplus)}, which the image lacks: correct release/images.toml"
        )
    python = subprocess.run(
        [folder / "bin/python", "--version"], capture_output=True, text=True, check=True
    ).stdout.strip()
    return ", ".join([python, *(f"{name} {versions[name]}" for name in VERSIONS if name in versions)])


def slug(name):
    return name.lower().replace(" ", "-")


def interpreter(version, environ):
    """A Python of this version: pyenv's, one on PATH, or uv's. Raises LookupError if there is none."""
    pyenv = Path(environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    found = [
        *sorted(pyenv.glob(f"versions/{version}.*/bin/python")),
        shutil.which(f"python{version}", path=environ["PATH"]),
    ]
    if uv := shutil.which("uv", path=environ["PATH"]):
        command = [uv, "python", "find", "--no-python-downloads", version]
        found.append(subprocess.run(command, env=environ, capture_output=True, text=True).stdout.strip())
    for path in filter(None, found):
        ran = subprocess.run([path, "--version"], env=environ, capture_output=True, text=True)
        if ran.stdout.startswith(f"Python {version}."):  # pyenv's names on PATH may lead nowhere
            return path
    raise LookupError(f"no Python {version} here: pyenv install {version}, or uv python install {version}")


def lower_kernels(image):
    """Let an image's jax lower CDEIT's kernels, which no notebook does on the CPU. Returns a dict of state
    (ok, refused) and what its sentence names."""
    environ, start = {**os.environ, "JAX_PLATFORMS": "cpu"}, time.monotonic()
    for tokens, biased in ((4096, False), (256, True)):
        request = json.dumps(dict(shape=[1, tokens, 384], heads=4, biased=biased))
        command = [TWINS / slug(image) / "bin/python", "-P", "-s", KERNELS, request]
        ran = subprocess.run(command, env=environ, capture_output=True, text=True)
        if ran.returncode:
            said = ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"]
            return dict(state="refused", error=said[-1])
    return dict(state="ok", seconds=round(time.monotonic() - start))


# Notebooks


def run(path, name, image):
    """Run one notebook in a twin. Returns what `result` does."""
    twin, folder = TWINS / slug(image), TWINS / "runs" / slug(image) / name
    shutil.rmtree(folder, ignore_errors=True)
    for part in ("work", "home", "root"):
        (folder / part).mkdir(parents=True)
    out = folder / "executed.ipynb"
    command = ["unshare", "--net", "--mount", *(["--map-root-user"] if os.getuid() else [])]
    command += ["bash", "-c", SANDBOX, "bash", folder / "root", IMAGES[image]["folder"], folder / "work"]
    command += [
        sys.executable,
        "-m",
        "papermill",
        path,
        out,
        "-k",
        "twin",
        "--no-progress-bar",
        "--log-level",
        "ERROR",
    ]
    command += ["--execution-timeout", str(CELL_LIMIT_S)]
    for setting, value in settings(nbformat.read(path, 4), name).items():
        command += ["-p", setting, str(value)]
    environ = dict(HOME=str(folder / "home"), LANG="C.UTF-8", JUPYTER_PATH=str(twin / "share/jupyter"))
    environ |= dict(PATH=f"{twin / 'bin'}:{os.environ['PATH']}") | IMAGES[image]["environ"]
    environ |= ON_CPU if "torch-xla" not in IMAGES[image]["lacks"] else {}
    start = time.monotonic()
    ran = subprocess.run(command, env=environ, capture_output=True, text=True)
    seconds = round(time.monotonic() - start)
    if not out.exists():
        return dict(state="failed", cell=0, error=(ran.stderr.strip().splitlines() or ["no output"])[-1])
    return result(nbformat.read(out, 4), name, seconds, folder / "home")


def settings(notebook, name):
    """Of the small settings, those that the notebook has."""
    [cell] = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    wanted = SETTINGS | SETTINGS_OF.get(Path(name).name, {})
    return {
        setting: value for setting, value in wanted.items() if re.search(rf"^{setting} = ", cell.source, re.M)
    }


def result(notebook, name, seconds, home):
    """dict of state (ok, other, internet, failed) and what its sentence names, of an executed notebook."""
    added = {"injected-parameters", "papermill-error-cell-tag"}  # by papermill: no cells of the notebook
    cells = [cell for cell in notebook.cells if not added & set(cell.metadata.get("tags", []))]
    package, copy = NEEDS_INTERNET.get(Path(name).name), "nowhere"
    for number, cell in enumerate(cells, 1):
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                offline = package and package in output.evalue and "internet" in output.evalue
                error = f"{output.ename}: {output.evalue}".strip().splitlines()[-1]
                return dict(
                    state="internet" if offline else "failed", cell=number, error=error, package=package
                )
            if found := re.search(r"^tpukit \S+ from (.+)$", output.get("text", ""), re.M):
                copy = found[1]
    embedded = Path(copy).is_relative_to(home / ".cache/tpukit")
    return dict(state="ok" if embedded else "other", seconds=seconds, copy=copy)


def table(heads, results, words, date):
    """The section of a page: when, and a table of notebooks and images. heads: image -> versions, or why it
    has no twin."""
    lines = [
        words["when"].format(date=date, tree=tree()),
        "",
        f"| {words['notebook']} | {' | '.join(heads)} |",
    ]
    lines += ["|---" * (len(heads) + 1) + "|", f"| | {' | '.join(heads.values())} |"]
    names = list(dict.fromkeys(name for name, _ in results))
    translated = [name for name in names if name.startswith(TRANSLATED)]
    ended = {key: result["state"] for key, result in results.items()}

    def ended_as_in_english(name):
        return all(
            ended.get((name, image)) == ended.get((name.removeprefix(TRANSLATED), image)) for image in heads
        )

    if translated and all(map(ended_as_in_english, translated)):
        names = [name for name in names if name not in translated]
        lines.insert(1, words["translated"].format(count=len(translated)))
    for name in names:
        found = [results.get((name, image)) for image in heads]
        cells = [words[one["state"]].format_map(one).replace("|", "\\|") if one else "" for one in found]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
