"""Notebooks, and scripts saved from one: one module of all cells, and what only IPython understands."""

import json

import pytest

from tests.conftest import ROOT
from tests.tools.migrate.helpers import notebook, written
from tpukit_tools import migrate
from tpukit_tools.migrate import examine


def sources(examined):
    return ["".join(cell["source"]) for cell in json.loads(examined.fixed)["cells"]]


def test_a_notebook_is_one_program_whose_cells_are_named_and_whose_magics_stay(tmp_path):
    setup = "!pip install torch_xla[tpu]==2.6\n%env XLA_USE_BF16=1\nimport torch"
    model = "!ls\nmodel = model.cuda()  # here\nmodel?\nif True:\n    !echo done\n    %time i + 1"
    examined = examine(written(tmp_path, notebook(setup, "%%bash\nnvidia-smi", model), "guide.ipynb"))
    found = [(f.rule, f.cell, f.line) for f in examined.findings]
    assert found == [("install", 2, 1), ("old-variable", 2, 2), ("cuda", 4, 2)]
    _, first, shell, last = sources(examined)
    assert first == setup.replace("import torch", "import torch_xla\nimport torch")
    assert shell == "%%bash\nnvidia-smi" and last == model.replace("cuda()", "to(torch_xla.device())")
    assert "guide.ipynb cell 4:2:9" in migrate.as_text(examined.findings)


@pytest.mark.parametrize("above", ["%%time", "%%capture", "!pip install timm", "%matplotlib inline\n!ls"])
def test_an_import_that_a_fix_needs_leaves_the_lines_for_ipython_first(above, tmp_path):
    examined = examine(written(tmp_path, notebook(f"{above}\nmodel = model.cuda()"), "timed.ipynb"))
    fixed = f"{above}\nimport torch_xla\nmodel = model.to(torch_xla.device())"
    assert sources(examined)[1] == fixed


CELLS = [
    "if x:  # right?\n    pass",
    "'a %d'\\\n    % 3",
    "a = (1\n    != 2)",
    "!pip list \\\n    --verbose",
    "?torch",
    "await thing",
    "",
    "# only words",
    "%%html\n<b>no Python</b>",
    "!ls\rmodel.cuda()",
    'text = """\n!ls\n%time\n"""',
]


@pytest.mark.parametrize("cell", CELLS)
def test_cells_as_ipython_takes_them_are_read_and_stay_as_they_are(cell, tmp_path):
    path = written(tmp_path, notebook("x = 1", cell, "model = model.cuda()"), "odd.ipynb")
    examined = examine(path)
    assert [(f.rule, f.cell, f.line) for f in examined.findings] == [("cuda", 4, 1)]
    assert sources(examined)[2] == cell


@pytest.mark.parametrize(
    "cell, line",
    [
        ("!python -m pip install torch_xla", 1),
        ("%pip install -q torch==2.1 torchvision", 1),
        ("!pip install 'torch'", 1),
        ('!pip install "torch>=2.0"', 1),
        ("!pip install torch[opt]", 1),
        ("!python pytorch-xla-env-setup.py --version nightly --apt-packages libomp5", 1),
        ("!pip install https://host/wheels/torch_xla-1.9-cp37-cp37m-linux_x86_64.whl", 1),
        ("x = 1\n!pip install -U \\\n  torch_xla", 2),
        ("%%bash\ncd x\npip install -q \\\n   torch_xla", 3),
        ("!pip install torch_xla \\", 1),
        ("!pip uninstall -y timm && pip install libtpu", 1),
        ("!pip uninstall -y torch torchvision", 1),
        ('!pip install "$TORCH_WHEEL"', 1),
        ('!pip install "$TORCHVISION_WHEEL"', None),
        ("!pip install timm --no-deps  # keeps torch as it is", None),
        ("!pip install accelerate; echo torch done", None),
        ("!pip install torchvision torchmetrics torch-geometric torch_optimizer", None),
        ("%%bash\n# pip install torch_xla is what old guides did\necho 'it''s", None),
        ('text = """\n!pip install torch_xla\n"""', None),
    ],
)
def test_installing_another_torch_is_found_wherever_a_cell_does_it(cell, line, tmp_path):
    examined = examine(written(tmp_path, notebook(cell, "model = model.cuda()"), "install.ipynb"))
    found = [(f.cell, f.line) for f in examined.findings if f.rule == "install"]
    assert found == ([(2, line)] if line else [])
    source = sources(examined)[1]
    assert source == cell if cell.startswith("%%") else source.endswith(cell)


@pytest.mark.parametrize(
    "command, rule",
    [
        ("!accelerate launch --use_tpu programs/CDEIT_TPU/main.py --mode train", "gone"),
        ("%%bash\ncd x\naccelerate launch --mixed_precision fp16 train.py", "cuda"),
        ("!python main_tpu.py \\\n    --epochs 2 --use-tpu", "gone"),
        ("!ctpu up --name=me", "gone"),
        ("!gcloud compute tpus create me --zone=us-central1-b", "gone"),
        ("!gcloud compute tpus tpu-vm create me --zone=us-central1-b", None),
        ("!python main.py --epochs 2", None),
        ("!accelerate launch --tpu main.py", None),
    ],
)
def test_a_command_that_no_machine_has_any_more_is_found(command, rule, tmp_path):
    examined = examine(written(tmp_path, notebook(command), "old.ipynb"))
    assert [f.rule for f in examined.findings] == [rule] * (rule is not None)


def test_a_notebook_saved_as_a_script_is_read_as_one(tmp_path):
    code = "!pip install torch_xla\n%cd repository\nimport torch\nmodel = model.cuda()\n"
    examined = examine(written(tmp_path, code))
    assert [(f.rule, f.cell, f.line) for f in examined.findings] == [("install", 0, 1), ("cuda", 0, 4)]
    fixed = code.replace("import", "import torch_xla\nimport").replace("cuda()", "to(torch_xla.device())")
    assert examined.fixed.decode() == fixed


@pytest.mark.parametrize(
    "code, found",
    [
        ("%%bash\n!pip install torch_xla\nmodel.cuda()\n", [("install", 2), ("cuda", 3)]),
        ("%%writefile train.py\nmodel.cuda()\n", [("cuda", 2)]),
        ("%%html\n<b>no</b>\nmodel.cuda()\n", [("unreadable", 2)]),
    ],
)
def test_a_magic_of_a_cell_hides_nothing_of_a_script(code, found, tmp_path):
    examined = examine(written(tmp_path, code))
    assert [(f.rule, f.line) for f in examined.findings] == found


@pytest.mark.parametrize("bad", ["def f(:", "files = !ls", "pip install timm"])
def test_one_bad_cell_hides_no_other(bad, tmp_path):
    text = notebook("!pip install torch_xla", bad, "model = model.cuda()")
    examined = examine(written(tmp_path, text, "bad.ipynb"))
    found = [(f.rule, f.cell) for f in examined.findings]
    assert found == [("install", 2), ("unreadable", 3), ("cuda", 4)] and sources(examined)[2] == bad
    assert "fix the file first" in migrate.as_text(examined.findings)


@pytest.mark.slow
def test_the_notebooks_and_tasks_of_tpukit_have_nothing_to_fix():
    paths = migrate.files_in([ROOT / "notebooks", ROOT / "tpukit_tasks"])
    assert len(paths) > 10
    assert [f.place for path in paths for f in examine(path).findings if f.level == "error"] == []
