"""The pages: commands and examples run, links lead somewhere, both languages agree, Chinese by the glossary, known errors."""

import ast
import glob
import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import numpy as np
import pytest

from tests.conftest import ROOT
from tpukit import CDEIT, MNIST, MSHNet, Run, cli, train
from tpukit.devices.runtime import Runtime
from tpukit.host import known_errors

GLOSSARY = ROOT / "docs/GLOSSARY.md"  # one page for both languages
ENGLISH = sorted([ROOT / "README.md", *(p for p in (ROOT / "docs").glob("*.md") if ".zh-CN" not in p.name and p != GLOSSARY)])
PAGES = [page for path in ENGLISH for page in (path, path.with_name(path.name.replace(".md", ".zh-CN.md")))]
CHINESE = [page for page in PAGES if ".zh-CN" in page.name]
HAN = r"[\u3000-\u303f\u4e00-\u9fff\uff00-\uffef]"  # characters between which a line break would render as a blank
# What makes each workload small, and numbers that would make a command long -> what the test takes.
TINY = {
    "mshnet": {"--base-size": "32", "--crop-size": "32", "--batch-size": "4"},
    "mnist": {"--batch-size": "8"},
    "cdeit": {"--patch": "16", "--width": "16", "--heads": "2", "--window": "4", "--levels": "1", "--batch-size": "4"},
}
SMALL = {option: value for options in TINY.values() for option, value in options.items() if option != "--batch-size"}
SMALL |= {"--epochs": "1", "--warm-epoch": "0", "--steps": "2", "--trace": "2", "--cores": "1", "--sampling-steps": "1"}
SMALL |= {"--batch-size": "4", "--global-batch-size": "4", "--samples": "6", "--test-samples": "3"}
# Not run here: what compiles for a TPU for minutes and needs the network (tests/test_plan.py runs it), what rents machines
# (tests/tools/ covers it), and a model of 110 million parameters (tests/test_cdeit.py: a smaller one).
ELSEWHERE = ("tpukit plan", "tpukit cloud", "tpukit rent", "tpukit doctor --model cdeit")


def name(path):
    return str(path.relative_to(ROOT))


def commands(path):
    """The tpukit commands of a page's code blocks, without their comments, with what stands before them."""
    lines = [line for line in path.read_text().splitlines() if re.match(r"(    )?(\w+=\S+ |timeout \S+ )*tpukit \w", line)]
    return [shlex.join(shlex.split(line, comments=True)) for line in lines]


def headings(path):
    return [line for line in path.read_text().splitlines() if re.match(r"#+ ", line)]


def anchor(heading):
    return re.sub(r"[^\w\- ]", "", heading.lstrip("# ").lower()).replace(" ", "-")


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_every_page_is_there_and_begins_with_a_way_to_its_other_language(path):
    other = path.with_name(
        path.name.replace(".zh-CN.md", ".md") if ".zh-CN" in path.name else path.name.replace(".md", ".zh-CN.md")
    )
    top = "\n".join(path.read_text().splitlines()[:8])
    assert f"({other.name})" in top


@pytest.mark.parametrize("path", ENGLISH, ids=name)
def test_both_languages_have_the_same_headings_levels_and_commands(path):
    other = path.with_name(path.name.replace(".md", ".zh-CN.md"))
    assert [h.split()[0] for h in headings(path)] == [h.split()[0] for h in headings(other)]
    assert commands(path) == commands(other)
    assert len(re.findall(r"[\u4e00-\u9fff]", other.read_text())) > 300


def figures(path):
    """The numbers of a page outside its code, as floats; those below 100 without a fraction may be words in one language."""
    code = r"```.*?```|^    .*?$|`[^`\n]*`|\]\([^)]*\)|^\[[\w-]+\]: .*?$"
    text = re.sub(code, " ", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    found = set()
    for number, unit in re.findall(r"(\d[\d,]*(?:\.\d+)*(?:e-?\d+)?)(?: ?(million|M\b|万|亿))?", text):
        if number.count(".") > 1:  # a version
            found.add(number)
            continue
        value = float(number.replace(",", "")) * {"million": 1e6, "M": 1e6, "万": 1e4, "亿": 1e8}.get(unit, 1)
        if value >= 100 or value % 1:
            found.add(float(f"{value:.9g}"))
    return found


@pytest.mark.parametrize("path", ENGLISH, ids=name)
def test_both_languages_state_the_same_figures(path):
    ours, theirs = figures(path), figures(path.with_name(path.name.replace(".md", ".zh-CN.md")))
    assert ours == theirs, f"in English alone: {ours - theirs}; in Chinese alone: {theirs - ours}"


@pytest.mark.parametrize("path", [ROOT / "README.md", ROOT / "README.zh-CN.md"], ids=name)
def test_a_readme_is_read_in_a_minute(path):
    assert len(path.read_text().splitlines()) <= 150


@pytest.mark.parametrize("path", CHINESE, ids=name)
def test_no_line_breaks_between_chinese_characters(path):
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    broken = re.findall(rf"^(?![#|]|    ).*{HAN}\n *{HAN}.*$", text, flags=re.MULTILINE)
    assert not broken


def banned_words():
    """(words that Chinese pages may not use, the term to use) of every row of the glossary."""
    rows = [line.strip("|").split("|") for line in GLOSSARY.read_text().splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in row] for row in rows[2:]]
    return {word: row[1] for row in rows for word in row[3].split("、") if word}


@pytest.mark.parametrize("path", CHINESE, ids=name)
def test_a_chinese_page_uses_the_words_of_the_glossary(path):
    banned = banned_words()
    assert len(banned) > 10
    text = path.read_text()
    assert not {word: f"use {term}" for word, term in banned.items() if word in text}


@pytest.mark.parametrize("path", CHINESE, ids=name)
def test_links_of_a_chinese_page_lead_to_chinese_pages(path):
    own = path.name.replace(".zh-CN.md", ".md")
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+\.md[^)\s]*)\)", path.read_text())]
    wrong = [t for t in targets if "://" not in t and not t.endswith((".zh-CN.md", "GLOSSARY.md")) and t != own]
    assert not wrong


@pytest.mark.parametrize("path", [*PAGES, GLOSSARY], ids=name)
def test_every_link_within_the_repository_leads_to_a_file_and_a_heading(path):
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            assert target.startswith("https://"), target
            continue
        file, _, part = target.partition("#")
        found = (path.parent / file).resolve() if file else path
        assert found.exists(), f"{target} in {path.name}"
        if part:
            assert part in map(anchor, headings(found)), f"{target} in {path.name}"


def test_the_page_of_what_goes_wrong_is_what_the_library_says():
    assert (ROOT / "docs/TROUBLESHOOTING.md").read_text() == known_errors.page(), (
        "python -m tpukit.host.known_errors > docs/TROUBLESHOOTING.md"
    )
    chinese = headings(ROOT / "docs/TROUBLESHOOTING.zh-CN.md")[1:]
    assert chinese == [f"## {trouble.said}" for trouble in known_errors.TROUBLES]


@pytest.mark.parametrize("trouble", [t for t in known_errors.TROUBLES if t.pattern], ids=lambda t: t.said[:40])
def test_an_error_is_recognised_by_the_text_that_the_page_shows_and_gets_that_mend(trouble, capsys):
    assert known_errors.fix_for(trouble.said) == trouble.fix
    assert cli.main(["doctor", "--error", f"Traceback\n{trouble.said}\n at line 3"]) == 0
    assert trouble.fix in capsys.readouterr().out


def test_a_text_that_is_no_error_of_its_own_is_known_to_doctor_and_an_unknown_one_is_not(capsys):
    assert cli.main(["doctor", "--error", "E1121 Could not set metric server port: 8431"]) == 0
    assert "Harmless" in capsys.readouterr().out
    assert known_errors.fix_for("Could not set metric server port") is None  # whatever raised it has another cause
    assert cli.main(["doctor", "--error", "the moon is full"]) == 1
    assert "not known here" in capsys.readouterr().out


# What users posted, as their threads have it -> the code of its entry.
THREADS = {
    # huggingface/accelerate #3358
    "FileNotFoundError: [Errno 2] No such file or directory: 'nvidia-smi'": "gpu-expected",
    # huggingface/trl #4182
    "AttributeError: module 'torch' has no attribute 'xla'": "checkpointing",
    # pytorch/xla #9614
    "ValueError: Failed to deserialize the Mosaic module: INTERNAL: Unsupported version: expected <= 7 but got 8": "mosaic",
    # pytorch/xla #8591
    'File "/usr/lib/python3.10/concurrent/futures/process.py", line 611, in __init__\n'
    'raise ValueError("max_workers must be greater than 0")\nValueError: max_workers must be greater than 0': "no-chip-on-bus",
    # pytorch/xla #8960
    "Everyting installs correct but execution can't find TPU?": "no-chip",
    # pytorch/xla #8626
    "WARNING:root:Defaulting to PJRT_DEVICE=CPU": "cpu-instead",
    # pytorch/xla #9753
    "RuntimeError: Bad StatusOr access: INTERNAL: Failed to get global TPU topology.": "no-chip",
    "ModuleNotFoundError: No module named 'torch_xla'": "no-torch-xla",
    # pytorch/xla #5010, #4974
    "ERROR: torch_xla-2.0-cp39-cp39-linux_x86_64.whl is not a supported wheel on this platform.": "old-wheel",
    # ronghanghu/vit_10b_fsdp_example #1
    "python3: No module named torch_xla.distributed.xla_dist": "xla-dist",
    # huggingface/accelerate #940
    "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the 'spawn' "
    "start method": "cuda-fork",
    # Kaggle/kaggle-cli #1197
    "`kaggle kernels push` accepts `enable_tpu`/`machine_shape` for TPU but silently provisions the standard (non-TPU) image": (
        "kaggle-push"
    ),
    # AI-Hypercomputer/cloud-accelerator-diagnostics #9, #6
    "The `!tpu-info` can only detect TPU chips on Kaggle and can't show utilization": "tpu-info",
    "Libtpu metrics unavailable. Is there a framework using the TPU? See https://github.com/google/"
    "cloud-accelerator-diagnostics/tree/main/tpu_info for more information": "tpu-info",
    "Backend 'tpu' failed to initialize: UNKNOWN: TPU initialization failed: No jellyfish device found.": "no-chip",
    "RuntimeError: missing required environment variables for distributed training: TORCH_TPU_SLICEBUILDER_ADDRESSES, "
    "TORCH_TPU_TOPOLOGY; please run the program via torchrun or similar tools": "torch-tpu-launch",
    "ValueError: Cannot set TPU device to index 1, current process is bound to device index 0. Changing the active TPU device "
    "within a process is not supported.": "torch-tpu-device",
    # of torch_tpu, where module and symbol differ from one report to the next
    "torch_tpu._internal is internal to TorchTPU": "torch-tpu-internal",
    "ImportError: /usr/local/lib/python3.12/site-packages/torch_tpu/_C.so: undefined symbol: _ZN3c105ErrorC1ENS_14Source": (
        "torch-tpu-symbol"
    ),
    # pytorch/xla #9524, #6611
    "RuntimeError: Bad StatusOr access: RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space "
    "vmem. Used 32.42M of 16.00M vmem. Exceeded vmem capacity by 16.42M": "vmem",
    "EXHAUSTED: Ran out of memory in memory space vmem while allocating on stack for %reduce-window.1": "vmem",
    # Lightning-AI/pytorch-lightning #20244
    "RuntimeError: Bad StatusOr access: UNKNOWN: TPU initialization failed: Invalid --2a886c8_slice_builder_worker_addresses "
    "specified. Expected 4 worker addresses, got 1.": "worker-addresses",
    # Kaggle/docker-python #1499
    "pjrt_c_api_helpers.cc:258] Unexpected error status Unexpected PJRT_Plugin_Attributes_Args size: expected 32, got 24.": (
        "versions"
    ),
    # pytorch/xla #2538
    "ImportError: /opt/conda/lib/python3.7/site-packages/_XLAC.cpython-37m-x86_64-linux-gnu.so: undefined symbol: "
    "_ZN5torch11CppFunctionC1EN3c1014KernelFunctionE": "versions",
    # pytorch/xla #6568
    "requests.exceptions.HTTPError: 404 Client Error: Not Found for url: "
    "http://metadata.google.internal/computeMetadata/v1/instance/attributes/tpu-env": "metadata",
    # pytorch/xla #8234
    "BrokenProcessPool: A process in the process pool was terminated abruptly while the future was running or pending.": (
        "broken-pool"
    ),
    # huggingface/accelerate #2893
    "Launching training on 8 GPUs.": "gpu-expected",
    "RuntimeError: Runtime is already initialized. Do not use the XLA device before calling xmp.spawn.": "runtime-open",
    "ValueError: Unsupported nprocs (8). Please use nprocs=1 or None (default).": "nprocs",
    "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 18.10G of 15.75G hbm.": (
        "device-memory"
    ),
}


@pytest.mark.parametrize("text", THREADS)
def test_a_text_of_a_users_thread_gets_its_own_entry(text, capsys):
    assert known_errors.known(text).code == THREADS[text]
    assert cli.main(["doctor", "--error", text]) == 0 and capsys.readouterr().out.strip() == known_errors.about(text)


def test_every_trouble_has_a_code_of_its_own_and_torch_tpu_is_said_to_be_unsupported():
    codes = [trouble.code for trouble in known_errors.TROUBLES]
    assert len(set(codes)) == len(codes) and set(THREADS.values()) <= set(codes)
    assert all("not support torch_tpu" in t.fix for t in known_errors.TROUBLES if t.code.startswith("torch-tpu"))


# How people name what they met, as in forums and in the lists of the platforms -> a word of what they have to be told.
OWN_WORDS = {
    "Unexpected PJRT_Client_Create_Args size: expected 64, got 56": "do not match",
    "NotImplementedError: Could not run 'aten::empty.memory_format' with arguments from the 'XLA' backend": "CPU copies",
    "ImportError: cannot import name 'xrt_world_size'": "gone",
    "KeyError: 'COLAB_TPU_ADDR'": "gone",
    "TensorFlow conflict": "tensorflow-cpu",
    "save hangs on master only": "on all ranks",
    "hang at epoch end": "same number of steps",
    "DataLoader workers freeze after fork": "num_workers=0",
    "every core sees the same data": "DistributedSampler",
    "recompiles every step": "same shape",
    "minutes-long first step": "Wait for it",
    "slower than a GPU": "larger batch",
    "fp16 on XLA": "bf16",
    "checkpoint will not load off-TPU": "CPU copies",
    "batch run silently on CPU": "env.require",
}


@pytest.mark.parametrize("asked", OWN_WORDS)
def test_doctor_understands_an_error_by_a_users_own_words(asked):
    assert OWN_WORDS[asked] in known_errors.about(asked)


@pytest.mark.parametrize("asked", ["loss 0.5 at step 3", "File tensorflow/python/x.py line 3", "how do I save the model?"])
def test_doctor_does_not_guess(asked):
    assert known_errors.about(asked) is None


@pytest.mark.skipif(not shutil.which("make"), reason="no make here")
@pytest.mark.parametrize(
    "lacking, said",
    [("sys.version_info = (3, 10, 13)", "3.11 to 3.13"), ("sys.modules['ensurepip'] = None", "apt install python3-venv")],
)
def test_make_says_what_a_python_lacks_before_it_installs_anything(lacking, said, tmp_path):
    for file in ("Makefile", "requirements.txt", "pyproject.toml"):
        shutil.copy(ROOT / file, tmp_path)
    python = tmp_path / "python"  # answers `-c PROGRAM` alone
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "import sys; {lacking}; exec(sys.argv[2])" "$@"\n')
    python.chmod(0o755)
    ran = subprocess.run(["make", "test", f"PYTHON={python}"], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode and said in ran.stdout and not (tmp_path / ".venv").exists()


# Running what the pages say


def smaller(command):
    """The command with numbers that let it end in seconds."""
    words = shlex.split(command)[1:]
    words = [SMALL.get(before, word) for before, word in zip(["", *words], words)]
    words = ["outputs/new" if before == "--out" else word for before, word in zip(["", *words], words)]
    if words[0] == "compare" and "--plan" in words:  # which asks a compiler for minutes
        words = words[: words.index("--plan")]
    if words[0] in ("train", "compare") and words[1] in TINY:
        wanted = TINY[words[1]] | ({"--epochs": "1", "--run": "outputs/new"} if words[0] == "train" else {})
        given = {"--batch-size" if word in ("--global-batch-size", "--batch-sizes") else word for word in words}
        words += [part for option, value in wanted.items() if option not in given for part in (option, value)]
    return words


def unique():
    kept = dict.fromkeys(command for path in ENGLISH for command in commands(path))
    return [c for c in kept if not c.startswith(ELSEWHERE)]


def alone():
    return [c for c in unique() if c.startswith("tpukit")]


def test_there_are_commands_to_run_and_they_are_made_small():
    assert len(unique()) > 10
    small = smaller("tpukit train mshnet --epochs 400 --lr 0.05")
    assert small[:6] == ["train", "mshnet", "--epochs", "1", "--lr", "0.05"] and small[6:8] == ["--base-size", "32"]


@pytest.fixture(scope="module")
def place(tmp_path_factory, digits, infrared, tank):
    """A folder as a reader's would be: datasets, finished runs, code of the reader's own."""
    folder = tmp_path_factory.mktemp("reader")
    shutil.copytree(digits, folder / "datasets/mnist")
    shutil.copytree(infrared, folder / "datasets/IRSTD-1k")
    (folder / "IRSTD-1k").symlink_to("datasets/IRSTD-1k")
    shutil.copytree(tank, folder / "data")
    (folder / "data/data2017").symlink_to("test")
    tiny = dict(patch=16, width=16, heads=2, window=4, levels=1)
    for kind, data, sizes in (
        (MNIST, "datasets/mnist", {}),
        (MSHNet, "datasets/IRSTD-1k", dict(base_size=32, crop_size=32, warm_epoch=0)),
        (CDEIT, "data", tiny),
    ):
        task = kind(dataset_dir=folder / data, epochs=1, batch_size=4, **sizes)
        train(task, Run.open(folder / "outputs" / task.name, task), runtime=Runtime("cpu"), progress=False)
    code = "import torch\n\nmodel = torch.nn.Linear(3, 1).cuda()\n"
    cell = dict(cell_type="code", id="a", metadata={}, outputs=[], execution_count=None, source=code)
    book = json.dumps(dict(cells=[cell], metadata={}, nbformat=4, nbformat_minor=5))
    for name, text in (("train.py", code), ("src/model.py", code), ("notebook.ipynb", book), ("notebooks/one.ipynb", book)):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("command", sorted(set(unique()) - set(alone())))
def test_a_command_with_something_before_it_runs_as_it_stands(command, place, monkeypatch):
    before, _, rest = command.partition("tpukit ")
    words = smaller(f"tpukit {rest}")
    if "--cores" in words:
        words[words.index("--cores") + 1] = "2"  # in a process of its own it can
    monkeypatch.chdir(place)
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    shutil.rmtree("outputs/new", ignore_errors=True)
    line = f"{before}{shlex.quote(sys.executable)} -m tpukit {shlex.join(words)}"
    ran = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert ran.returncode == 0 and "Scores" in ran.stdout, ran.stdout + ran.stderr


def examples(path):
    return re.findall(r"```python\n(.*?)```", path.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("path", [p for p in ENGLISH if examples(p)], ids=name)
def test_the_python_of_both_languages_is_the_same(path):
    other = path.with_name(path.name.replace(".md", ".zh-CN.md"))
    ours, theirs = ([ast.dump(ast.parse(re.sub('""".*?"""', "pass", code))) for code in examples(p)] for p in (path, other))
    assert ours == theirs


@pytest.mark.parametrize("path", [p for p in ENGLISH if examples(p)], ids=name)
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
        code = code.replace('require("tpu")', 'require("cpu")').replace('/ "mshnet"', '/ "readme"')
        code = code.replace("epochs=400", "epochs=1, base_size=32, crop_size=32, batch_size=4")
        exec(compile(code, path.name, "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("command", alone())
def test_a_command_of_the_pages_runs_as_it_stands(command, place, monkeypatch, capfd):
    monkeypatch.chdir(place)
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    shutil.rmtree("outputs/new", ignore_errors=True)
    words = smaller(command)
    if any("*" in word for word in words) and not list(place.glob("outputs/comparison/*.json")):
        assert cli.main(smaller("tpukit compare mnist --dataset-dir datasets/mnist")) == 0
    words = [found for word in words for found in (sorted(glob.glob(word)) if "*" in word else [word])]
    code = cli.main(words)
    said = capfd.readouterr()
    assert "Traceback" not in said.err
    allowed = {0, 1} if words[0] in ("doctor", "migrate") else {0}  # which end with 1 where they found something
    assert "tpukit: " not in said.err
    assert code in allowed, f"{words}: {said.err[-2000:]}"
