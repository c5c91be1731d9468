"""`make twins`: runs every built notebook in environments like those of Colab and Kaggle, in an empty folder,
without network.

A twin is a virtual environment in .twins/ with the Python, the torch and the packages of an image
(images.toml), and the image's variables and folder. It has no accelerator: the notebooks run on the CPU, with
small settings, and CDEIT's kernels are only lowered by the image's jax. /content exists for the run alone, in
a namespace. Exit code 1 where something failed. Needs Linux with unshare, about 18 GB, and up to an hour;
`python -m release.twins kaggle-tpu mnist` runs what has these words in its name."""

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

from release import executed, notebooks

ROOT = notebooks.ROOT
TWINS = ROOT / ".twins"
IMAGES = tomllib.loads((ROOT / "release/images.toml").read_text())  # name -> what is copied of it
SETTINGS = dict(
    ACCELERATOR="cpu", EPOCHS=2, WARM_EPOCH=1, IMAGE_SIZE=32, BATCH_SIZE=4, CORES=2, SAMPLES=8, STEPS=2
)
SETTINGS_OF = {
    "mnist_quickstart": dict(BATCH_SIZE=64),
    "gpu_to_tpu_migration": dict(BATCH_SIZE=32),
    "hardware_check": dict(REHEARSE=True),
}
KERNELS = ROOT / "tpukit_tasks/cdeit/tpu/kernels.py"
NEEDS_INTERNET = {"finetune_llm": "peft"}  # notebook -> the package that not every image has
# A root folder with this machine's folders and the image's; of the network, the kernel's loopback
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


def main():
    only = sys.argv[1:]
    if not shutil.which("unshare"):
        sys.exit("make twins: needs Linux with unshare (util-linux), which runs notebooks without network")
    books = {path.stem: path for path in notebooks.build(ROOT / "dist") if path.parent == ROOT / "dist"}
    ended = []
    for image in chosen(IMAGES, only):
        print(f"{image}: {make(image)}", flush=True)
        if "torch-xla" not in IMAGES[image]["lacks"]:
            ended.append(lower_kernels(image))
            print(f"{image} | {KERNELS.stem} | {ended[-1]}", flush=True)
        for name in chosen(books, only):
            ended.append(run(books[name], name, image))
            print(f"{image} | {name} | {ended[-1]}", flush=True)
    sys.exit(any(text.startswith("FAILED") for text in ended))


def chosen(names, only):
    """Return the names with one of these parts, or all if there are none."""
    return [name for name in names if any(part in slug(name) for part in only)] or list(names)


def slug(name):
    return name.lower().replace(" ", "-")


def make(image):
    """Make the virtual environment of an image, unless it is there. Returns its versions.

    Raises SystemExit: there is no such Python, or a package is there that the image lacks.
    """
    wanted, folder = IMAGES[image], TWINS / slug(image)
    made_of, done = json.dumps([wanted["python"], wanted["packages"]]), folder / "made_of.json"
    if not done.exists() or done.read_text() != made_of:
        python = interpreter(wanted["python"], os.environ)
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([python, "-m", "venv", folder], check=True)
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
    if surplus := [package for package in wanted["lacks"] if package in versions]:
        sys.exit(
            f"{image}: its twin has {', '.join(surplus)}, which the image lacks: correct release/images.toml"
        )
    named = ("torch", "torch-xla", "jax", "libtpu")
    return ", ".join(f"{name} {versions[name]}" for name in named if name in versions)


def interpreter(version, environ):
    """Return a Python of this version: pyenv's, or one on PATH. Raises SystemExit if there is none."""
    pyenv = Path(environ.get("PYENV_ROOT") or Path.home() / ".pyenv").glob(f"versions/{version}.*/bin/python")
    on_path = shutil.which(f"python{version}", path=environ["PATH"])
    for path in filter(None, [*sorted(pyenv), on_path]):
        ran = subprocess.run([path, "--version"], env=environ, capture_output=True, text=True)
        if ran.stdout.startswith(f"Python {version}."):  # pyenv's names on PATH may lead nowhere
            return path
    sys.exit(f"no Python {version} here: pyenv install {version}")


def lower_kernels(image):
    """Let an image's jax lower CDEIT's kernels, which no notebook does on the CPU. Returns how it ended."""
    environ, start = {**os.environ, "JAX_PLATFORMS": "cpu"}, time.monotonic()
    for tokens, biased in ((4096, False), (256, True)):
        request = json.dumps(dict(shape=[1, tokens, 384], heads=4, biased=biased))
        command = [TWINS / slug(image) / "bin/python", "-P", "-s", KERNELS, request]
        ran = subprocess.run(command, env=environ, capture_output=True, text=True)
        if ran.returncode:
            return f"FAILED, exit code {ran.returncode} of the image's jax: {ran.stderr.strip()[-300:]}"
    return f"ok, {time.monotonic() - start:.0f} s"


def run(path, name, image):
    """Run one notebook in a twin. Returns how it ended."""
    twin, folder = TWINS / slug(image), TWINS / "runs" / slug(image) / name
    shutil.rmtree(folder, ignore_errors=True)
    for part in ("work", "home", "root"):
        (folder / part).mkdir(parents=True)
    out = folder / "executed.ipynb"
    command = ["unshare", "--net", "--mount", *(["--map-root-user"] if os.getuid() else [])]
    command += ["bash", "-c", SANDBOX, "bash", folder / "root", IMAGES[image]["folder"], folder / "work"]
    command += [sys.executable, "-m", "papermill", path, out, "-k", "twin", "--no-progress-bar"]
    command += ["--log-level", "ERROR", "--execution-timeout", "600"]
    for setting, value in settings(nbformat.read(path, 4), name).items():
        command += ["-p", setting, str(value)]
    environ = dict(HOME=str(folder / "home"), LANG="C.UTF-8", JUPYTER_PATH=str(twin / "share/jupyter"))
    environ |= dict(PATH=f"{twin / 'bin'}:{os.environ['PATH']}") | IMAGES[image]["environ"]
    environ |= executed.XLA if "torch-xla" not in IMAGES[image]["lacks"] else {}
    start = time.monotonic()
    ran = subprocess.run(command, env=environ, capture_output=True, text=True)
    if not out.exists():
        return f"FAILED: {ran.stderr[-300:]}"
    ended = result(nbformat.read(out, 4), name, folder / "home")
    return f"{ended}, {time.monotonic() - start:.0f} s"


def settings(notebook, name):
    """Return those of the small settings that the notebook has."""
    [cell] = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    wanted = SETTINGS | SETTINGS_OF.get(name, {})
    return {
        setting: value for setting, value in wanted.items() if re.search(rf"^{setting} = ", cell.source, re.M)
    }


def result(notebook, name, home):
    """Return how an executed notebook ended: ok, by its own tpukit; FAILED; or it asked for the internet."""
    package, copy = NEEDS_INTERNET.get(name), "nowhere"
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                error = f"{output.ename}: {output.evalue}".strip().splitlines()[-1]
                if package and package in output.evalue and "internet" in output.evalue:
                    return f"asks for the internet: the image has no {package}"
                return f"FAILED in cell {cell.id}: {error}"
            if found := re.search(r"^tpukit \S+ from (.+)$", output.get("text", ""), re.M):
                copy = found[1]
    return "ok" if Path(copy).is_relative_to(home / ".cache/tpukit") else f"FAILED: tpukit came from {copy}"


if __name__ == "__main__":
    main()
