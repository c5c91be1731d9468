"""The library in a notebook's cell: an archive (tar, xz, base85), and the lines that check and unpack it, for
the notebooks of dist/.

A notebook carries tpukit/, the part of the desk that any session may need, and of the other tasks and tools
those that its code uses."""

import ast
import base64
import hashlib
import io
import lzma
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tpukit
from tpukit import leaves
from tpukit.inference.trained import DEMO_FOLDER

ROOT = Path(__file__).parent.parent

TAG = "tpukit-archive"  # of the cell
LINE = 120  # columns of the archive's text
KINDS = (".py", ".csv", ".json", ".toml", ".txt")
GUESTS = ("tpukit_tasks", "tpukit_tools")
# What every notebook carries of tpukit_tools: checks, the command line, and what these start
DESK = ("cli", "doctor", "subprocess_call", "trace", "export")

# The source of the cell. It runs before tpukit can be imported: nothing but the standard library.
CELL = '''\
# @title The library, packed into this notebook
import base64, hashlib, io, os, sys, tarfile, tempfile
from pathlib import Path

SHA256 = "{sha256}"
ARCHIVE = """
{text}
"""
packed = base64.b85decode("".join(ARCHIVE.split()))
if hashlib.sha256(packed).hexdigest() != SHA256:
    raise RuntimeError("the copy of tpukit in this notebook is damaged: download the notebook again")
with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
    FILES = {{member.name: tar.extractfile(member).read() for member in tar}}

def holds_all(folder):  # these files, and no other that Python could import
    found = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {{path.relative_to(folder).as_posix(): path.read_bytes() for path in found}} == FILES

try:
    home = Path.home()
    cache = home / ".cache/tpukit"
    cache.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(dir=cache))  # readable by this user alone
    EMBEDDED = new.with_name(SHA256)
    if len({{path.stat().st_uid for path in (home, cache.parent, cache, new)}}) > 1:
        new.rmdir()
        raise OSError("a part of the path is another user's")
except (OSError, RuntimeError):  # no home, or none that this user alone can write: the copy may be another's
    EMBEDDED = new = Path(tempfile.mkdtemp(prefix="tpukit-"))
if new != EMBEDDED and holds_all(EMBEDDED) and EMBEDDED.stat().st_uid == new.stat().st_uid:
    new.rmdir()
else:
    for name, content in FILES.items():
        (new / name).parent.mkdir(parents=True, exist_ok=True)
        (new / name).write_bytes(content)
    try:
        new.rename(EMBEDDED)
    except OSError:  # a folder of that name with other files is not ours to replace
        EMBEDDED = new

here = Path.cwd()
near = [path / "tpukit" for path in (here, *here.parents[:3], here / "tpukit")]
layers = [name for name in FILES if name.endswith("/__init__.py") and name.count("/") < 3]
layers = [name for name in layers if name.startswith("tpukit")]
packages = {{name.partition("/")[0] for name in layers}}
clones = [  # around the notebook: whole, and not another user's
    path.parent for path in near
    if all((path.parent / name).exists() for name in layers)
    and {{(path.parent / name).stat().st_uid for name in packages}} == {{here.stat().st_uid}}
]
TPUKIT = str([*clones, EMBEDDED][0])
sys.path.insert(0, TPUKIT)  # for this kernel, then for the cores and shells that it starts
paths = [TPUKIT, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
'''


def guests_of(code: str) -> set[str]:
    """Return the guests that a notebook's code uses, and those that these use: modules such as
    "tpukit_tasks.mshnet".

    code: of all cells; lines of a shell (!, %) are no Python. Of a guest it finds imports anywhere in a file,
    public names (`tpukit.MSHNet`), and the tasks whose dataset is found by name."""
    guests, texts = (
        set(),
        ["\n".join(line for line in code.splitlines() if line.lstrip()[:1] not in ("!", "%"))],
    )
    while texts:
        for module in sorted(_used(texts.pop()) - guests):
            guests.add(module)
            texts += [path.read_text() for path in _files(module) if path.suffix == ".py"]
    return guests


def _used(code):
    """Return the guests that a file or a notebook uses itself."""
    names = set()
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.ImportFrom(module=str(module), names=imported):
                names |= {f"{module}.{one.name}" for one in imported}
            case ast.Import(names=imported):
                names |= {one.name for one in imported}
            case ast.Attribute(value=ast.Name(id="tpukit"), attr=name):
                names.add(tpukit._HOMES.get(name, ""))
            case ast.Call(func=ast.Attribute(attr="find_dataset"), args=[ast.Constant(value=dataset), *_]):
                names |= {
                    f"tpukit_tasks.{name}" for name, one in leaves.tasks().items() if one.dataset == dataset
                }
    modules = {".".join(name.split(".")[:2]) for name in names if name.startswith(GUESTS)}
    return {module for module in modules if _files(module)}


def _files(module):
    """Return the files of a guest, such as "tpukit_tasks.mshnet" or "tpukit_tasks.mnist"."""
    path = ROOT / module.replace(".", "/")
    return [*path.rglob("*")] if path.is_dir() else [*path.parent.glob(f"{path.name}.py")]


def library(
    guests: Iterable[str] = (), others: Mapping[str, bytes] | None = None, demo: bool = False
) -> bytes:
    """Return tpukit/, its licence and guests as the bytes of a tar.xz archive. Equal files give equal bytes.

    guests: as `guests_of` gives them. others: more files, name -> content. demo: with the small MSHNet and
    its images."""
    modules = {*guests, *(f"tpukit_tools.{name}" for name in DESK)}
    paths = [*(ROOT / "tpukit").rglob("*"), *(ROOT / name / "__init__.py" for name in GUESTS)]
    paths += [path for module in modules for path in _files(module)]
    paths = [path for path in paths if path.suffix in KINDS]
    if demo:
        paths += [path for path in DEMO_FOLDER.rglob("*") if path.is_file()]
    files = {path.relative_to(ROOT).as_posix(): path.read_bytes() for path in paths}
    files["tpukit/LICENSE"] = (ROOT / "LICENSE").read_bytes()
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in sorted({**files, **(others or {})}.items()):
            member = tarfile.TarInfo(name)  # neither time nor owner
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return lzma.compress(raw.getvalue(), preset=9 | lzma.PRESET_EXTREME)


def cell(archive: bytes) -> dict[str, Any]:
    """Return the code cell, as JSON has it in a notebook, that makes `import tpukit` find the library of an
    archive."""
    text = base64.b85encode(archive).decode()
    lines = "\n".join(text[start : start + LINE] for start in range(0, len(text), LINE))
    source = CELL.format(sha256=hashlib.sha256(archive).hexdigest(), text=lines).rstrip()
    # Colab, Kaggle, JupyterLab
    hidden = {"cellView": "form", "_kg_hide-input": True, "jupyter": {"source_hidden": True}}
    metadata = dict(hidden, tags=[TAG])
    parts = dict(cell_type="code", execution_count=None, id=TAG, outputs=[])
    return dict(parts, metadata=metadata, source=source)
