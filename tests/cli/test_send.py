"""The command line of `tpukit send`, up to where a service would be asked."""

import json

import pytest

from tpukit import cli
from tpukit.cli import send
from tpukit.tools.send import Quota, State
from tpukit.tools.send import chain as chains


class Recorder:
    """A service that takes what it is sent, and has run nothing yet."""

    attached = False
    left_h = 20.0

    def __init__(self):
        self.there = {}

    def kernel(self, slug):
        return f"me/{slug}"

    def url(self, kernel):
        return f"https://there/{kernel}"

    def state(self, kernel):
        return State("queued" if kernel in self.there else "unknown")

    def quota(self, accelerator):
        return Quota(self.left_h, 20.0, "Saturday")

    def push(self, folder, session, runs):
        self.there[session.kernel] = json.loads((folder / "kernel-metadata.json").read_text())


@pytest.fixture
def there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recorder = Recorder()
    monkeypatch.setattr(send, "_service", lambda name: recorder)
    monkeypatch.setattr("tpukit.tools.pack.library", lambda: b"archive")
    return recorder


def run(line):
    return cli.main(["send", *line.split()])


def settings(name):
    return chains.read(send._folder(name)).settings


def test_a_task_is_sent_with_the_settings_that_are_not_its_defaults(there, capsys):
    assert (
        run("kaggle mnist --epochs 7 --lr 0.5 --hours 3 --dataset me/set --dataset me/other --name my-one")
        == 0
    )
    chain = chains.read(send._folder("my-one"))
    assert chain.settings == [dict(epochs=7, lr=0.5)] and chain.until_epochs == 7
    assert chain.datasets == ["me/set", "me/other"] and chain.sent[0].hours == 3
    assert list(there.there) == ["me/tpukit-my-one-1"]
    assert "tpukit send follow my-one" in capsys.readouterr().out
    assert run("status") == 0 and "queued" in capsys.readouterr().out


def test_a_sweep_has_all_combinations_with_values_as_the_options_take_them(there):
    assert run("kaggle mnist --until-epochs 3 --vary lr 0.05 1 --vary batch-size 4 8 --accelerator none") == 0
    expected = [(0.05, 4), (0.05, 8), (1.0, 4), (1.0, 8)]
    assert [(each["lr"], each["batch_size"]) for each in settings("mnist")] == expected
    assert all(each["epochs"] == 3 for each in settings("mnist"))


@pytest.fixture
def notebook(there, tmp_path):
    """The name of a notebook in the current folder."""
    source = "LR = 0.1\nEPOCHS = 2\nNAME = ''\nON = True\nCROP = None\nSIZES = [1]\nopen('x')"
    cell = dict(cell_type="code", metadata=dict(tags=["parameters"]), outputs=[], source=source)
    (tmp_path / "My Notebook.ipynb").write_text(json.dumps(dict(cells=[cell], metadata={}, nbformat=4)))
    return "My Notebook.ipynb"


@pytest.mark.parametrize(
    "name, text, value",
    [
        ("LR", "0.5", 0.5),
        ("LR", "1", 1.0),
        ("EPOCHS", "3", 3),
        ("NAME", "3", "3"),
        ("NAME", "'); import os; os.abort() #", "'); import os; os.abort() #"),
        ("ON", "False", False),
        ("CROP", "None", None),
        ("CROP", "0.5", 0.5),
        ("CROP", "some text", "some text"),
    ],
)
def test_a_parameter_gets_the_type_that_the_notebook_gives_it(notebook, name, text, value):
    assert cli.main(["send", "kaggle", notebook, "-p", name, text]) == 0
    [given] = settings("my-notebook")
    assert given == {name: value} and type(given[name]) is type(value)


@pytest.mark.parametrize(
    "given", ["LR fast", "LR 1j", "EPOCHS 0.5", "EPOCHS True", "SIZES 1", "lr 1", "open 1"]
)
def test_a_parameter_of_another_type_and_an_unknown_name_are_refused(notebook, there, given, capsys):
    assert cli.main(["send", "kaggle", notebook, "-p", *given.split()]) == 1
    assert given.split()[0] in capsys.readouterr().err and not there.there


def test_a_notebook_is_kept_as_it_was_sent_with_its_parameters(notebook):
    arguments = ["-p", "LR", "-2", "-p", "NAME", "'); x", "--vary", "NAME", "a", "b"]
    assert cli.main(["send", "kaggle", notebook, *arguments]) == 0
    assert settings("my-notebook") == [dict(LR=-2.0, NAME="a"), dict(LR=-2.0, NAME="b")]
    assert (send._folder("my-notebook") / "notebook.ipynb").exists()


def test_the_hardware_check_is_sent_by_its_option(there):
    assert run("kaggle --hardware-check --accelerator gpu") == 0
    assert there.there["me/tpukit-hardware-check-1"]["machine_shape"] == "NvidiaTeslaT4"


def test_without_enough_quota_it_says_when_there_will_be_more(there, capsys):
    there.left_h = 0.4
    assert run("kaggle mnist") == 0
    assert "Saturday" in capsys.readouterr().out and not there.there
    there.left_h = 2.0
    send._advance("mnist", push=False)
    assert not there.there


@pytest.mark.parametrize(
    "line, word",
    [
        ("kaggle mnist --name ../x", "../x"),
        ("kaggle mnist --hours 25", "--hours 25"),
        ("kaggle mnist --sessions 0", "--sessions 0"),
        ("kaggle mnist --dataset mnist", "'mnist'"),
        ("kaggle mnist --dataset-dir .", "--dataset"),
        ("kaggle mnist --vary lr", "--vary lr:"),
        ("kaggle mnist --vary lr fast", "'fast'"),
        ("kaggle mnist --vary precision fp99", "'fp99'"),
        ("kaggle mnist --vary rate 1", "rate"),
        ("kaggle mnist --vary lr 1 --vary lr 2", "--vary lr 1 --vary lr 2:"),
        ("kaggle no.ipynb", "no.ipynb"),
        ("status nobody", "nobody"),
        ("follow ../mnist", "../mnist"),
        ("stop nobody", "nobody"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_sent(there, line, word, capsys, tmp_path):
    assert run(line) == 1
    said = capsys.readouterr().err
    assert word in said and "Traceback" not in said and not there.there
    assert not list(tmp_path.glob("outputs/sent/*/chain.json"))


@pytest.mark.parametrize(
    "line, meant",
    [
        ("kagle mnist", "kaggle"),
        ("folow x", "follow"),
        ("kaggle mnits", "mnist"),
        ("kaggle mnist --epoch 3", "--epochs"),
        ("kaggle mnist --acelerator gpu", "--accelerator"),
        ("kaggle a.ipynb --parametr LR 1", "--parameter"),
        ("follow x --session 2", "--sessions"),
    ],
)
def test_a_misspelt_word_is_told_what_was_meant(there, line, meant, capsys):
    assert run(line) == 2 and f"did you mean {meant}?" in capsys.readouterr().err


def test_a_chain_is_not_sent_twice_under_one_name(there, capsys):
    assert run("kaggle mnist") == 0 and run("kaggle mnist --epochs 9") == 1
    assert "follow" in capsys.readouterr().err and settings("mnist") == [{}]


def test_the_state_of_all_chains_names_one_that_is_damaged_and_shows_the_others(there, capsys):
    assert run("kaggle mnist --name whole") == run("kaggle mnist --name broken") == 0
    (send._folder("broken") / chains.FILE).write_text("{}")
    capsys.readouterr()
    assert run("status") == 0
    shown = capsys.readouterr().out
    assert "queued" in shown and "damaged" in shown
    assert run("status broken") == 1
