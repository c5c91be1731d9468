"""What the pages say runs: their commands, their Python, what is used elsewhere."""

import ast
import contextlib
import functools
import glob
import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import tpukit
from tests import warm
from tests.conftest import ROOT
from tests.tasks.cdeit.small import TINY as SIZES
from tests.tasks.text.small import CHAT, write_model
from tests.test_pages import ENGLISH, commands
from tests.test_pages import name as name_of
from tpukit import CDEIT, MNIST, ImageClassifier, LanguageModel, MSHNet, Run, train
from tpukit.devices.runtime import Runtime
from tpukit_tasks.cdeit.model import NETWORKS
from tpukit_tools import cli

pytestmark = pytest.mark.usefixtures("warm_calls")


def pairs(line):
    """The options of a line, name -> value."""
    words = line.split()
    return dict(zip(words[::2], words[1::2]))


# What makes each task small, and numbers that would make a command long -> what the test takes.
TINY = {
    "mshnet": pairs("--base-size 32 --crop-size 32 --batch-size 4"),
    "mnist": pairs("--batch-size 8"),
    "images": pairs("--image-size 32 --batch-size 4"),
    "text": pairs("--sequence-length 128 --batch-size 4"),
    "cdeit": pairs("--network small --batch-size 4"),
}
SMALL = {option: value for options in TINY.values() for option, value in options.items()}
SMALL |= pairs("--epochs 1 --warm-epoch 0 --steps 2 --cores 1 --sampling-steps 1")
SMALL |= pairs("--batch-size 4 --global-batch-size 4 --samples 6 --test-samples 3")
# A small language model takes the place of the pages'.
PUBLISHED = {"Qwen/Qwen3-0.6B": "model", "gpt2": "model"}
# Not run here: what compiles for a TPU for minutes and needs the network (tests/tools/plan runs it), and
# all checks of the hardware (tests/tools/test_hardware.py).
ELSEWHERE = ("tpukit plan", "tpukit doctor --rehearse", "tpukit emulate")


def smaller(command):
    """The command with numbers that let it end in seconds."""
    words = shlex.split(command)[1:]
    words = [SMALL.get(before, PUBLISHED.get(word, word)) for before, word in zip(["", *words], words)]
    words = ["outputs/new" if before == "--out" else word for before, word in zip(["", *words], words)]
    if words[0] in ("train", "compare") and words[1] in TINY:
        less = {"--epochs": "1", "--run": "outputs/new"} if words[0] == "train" else {"--steps": "2"}
        wanted = TINY[words[1]] | less
        given = {
            "--batch-size" if word in ("--global-batch-size", "--batch-sizes") else word for word in words
        }
        words += [part for option, value in wanted.items() if option not in given for part in (option, value)]
    return words


def written():
    """The commands of all pages, each once."""
    return list(dict.fromkeys(command for path in ENGLISH for command in commands(path)))


def unique():
    return [command for command in written() if not command.startswith(ELSEWHERE)]


def alone():
    return [c for c in unique() if c.startswith("tpukit")]


def options(command):
    """The command's name, its task, its options, and those of their values that are words: a choice is an
    option, too."""
    words = smaller(command)
    task = words[1] if len(words) > 1 and words[1] in TINY else ""
    values = [word for word in words[1:] if re.fullmatch(r"--.*|[a-z][a-z_-]+\d*", word)]
    return frozenset([(words[0], task), *values])


def chosen():
    """The commands that have an option which none with more options has, and those without any."""
    kept, covered = [], {}
    for command in sorted(alone(), key=lambda command: -len(options(command))):
        (kind,) = [part for part in options(command) if isinstance(part, tuple)]
        if len(options(command)) == 1 or options(command) - covered.get(kind, set()):
            kept.append(command)
            covered[kind] = covered.get(kind, set()) | options(command)
    return kept


def test_there_are_commands_to_run():
    assert len(chosen()) > 10


@pytest.fixture(scope="module")
def smaller_cdeit():
    """While the commands run, the small CDEIT is one that trains in seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(NETWORKS, "small", SIZES)
        yield


@pytest.fixture(scope="module")
def place(tmp_path_factory, digits, infrared, tank, shapes, smaller_cdeit):
    """A folder as a reader's would be: datasets, finished runs, code of the reader's own."""
    folder = tmp_path_factory.mktemp("reader")
    shutil.copytree(digits, folder / "datasets/mnist")
    shutil.copytree(infrared, folder / "datasets/IRSTD-1k")
    shutil.copytree(shapes, folder / "datasets/my-images")
    (folder / "IRSTD-1k").symlink_to("datasets/IRSTD-1k")
    shutil.copytree(tank, folder / "data")
    (folder / "data/data2017").symlink_to("test")
    for kind in ("train", "test"):  # of one's own, all in one folder
        shutil.copytree(shapes / kind, folder / "my-photos", dirs_exist_ok=kind == "test")
    shutil.copytree(shapes / "test/ring", folder / "new-photos")
    for kind, data, sizes in (
        (MNIST, "datasets/mnist", {}),
        (MSHNet, "datasets/IRSTD-1k", dict(base_size=32, crop_size=32, warm_epoch=0)),
        (CDEIT, "data", dict(network="small")),
        (ImageClassifier, "my-photos", dict(model_name="test_resnet", image_size=32, pretrained="no")),
    ):
        task = kind(dataset_dir=folder / data, epochs=1, batch_size=4, **sizes)
        train(task, Run.open(folder / "outputs" / task.name, task), runtime=Runtime("cpu"), progress=False)
    write_model(folder / "model", chat=CHAT, n_positions=128)
    for name, line in (
        ("my-chats/chats.jsonl", dict(prompt="Greet Ada.", completion="Hello, Ada!")),
        ("my-text/texts.jsonl", dict(text="Once upon a time there was a compiler.")),
        ("questions.jsonl", dict(prompt="Greet Ada.")),
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("\n".join([json.dumps(line)] * (60 if "/" in name else 2)))
    for run, data, pretrained, lr in (("chats", "my-chats", "auto", 5e-4), ("gpt", "my-text", "no", 6e-4)):
        settings = dict(model_name="model", pretrained=pretrained, lr=lr, sequence_length=128, new_tokens=6)
        with contextlib.chdir(folder):
            task = LanguageModel(dataset_dir=Path(data), epochs=1, batch_size=4, **settings)
            train(task, Run.open(Path("outputs", run), task), runtime=Runtime("cpu"), progress=False)
    code = "import torch\n\nmodel = torch.nn.Linear(3, 1).cuda()\n"
    cell = dict(cell_type="code", id="a", metadata={}, outputs=[], execution_count=None, source=code)
    book = json.dumps(dict(cells=[cell], metadata={}, nbformat=4, nbformat_minor=5))
    for name, text in (
        ("train.py", code),
        ("src/model.py", code),
        ("notebook.ipynb", book),
        ("notebooks/one.ipynb", book),
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("command", sorted(set(unique()) - set(alone())))
def test_a_command_with_something_before_it_runs_as_it_stands(command, place, monkeypatch):
    before, _, rest = command.partition("tpukit ")
    words = smaller(f"tpukit {rest}")
    if "--cores" in words:
        words[words.index("--cores") + 1] = "2"  # in a process of its own it can
    monkeypatch.chdir(place)
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    shutil.rmtree("outputs/new", ignore_errors=True)
    line = f"{before}{shlex.join(warm.python())} -m tpukit {shlex.join(words)}"
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=environ, timeout=300)
    assert ran.returncode == 0 and "Scores" in ran.stdout, ran.stdout + ran.stderr


TAKEN_HOME = ("create_model", "InferenceSession")


@pytest.mark.slow
def test_what_is_taken_home_gives_on_another_machine_what_was_trained(shapes, tmp_path, monkeypatch):
    task = ImageClassifier(
        dataset_dir=shapes, model_name="resnet18", pretrained="no", image_size=32, epochs=1,
        batch_size=4,
    )  # fmt: skip
    monkeypatch.chdir(tmp_path)
    run = Run.open(tmp_path / "outputs/photos", task)
    train(task, run, runtime=Runtime("cpu"), progress=False)
    tpukit.export(run)
    rng = np.random.default_rng(0)
    photo = Image.fromarray(rng.integers(0, 256, (5, 7, 3), np.uint8)).resize((62, 44))
    upside_down = photo.getexif()
    upside_down[0x0112] = 3  # which a phone may write
    (tmp_path / "new-photos").mkdir()
    photo.save("new-photos/one.jpg", exif=upside_down)
    (expected,) = tpukit.predict(run, "new-photos/one.jpg", task=task)
    classes = len(task.class_names)
    codes = [
        code for code in examples(ROOT / "docs/YOUR_DATA.md") if any(word in code for word in TAKEN_HOME)
    ]
    assert len(codes) == len(TAKEN_HOME)
    for code in codes:
        code = code.replace("num_classes=2", f"num_classes={classes}").replace("(224, 224)", "(32, 32)")
        names: dict = {}
        exec(compile(code, "taken home", "exec"), names)
        scores = torch.as_tensor(names["scores"]).softmax(0)
        assert task.class_names[int(scores.argmax())] == expected["class"]
        assert float(scores.max().detach()) == pytest.approx(expected["probability"], abs=1e-4)


def examples(path):
    return re.findall(r"```python\n(.*?)```", path.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("path", [p for p in ENGLISH if examples(p)], ids=name_of)
def test_the_python_of_both_languages_is_the_same(path):
    other = path.with_name(path.name.replace(".md", ".zh-CN.md"))
    ours, theirs = (
        [ast.dump(ast.parse(re.sub('""".*?"""', "pass", code))) for code in examples(p)]
        for p in (path, other)
    )
    assert ours == theirs


@pytest.mark.slow
@pytest.mark.parametrize("path", [p for p in ENGLISH if examples(p)], ids=name_of)
def test_the_python_of_a_page_runs(path, place, monkeypatch):
    rng = np.random.default_rng(0)
    monkeypatch.chdir(place)
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    shutil.rmtree("outputs/mine", ignore_errors=True)
    shutil.rmtree("outputs/perceptron", ignore_errors=True)
    shutil.rmtree("outputs/readme", ignore_errors=True)
    for count, split in ((64, "train"), (40, "test")):  # what the example of one's own images reads
        (place / "my-images").mkdir(exist_ok=True)
        images = rng.integers(0, 256, (count, 28, 28), np.uint8)
        np.savez(place / f"my-images/{split}.npz", images=images, labels=rng.integers(0, 10, count))
    for code in examples(path):
        if any(word in code for word in TAKEN_HOME):  # with weights of its own, above
            continue
        code = code.replace('require("tpu")', 'require("any")').replace('/ "mshnet"', '/ "readme"')
        code = code.replace("epochs=400", "epochs=1, base_size=32, crop_size=32, batch_size=4")
        code = code.replace(', model_name="resnet18")', ', model_name="test_resnet", epochs=8)')
        code = code.replace("epochs=8", 'epochs=1, image_size=32, batch_size=4, pretrained="no"')
        exec(compile(code, path.name, "exec"), {"__name__": "__main__"})


@pytest.mark.slow
@pytest.mark.parametrize("command", chosen())
def test_a_command_of_the_pages_runs_as_it_stands(command, place, monkeypatch, capfd):
    monkeypatch.chdir(place)
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    shutil.rmtree("outputs/new", ignore_errors=True)
    words = smaller(command)
    if any("*" in word for word in words) and not list(place.glob("outputs/comparison/*.json")):
        assert cli.main(smaller("tpukit compare mnist --dataset-dir datasets/mnist")) == 0
    words = [path for word in words for path in (sorted(glob.glob(word)) if "*" in word else [word])]
    code = cli.main(words)
    output = capfd.readouterr()
    assert "Traceback" not in output.err
    # doctor and migrate end with 1 where they found something.
    allowed = {0, 1} if words[0] in ("doctor", "migrate") else {0}
    refusal = "tpukit: found neither a TPU nor a GPU to check" if "--hardware" in words else "no refusal"
    assert "tpukit: " not in output.err.replace(refusal, "")
    assert code in allowed, f"{words}: {output.err[-2000:]}"


# Without `tpukit emulate`, whose words after the machine are another program's
@pytest.mark.parametrize(
    "command", sorted(one for one in {*written()} - {*chosen()} if not one.startswith("tpukit emulate"))
)
def test_a_command_whose_options_are_run_elsewhere_is_understood(command, monkeypatch, capfd):
    from tpukit_tools.cli import commands

    called = []
    for name, function in list(commands.COMMANDS.items()):
        stub = functools.wraps(function)(lambda *args, **settings: called.append(settings))
        monkeypatch.setitem(commands.COMMANDS, name, stub)
    words = smaller(f"tpukit {command.partition('tpukit ')[2]}")
    assert cli.main(words) == 0 and len(called) == 1, capfd.readouterr().err
    if "--" not in words:  # which ends the options
        assert cli.main([*words, "--no-such-option"]) == 2


@pytest.mark.slow
def test_the_loop_by_hand_of_the_tpu_guide_trains_mnist(place):
    pytest.importorskip("torch_xla", reason="torch_xla is not installed")
    codes = re.findall(r"```py\n(.*?)```", (ROOT / "docs/TPU_GUIDE.md").read_text(), flags=re.DOTALL)
    theirs = re.findall(r"```py\n(.*?)```", (ROOT / "docs/TPU_GUIDE.zh-CN.md").read_text(), flags=re.DOTALL)
    assert codes == theirs
    (code,) = [code for code in codes if "_mp_fn" in code]
    (place / "mp_mnist.py").write_text(code)
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PJRT_DEVICE": "CPU"}
    command = [*warm.python(), "mp_mnist.py"]
    ran = subprocess.run(command, cwd=place, env=environ, capture_output=True, text=True, timeout=300)
    losses = [float(loss) for loss in re.findall(r"core 0, epoch \d: loss ([\d.]+)", ran.stdout)]
    assert len(losses) == 2 and losses[1] < losses[0], ran.stdout + ran.stderr[-2000:]
