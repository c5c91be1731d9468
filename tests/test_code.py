"""What holds for the tree as a whole: layers, packages that one layer alone imports, thin notebooks, a light
core."""

import ast
import functools
import graphlib
import inspect
import io
import json
import re
import subprocess
import sys
import textwrap
import tokenize
import tomllib

import pytest

from tests.conftest import LONGEST, ROOT
from tpukit import leaves

# the lowest first; the last two are packages of their own
LAYERS = (
    *("host", "runs", "data", "devices", "launching", "training", "reporting", "inference"),
    *("tpukit_tasks", "tpukit_tools"),
)
PACKAGES = ("tpukit", "tpukit_tasks", "tpukit_tools")
MODULES = sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))


def layer(path):
    """Return the layer of a file: its folder in tpukit/, or the name of the other package."""
    package, part, *_ = path.relative_to(ROOT).parts
    return part if package == "tpukit" else package


@functools.cache
def imports(path, with_annotations=False):
    """Return what a module imports when it runs; under TYPE_CHECKING stand the imports of annotations."""
    names = []
    tree = ast.parse(path.read_text())
    for block in ast.walk(tree):
        is_of_annotations = isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        if is_of_annotations and not with_annotations:
            block.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


def dotted(path):
    """Return a module's name from its path."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def needed(path, modules):
    """Return the modules that a module imports, at any time or for annotations."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                names.add(name if name in modules else node.module)
    return names & modules - {dotted(path)}


def test_no_modules_import_each_other_not_even_for_annotations():
    modules = {dotted(path) for path in MODULES}
    imported = {dotted(path): needed(path, modules) for path in MODULES}
    imported["tpukit"] = set()  # it loads a name when it is used
    graphlib.TopologicalSorter(imported).prepare()  # raises CycleError, which names the circle


def test_every_module_is_in_the_folder_of_a_layer():
    at_the_top = {path.name for path in (ROOT / "tpukit").iterdir() if path.name != "__pycache__"}
    assert at_the_top == {*LAYERS[:-2], "__init__.py", "__main__.py", "leaves.py", "py.typed"}


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_imports_from_its_own_layer_and_the_layers_below(path):
    names = [name.split(".") for name in imports(path, with_annotations=True)]
    if path == ROOT / "tpukit/__init__.py":
        assert {name for name in imports(path) if name.startswith("tpukit")} <= {
            "tpukit.host.errors",
            "tpukit.host.errors.importing",
        }
    elif path == ROOT / "tpukit/leaves.py":  # names of tasks, none of which it imports before it is asked
        assert {parts[1] for parts in names if parts[0] == "tpukit"} == {"host", "training"}
    elif path == ROOT / "tpukit/__main__.py":
        assert {parts[0] for parts in names} == {"sys", "tpukit_tools"}
    else:
        below = {
            *LAYERS[: LAYERS.index(layer(path)) + 1],
            "__version__",
            *(["leaves"] * (layer(path) != "host")),
        }
        for parts in names:
            if parts[0] in PACKAGES:
                part = parts[0] if parts[0] != "tpukit" else ".".join(parts[1:2])
                assert part in {*below, ""}, f"{path.name} imports {'.'.join(parts)}"


def test_nothing_in_the_library_imports_the_other_packages_but_the_table_of_lazy_names():
    at_the_top = [ROOT / "tpukit/__init__.py", ROOT / "tpukit/__main__.py"]
    for path in set((ROOT / "tpukit").rglob("*.py")) - set(at_the_top):
        others = [name for name in imports(path, with_annotations=True) if name.split(".")[0] in PACKAGES[1:]]
        assert others == [], f"{path} imports {others}"
    assert not [name for name in imports(at_the_top[0]) if name.split(".")[0] in PACKAGES[1:]]


def test_the_layers_below_the_tasks_know_none_of_them_nor_their_scores_by_name():
    words = {"roc", "confusion"}
    for name, entry in leaves.tasks().items():
        words |= {name, entry.cls.lower(), entry.dataset.lower(), *leaves.find(name).score_names}
    anybodys = {"images", "text"}  # words, too: as names of tasks they are texts of their own
    assert {"mnist", "mshnet", "cdeit", "pd", "fa", "accuracy", "perplexity", *anybodys} < words
    for path in MODULES:
        if layer(path) in LAYERS[: LAYERS.index("inference")]:
            for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
                # no knowledge of a task: the file to copy, where an example keeps its run, whose class one is
                text = re.sub(
                    r'tpukit_tasks/mnist\.py|outputs/mnist|"tpukit_tasks"', "", token.string.lower()
                )
                named = (words - anybodys) & set(re.findall(r"[\w-]+", text))
                is_name = token.type == tokenize.STRING and text.strip("\"'") in anybodys
                assert not (named or is_name or "tpukit_tasks" in text), f"{path}: {token.line}"


@pytest.mark.parametrize("path", sorted((ROOT / "tpukit/launching").glob("*.py")), ids=lambda p: p.name)
def test_a_launch_knows_no_task_and_no_run_not_even_in_annotations(path):
    names = re.findall(r"^\s*(?:from|import) tpukit\.?((?:runs\.)?\w*)", path.read_text(), flags=re.M)
    assert set(names) <= {"host", "devices", "launching", "runs.tensors"}


@pytest.mark.parametrize(
    "package, layers",
    [
        ("torch_xla", {"devices"}),
        ("torch_tpu", {"devices"}),
        ("matplotlib", {"reporting"}),
        ("IPython", {"reporting"}),
        ("ipywidgets", {"reporting"}),
        ("tyro", {"tpukit_tools"}),
    ],
)
def test_a_foreign_package_is_imported_in_its_layer_only(package, layers):
    for path in MODULES:
        if any(name.split(".")[0] == package for name in imports(path)):
            is_leafs_own = (
                package == "torch_xla" and layer(path) == "tpukit_tasks" and path.parent.name == "tpu"
            )
            assert layer(path) in layers or is_leafs_own, f"{path.relative_to(ROOT)} imports {package}"


def test_importing_tpukit_and_detecting_loads_neither_torch_nor_matplotlib():
    program = (
        "import sys, tpukit; tpukit.detect(); from tpukit_tools import doctor;"
        "print([m for m in ('torch', 'torch_xla', 'matplotlib', 'IPython', 'skimage') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ran.stdout.strip() == "[]", ran.stderr


def test_every_public_name_is_found_and_an_unknown_one_lists_them():
    import tpukit

    for name in tpukit.__all__:
        assert getattr(tpukit, name) is not None
    with pytest.raises(AttributeError, match="it has .*detect"):
        tpukit.nothing


def public_classes():
    """Return the public classes and those that public functions return; and the hooks of a task, by class."""
    import tpukit
    from tpukit.data.datasets import Findable
    from tpukit.host.environment import Environment
    from tpukit.inference.own_files import OwnFiles
    from tpukit.launching.core import Core
    from tpukit.reporting.device_report import MetricsReport
    from tpukit.reporting.display import Displayed
    from tpukit.training.metrics import Rated
    from tpukit_tools.export import Exportable, Exported
    from tpukit_tools.plan import Plan

    public = [value for name in tpukit.__all__ if inspect.isclass(value := getattr(tpukit, name))]
    hooks = [tpukit.Task, Displayed, Rated, OwnFiles, Exportable, Findable]
    return [*public, Environment, Core, MetricsReport, Exported, Plan, *hooks[1:]], hooks


def public_functions():
    """Yield (name, function, parameters of the hook that it implements) of public functions and methods."""
    import tpukit

    for name in tpukit.__all__:
        if inspect.isfunction(function := inspect.unwrap(getattr(tpukit, name))):
            yield name, function, {}
    classes, hooks = public_classes()
    for cls in classes:
        for name, method in vars(cls).items():
            method = inspect.unwrap(getattr(method, "__func__", method))
            is_called_by_users = name[0] != "_" or (cls.__name__, name) == ("Checkpoints", "__init__")
            if is_called_by_users and inspect.isfunction(method):
                bases = [base for base in hooks if base is not cls and hasattr(base, name)]
                implemented = inspect.signature(vars(bases[0])[name]) if bases else inspect.Signature()
                yield f"{cls.__name__}.{name}", method, implemented.parameters


def parsed(thing):
    return ast.parse(textwrap.dedent(inspect.getsource(thing)))


def fault_of_docstring(function, implemented):
    """Return what a docstring in Google's form lacks. What implements a hook of a task is described there,
    but for parameters that it adds."""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    signature = inspect.signature(function)
    parameters = [one for name, one in signature.parameters.items() if name not in ("self", "cls")]
    names = [stars.get(one.kind, "") + one.name for one in parameters]
    text = inspect.cleandoc(function.__doc__ or "")
    parts = re.split(r"^(Args|Returns|Raises):\n", text, flags=re.M)
    sections = dict(zip(parts[1::2], parts[2::2]))
    told = re.findall(r"^    ([*\w]+): \S", sections.get("Args", ""), flags=re.M)
    if told != [name for name in names if name in told or name not in implemented]:
        return f"Args: {told} for {names}"
    if implemented:
        return ""
    has_result = str(signature.return_annotation) not in ("None", "collections.abc.Iterator[None]")
    if names and has_result != ("Returns" in sections):
        return "Returns"
    raised = [ast.unparse(node.exc) for node in ast.walk(parsed(function)) if getattr(node, "exc", None)]
    if any(one.startswith("TpukitError(") for one in raised) and "TpukitError: " not in sections.get(
        "Raises", ""
    ):
        return "Raises"
    return "" if text else "no docstring"


def test_the_docstring_of_a_public_function_has_each_argument_its_result_and_its_errors():
    faults = {name: fault_of_docstring(function, hook) for name, function, hook in public_functions()}
    assert len(faults) > 150
    assert {name: fault for name, fault in faults.items() if fault} == {}


def documented_fields(cls):
    """Return {field of a class: whether a docstring is below it}."""
    [body] = [node.body for node in parsed(cls).body if isinstance(node, ast.ClassDef)]
    texts = [
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for node in [*body[1:], ast.Pass()]
    ]
    fields = [(node, text) for node, text in zip(body, texts) if isinstance(node, ast.AnnAssign)]
    return {ast.unparse(node.target): text for node, text in fields}


def test_every_field_of_a_public_class_has_its_docstring_below_it():
    classes, hooks = public_classes()
    inherited = {name for hook in hooks for name, has_text in documented_fields(hook).items() if has_text}
    fields = {
        f"{cls.__name__}.{name}": name in inherited or has_text
        for cls in classes
        for name, has_text in documented_fields(cls).items()
        if name[0] != "_"
    }
    assert len(fields) > 100
    assert [name for name, has_text in fields.items() if not has_text] == []


def test_an_editor_is_told_the_same_homes_of_the_public_names_as_python():
    import tpukit

    tree = ast.parse((ROOT / "tpukit/__init__.py").read_text())
    [block] = [node for node in tree.body if isinstance(node, ast.If)]
    told = {imported.names[0].name: imported.module for imported in block.body}
    assert told == tpukit._HOMES


def lines_of(cell):
    return "".join(cell["source"]).splitlines()


def notebooks():
    return sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", notebooks(), ids=lambda p: p.name)
def test_notebooks_are_thin_have_no_outputs_and_preselect_their_hardware(path):
    notebook = json.loads(path.read_text())
    cells = [c for c in notebook["cells"] if c["cell_type"] == "code"]
    assert len(cells) <= 15
    [parameters] = [c for c in cells if "parameters" in c["metadata"].get("tags", [])]
    for cell in cells:
        assert not cell["outputs"] and cell["execution_count"] is None
        lines = lines_of(cell)
        most = 17 if cell is parameters else 15
        assert len(lines) <= most, "".join(cell["source"])
        assert max(map(len, lines)) <= 74, max(lines, key=len)  # more scrolls in a window of 700 pixels
    assert sum(len(text.split()) for text in texts(notebook)) <= 700
    # A line a setting: a list for Colab's form, or what it means; both are read in JupyterLab, too.
    assert all(
        re.match(r'[A-Z_]+ = .+?  +# (@param \[".*"\]$|[^@\s])', line) for line in lines_of(parameters)
    )
    assert not [c for c in cells if c is not parameters and "# @param" in "".join(c["source"])]
    assert notebook["metadata"]["accelerator"] in ("TPU", "GPU")
    assert "accelerator" in notebook["metadata"]["kaggle"]
    assert notebook["cells"][0]["cell_type"] == "markdown"


CHINESE = sorted((ROOT / "notebooks/zh-CN").glob("*.ipynb"))
SOURCE = "https://github.com/TPUKIT_SOURCE"
HOME = f"{SOURCE}/blob/main"
HAN = r"[\u3000-\u303f\u4e00-\u9fff\uff00-\uffef]"  # characters between which a line break renders as a blank


def texts(notebook):
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown"]


def chinese_link(link):
    """What a link of an English notebook is in the Chinese one, which lies one folder deeper."""
    if link.startswith(f"{HOME}/dist/zh-CN/"):
        return link.replace("/zh-CN/", "/")  # the way to the other language
    page = link.removeprefix(f"{HOME}/").replace(".md", ".zh-CN.md")
    page = page.replace("notebooks/", "notebooks/zh-CN/")
    if (ROOT / page).is_file():
        return f"{HOME}/{page}"
    return link.replace("/main/dist/", "/main/dist/zh-CN/").replace("../docs/", "../../docs/")


def test_every_notebook_has_a_chinese_twin():
    assert [path.name for path in CHINESE] == [path.name for path in notebooks()]


@pytest.mark.parametrize("path", CHINESE, ids=lambda p: p.name)
def test_a_chinese_notebook_has_the_code_of_the_english_one_and_its_texts_in_chinese(path):
    english, chinese = (
        json.loads((ROOT / "notebooks" / name).read_text()) for name in (path.name, f"zh-CN/{path.name}")
    )
    assert path.read_text() == json.dumps(chinese, indent=1, ensure_ascii=False) + "\n"
    for ours, theirs in zip(texts(english), texts(chinese), strict=True):
        assert re.search(r"[\u4e00-\u9fff]", theirs), theirs
        assert re.findall(r"^#+ ", ours, flags=re.M) == re.findall(r"^#+ ", theirs, flags=re.M), theirs
        links, translated = (sorted(re.findall(r"\]\(([^)\s]+)\)", text)) for text in (ours, theirs))
        assert sorted(map(chinese_link, links)) == translated
        assert not re.search(rf"{HAN}\n *{HAN}", theirs), theirs
    # all the rest is equal: code but for its comments, ids, metadata, the cells' order and types
    for notebook in (english, chinese):
        for cell in notebook["cells"]:
            is_code = cell["cell_type"] == "code"
            cell["source"] = without_comments("".join(cell["source"])) if is_code else []
    assert json.dumps(chinese, sort_keys=True) == json.dumps(english, sort_keys=True)  # Jupyter sorts them


def without_comments(code):
    """The tokens of a cell's code, without comments but @param, and without the choice of a language."""
    code = re.sub(
        r'^import os\n\n(?=import tpukit)|^os\.environ\["TPUKIT_LANGUAGE"\] = "zh".*\n', "", code, flags=re.M
    )
    tokens = tokenize.generate_tokens(io.StringIO(code).readline)
    blank = (tokenize.NL, tokenize.NEWLINE)
    kept = [token for token in tokens if token.type not in blank]
    return [t.string for t in kept if t.type != tokenize.COMMENT or t.string.startswith("# @param")]


def test_the_cell_of_the_library_has_one_text_in_each_language():
    for paths in (notebooks(), CHINESE):
        assert len({texts(json.loads(path.read_text()))[1] for path in paths}) == 1


def test_the_first_code_of_every_notebook_imports_tpukit_and_says_from_where():
    for paths in (notebooks(), CHINESE):
        first = ["".join(json.loads(p.read_text())["cells"][2]["source"]) for p in paths]
        assert len(set(first)) == 1
        code = [ast.unparse(line) for line in ast.parse(first[0]).body]
        assert "import tpukit" in code and "tpukit.__path__" in code[-1]


@pytest.mark.parametrize("path", notebooks(), ids=lambda p: p.name)
def test_every_notebook_ends_with_the_next_one_troubleshooting_and_where_to_ask(path):
    last = texts(json.loads(path.read_text()))[-1]
    assert last.startswith("### What next")
    links = re.findall(r"\]\(([^)\s]+)\)", last)
    assert links[1:] == [f"{HOME}/README.md", f"{HOME}/docs/TROUBLESHOOTING.md", f"{SOURCE}/issues"]
    following = ROOT / links[0].removeprefix(f"{HOME}/")
    assert following.is_file() and following.suffix == ".ipynb" and following.name != path.name


def test_the_extra_all_brings_every_other_extra():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras.pop("all") == [f"tpukit[{','.join(extras)}]"]


def test_the_lists_of_requirements_and_of_pyproject_are_the_same_and_have_no_torch():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert extras["standard"] == ["tpukit[tasks,charts,cli]"]
    needed = [*project["dependencies"], *extras["tasks"], *extras["charts"], *extras["cli"]]
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("# the library"))
    assert lines[start + 1 : start + 1 + len(needed)] == needed
    assert not [name for name in needed if name.startswith("torch")]
    from tpukit_tools import doctor

    assert set(doctor.NEEDED) == {name.partition(">=")[0] for name in needed}


def test_every_notebook_that_a_page_names_exists():
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for path in re.findall(r"(?<!google\.com/)(notebooks/\w+\.ipynb)", page.read_text()):
            assert (ROOT / path).exists(), f"{page.name}: {path}"


def test_nothing_in_the_tree_names_a_machine_or_a_registry():
    ran = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    for name in ran.stdout.split() or pytest.skip("not a git checkout: what is tracked is not known"):
        if (ROOT / name).is_symlink():
            continue
        text = (ROOT / name).read_text(errors="ignore")
        assert (
            not re.search(r"pythonhosted|pypi\.org/simple|/home/\w+|/Users/\w+", text)
            or name == "tests/test_code.py"
        ), name


def test_the_files_of_tests_that_start_first_are_there():
    assert [name for name in LONGEST if not (ROOT / "tests" / name).is_file()] == []
