"""Notebooks: one module of all cells, and what only IPython understands."""

import json

import pytest

from tests.conftest import ROOT
from tests.tools.migrate.helpers import notebook, written
from tpukit.tools import migrate
from tpukit.tools.migrate import examine


def test_a_notebook_is_one_program_whose_cells_are_named_and_whose_magics_stay(tmp_path):
    setup = "!pip install torch_xla[tpu]==2.6\n%env XLA_USE_BF16=1\nimport torch"
    model = "files = !ls\nmodel = model.cuda()  # here\nmodel?\nif True:\n    !echo done\n    %time i + 1"
    text = notebook(setup, "%%bash\nnvidia-smi", model)
    path = written(tmp_path, text, "guide.ipynb")
    findings, fixed = examine(path)
    found = [(f.rule, f.cell, f.line) for f in findings]
    assert found == [("install", 2, 1), ("old-variable", 2, 2), ("cuda", 4, 2)]
    sources = ["".join(cell["source"]) for cell in json.loads(fixed)["cells"]]
    assert sources[1].splitlines()[:2] == ["!pip install torch_xla[tpu]==2.6", "%env XLA_USE_BF16=1"]
    assert "import torch_xla" in sources[1] and sources[2] == "%%bash\nnvidia-smi"
    wanted = sources[3].replace("model.to(torch_xla.device())", "model.cuda()")
    assert wanted == "".join(json.loads(text)["cells"][3]["source"]) and wanted != sources[3]
    assert "guide.ipynb cell 4:2:9" in migrate.as_text(findings)


CELLS = [
    "if x:  # right?\n    pass",
    "'a %d'\\\n    % 3",
    "a = (1\n    != 2)",
    "!pip list \\\n    --verbose",
    "?torch",
]
CELLS += ["d['x'] = !ls", "await thing", "", "# only words", "%%html\n<b>no Python</b>", "!ls\rmodel.cuda()"]
CELLS += ['text = """\n!ls\n%time\n"""']


@pytest.mark.parametrize("cell", CELLS)
def test_cells_as_ipython_takes_them_are_read_and_stay_as_they_are(cell, tmp_path):
    path = written(tmp_path, notebook("x = 1", cell, "model = model.cuda()"), "odd.ipynb")
    findings, fixed = examine(path)
    assert [(f.rule, f.cell, f.line) for f in findings] == [("cuda", 4, 1)]
    assert "".join(json.loads(fixed)["cells"][2]["source"]) == cell


@pytest.mark.parametrize(
    "cell, line",
    [
        ("!python -m pip install torch_xla", 1),
        ("%pip install -q torch==2.1 torchvision", 1),
        ("!pip install 'torch'", 1),
        ('!pip install "torch>=2.0"', 1),
        ("!pip install torch[opt]", 1),
        ("!pip install https://host/wheels/torch_xla-1.9-cp37-cp37m-linux_x86_64.whl", 1),
        ("x = 1\n!pip install -U \\\n  torch_xla", 2),
        ("%%bash\ncd x\npip install -q \\\n   torch_xla", 3),
        ("out = !pip install torch_xla", 1),
        ("!pip install torch_xla \\", 1),
        ("!pip uninstall -y timm && pip install libtpu", 1),
        ("pip install torch_xla\nx = 1", 1),
        ("!pip uninstall -y torch torchvision", 1),
        ('!pip install "$TORCH_WHEEL"', 1),
        ('!pip install "$TORCH_XLA_WHEEL"', 1),
        ('!pip install "$TORCHVISION_WHEEL"', None),
        ("!pip install timm --no-deps  # keeps torch as it is", None),
        ("!pip install accelerate; echo torch done", None),
        ("!pip install torchvision torchmetrics torch-geometric torch_optimizer", None),
        ("%%bash\n# pip install torch_xla is what old guides did\necho 'it''s", None),
        ('text = """\n!pip install torch_xla\n"""', None),
        ("pip install timm\ncd folder\nx = 1", None),
    ],
)
def test_installing_another_torch_is_found_wherever_a_cell_does_it(cell, line, tmp_path):
    path = written(tmp_path, notebook(cell, "model = model.cuda()"), "install.ipynb")
    findings, fixed = examine(path)
    assert [(f.cell, f.line) for f in findings if f.rule == "install"] == ([(2, line)] if line else [])
    assert [(f.rule, f.cell) for f in findings if f.rule != "install"] == [("cuda", 3)]
    source = "".join(json.loads(fixed)["cells"][1]["source"])
    assert source == cell if cell.startswith("%%") else source.endswith(cell)


def test_one_bad_cell_hides_no_other(tmp_path):
    text = notebook("!pip install torch_xla", "def f(:", "model = model.cuda()")
    path = written(tmp_path, text, "bad.ipynb")
    findings, fixed = examine(path)
    assert [(f.rule, f.cell) for f in findings] == [("install", 2), ("unreadable", 3), ("cuda", 4)]
    assert "".join(json.loads(fixed)["cells"][2]["source"]) == "def f(:"


@pytest.mark.slow
def test_the_notebooks_and_tasks_of_tpukit_have_nothing_to_fix():
    paths = migrate.files_in([ROOT / "notebooks", ROOT / "tpukit" / "tasks"])
    assert len(paths) > 10
    assert [f.place for path in paths for f in examine(path)[0] if f.level == "error"] == []


def test_half_a_character_in_a_cell_of_text_stays_half_and_the_code_is_fixed(tmp_path):
    text = notebook("model = model.cuda()").replace("# Title", "\\ud83d and \u00e9")
    path = written(tmp_path, text, "half.ipynb")
    findings, fixed = examine(path)
    assert [f.rule for f in findings] == ["cuda"]
    migrate.write(path, fixed)
    after = json.loads(path.read_text())
    assert after["cells"][0]["source"] == ["\ud83d and \u00e9"] and "cuda" not in path.read_text()


def test_a_number_that_cannot_be_written_again_is_named_and_the_notebook_stays(tmp_path):
    text = notebook("model = model.cuda()").replace('"nbformat": 4', '"big": 1e999, "nbformat": 4')
    findings, _ = examine(written(tmp_path, text, "big.ipynb"))
    assert [f.rule for f in findings] == ["unreadable"]
