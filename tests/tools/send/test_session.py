"""The notebook of a session: what is in it, and that values are data in it and never code."""

import ast
import json

from tpukit.tools import pack
from tpukit.tools.send import Session
from tpukit.tools.send import session as sessions
from tpukit.tools.send.chain import Chain

LIBRARY = pack.cell(b"archive")


def made(folder, session=Session("me/tpukit-a-1", 2.5), **values):
    """(cells' sources, metadata of the kernel) of a session's notebook."""
    values = dict(accelerator="tpu", kind="task", task="mnist", settings=[{}]) | values
    chain = Chain(name="a", service="kaggle", **values)
    sessions.write(folder / "push", chain, session, LIBRARY)
    notebook = json.loads((folder / "push/session.ipynb").read_text())
    return [cell["source"] for cell in notebook["cells"]], json.loads(
        (folder / "push/kernel-metadata.json").read_text()
    )


def called(source):
    """(function, values) of a cell that calls one of inside.py."""
    [call] = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and node.keywords]
    return call.func.attr, ast.literal_eval(call.keywords[0].value)


HOSTILE = ["'); import os; os.abort() #", "\n!touch x", '"""', "{x}", "\\", "%%bash", "\u2028x", None, True]


def test_a_task_gets_the_library_a_watch_its_call_and_an_end(tmp_path):
    settings = dict(epochs=3, freeze=HOSTILE)
    cells, metadata = made(tmp_path, settings=[settings])
    assert "packed into this notebook" in cells[0] and cells[-1].endswith("inside.write('done')")
    assert called(cells[1]) == ("watch", dict(accelerator="tpu", hours=2.5))
    assert called(cells[2]) == ("train_task", dict(task="mnist", settings=settings, name="a", resumes=False))
    assert metadata["id"] == "me/tpukit-a-1" and metadata["title"] == "tpukit-a-1"
    assert metadata["is_private"] is True and metadata["enable_internet"] is False
    assert metadata["machine_shape"] == "TpuV5E8" and metadata["enable_tpu"] and not metadata["enable_gpu"]
    assert metadata["kernel_sources"] == metadata["dataset_sources"] == []


def test_a_later_session_has_the_one_before_as_its_input(tmp_path):
    later = Session("me/tpukit-a-2", 2.5, setting=1, source="me/tpukit-a-1")
    several = dict(settings=[{}, dict(lr=0.5)], datasets=["me/set"], internet=True, accelerator="none")
    cells, metadata = made(tmp_path, later, **several)
    assert metadata["kernel_sources"] == ["me/tpukit-a-1"] and metadata["dataset_sources"] == ["me/set"]
    assert metadata["enable_internet"] and not metadata["machine_shape"] and not metadata["enable_tpu"]
    assert called(cells[2])[1] == dict(task="mnist", settings=dict(lr=0.5), name="a", resumes=True)


def notebook(folder, *sources, tags=(), **metadata):
    """A notebook of code cells; the first has the tags."""
    cells = [dict(cell_type="code", metadata={}, outputs=[1], source=source) for source in sources]
    cells[0]["metadata"] = dict(tags=list(tags))
    cells.append(dict(cell_type="markdown", metadata={}, source=["# a", "\n"]))
    path = folder / sessions.NOTEBOOK
    path.write_text(json.dumps(dict(cells=cells, metadata=metadata, nbformat=4, nbformat_minor=5)))
    return path


def test_a_notebook_keeps_its_cells_and_gets_its_parameters_after_the_tagged_one(tmp_path):
    pinned = dict(kaggle=dict(dockerImageVersionId=3))
    notebook(tmp_path, "LR = 0.1\nNAME = 'x'", "print(LR)", tags=["parameters"], **pinned)
    values = dict(LR=0.5, NAME=HOSTILE[0])
    cells, _ = made(tmp_path, kind="notebook", task="", settings=[values])
    assert cells[2] == "LR = 0.1\nNAME = 'x'" and cells[4:6] == ["print(LR)", "# a\n"]
    given = {}
    exec(cells[3], given)
    assert {name: given[name] for name in values} == values
    assert "dockerImageVersionId" not in (tmp_path / "push/session.ipynb").read_text()
    assert json.loads((tmp_path / "push/session.ipynb").read_text())["cells"][2]["outputs"] == []


def test_a_notebook_with_a_library_of_its_own_gets_no_other(tmp_path):
    notebook(tmp_path, "own library", "import tpukit", tags=[pack.TAG])
    cells, _ = made(tmp_path, kind="notebook", task="")
    assert cells[0] == "own library" and called(cells[1])[0] == "watch" and cells[2] == "import tpukit"
