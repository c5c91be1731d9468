"""`tpukit emulate`: training on several emulated chips equals that on one, torch_xla's collectives are right,
and what cannot be had is said in a sentence."""

import math
import os
import signal
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.conftest import exact, refuses, wait_for
from tests.tools.emulate import programs
from tests.tools.emulate.conftest import PROGRAMS, answers, folder_of
from tpukit import Run
from tpukit_tools import cli, emulate

# Training


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Trains once for a number of chips."""
    done = {}

    def train(emulator, chips, digits):
        if chips not in done:
            run = tmp_path_factory.mktemp("run") / "run"
            text = emulator.run(chips, PROGRAMS, "train", run, digits)
            done[chips] = SimpleNamespace(run=Run(run), own=answers(text)[0]["own"], text=text)
        return done[chips]

    return train


@pytest.mark.slow
def test_two_chips_train_as_one(emulator, trained, digits):
    one, two = (trained(emulator, chips, digits) for chips in (1, 2))
    assert "2 emulated TPU v5e" in two.text and "cannot show speed" in two.text
    started = two.run.records("start")[0]
    assert (started["cores"], started["accelerator"]) == (2, "tpu")
    losses = [[r["loss"] for r in done.run.records("train")] for done in (one, two)]
    norms = [[r["grad_norm"] for r in done.run.records("train")] for done in (one, two)]
    assert len(losses[0]) == 24 and losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    # One graph of a step, which is replayed
    assert [r["what"] for r in two.run.records("compile")].count("step") == 1


@pytest.mark.slow
@pytest.mark.parametrize("clip, micro", programs.CHOICES)
def test_a_loop_of_ones_own_does_on_two_chips_what_it_does_on_one(clip, micro, emulator, trained, digits):
    one, two = (trained(emulator, chips, digits).own for chips in (1, 2))
    name = f"clip {clip}, {micro} micro-batches"
    assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6)
    assert one[name] != one["clip 0.1, 1 micro-batches" if clip is None else "clip None, 1 micro-batches"]


@pytest.mark.slow
@pytest.mark.parametrize("chips", [1, 2])
def test_a_gradient_of_one_chip_alone_is_shared(chips, emulator, trained, digits):
    assert trained(emulator, chips, digits).own["gradients"] == [[1.0] * 2, [1 / chips] * 2]


@pytest.mark.slow
def test_a_killed_run_on_two_chips_resumes_as_if_nothing_had_been_and_its_files_go(
    emulator, trained, digits, tmp_path
):
    straight = trained(emulator, 2, digits).run
    command = (
        "-m",
        "tpukit",
        "train",
        "mnist",
        "--run",
        tmp_path / "run",
        "--dataset-dir",
        digits,
        *programs.OPTIONS,
    )
    killed = emulator.start(2, *command)
    records = tmp_path / "run" / "records.jsonl"
    wait_for(lambda: records.exists() and len(Run(tmp_path / "run").records("train")) > 5, killed)
    folder = folder_of(killed)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert folder.exists() and len(Run(tmp_path / "run").records("train")) < 24
    emulator.run(2, *command)
    assert exact(Run(tmp_path / "run")) == exact(straight)
    assert not folder.exists()


@pytest.mark.slow
@pytest.mark.parametrize("chips", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_chips_without_libtpu_are_a_sentence_and_no_training_on_the_cpu(chips, emulator, digits, tmp_path):
    command = ("-m", "tpukit", "train", "mnist", "--run", tmp_path / "run", "--dataset-dir", digits)
    text = emulator.run(chips, PROGRAMS, "without_libtpu", *command, code=1)
    [sentence] = [line for line in text.splitlines() if "libtpu" in line]
    assert sentence.startswith("tpukit: ") and "pip install" in sentence
    assert "Traceback" not in text and not (tmp_path / "run" / "records.jsonl").exists()


# torch_xla's own calls


@pytest.mark.slow
@pytest.mark.nightly
def test_collectives_give_what_they_are_defined_to_give(emulator):
    size = 4
    made = {answer["rank"]: answer["made"] for answer in answers(emulator.run(size, PROGRAMS, "collectives"))}
    assert sorted(made) == list(range(size))
    x = [[[6.0 * i + j + 100 * rank for j in range(6)] for i in range(size)] for rank in range(size)]
    rows = [[value % 7 + 1 for value in x[rank][0][:3]] for rank in range(size)]
    columns = [[row[j] for row in rows] for j in range(3)]
    summed = [[sum(x[r][i][j] for r in range(size)) for j in range(6)] for i in range(size)]
    flat = [x[r][k] for r in range(size) for k in (0, 1)]
    for rank, found in made.items():
        for kind in ("float32", "bfloat16", "float16", "int64"):
            for name, of in (("SUM", sum), ("MIN", min), ("MAX", max), ("MUL", math.prod)):
                assert found[f"{name} torch.{kind}"] == list(map(of, columns)), (name, kind)
        assert found["AND"] == [False, True, False] and found["OR"] == [True, True, False]
        assert found["gather 0"] == flat
        assert found["gather 1"] == [[v for r in range(size) for v in x[r][k]] for k in (0, 1)]
        for pin in (True, False):
            assert found[f"scatter 0 {pin}"] == [summed[rank]]
            assert found[f"scatter 1 {pin}"] == [[value] for value in summed[rank]]
            assert found[f"to all {pin}"] == [[v for r in range(size) for v in x[r][rank]]]
        assert found["permute"] == x[(rank - 1) % size]
        assert found["permute one"] == (x[0] if rank == 1 else [[0.0] * 6] * size)
        half = range(rank % 2, size, 2)
        assert found["groups"] == [[sum(x[r][i][j] for r in half) for j in range(6)] for i in range(size)]
        assert found["groups gather"] == [v for r in half for v in x[r][0]]


@pytest.mark.slow
@pytest.mark.nightly
def test_what_torch_xlas_examples_use_works_though_each_rank_has_another_program(emulator):
    by_rank = {answer["rank"]: answer for answer in answers(emulator.run(2, PROGRAMS, "helpers"))}
    assert [by_rank[rank]["closed"] for rank in (0, 1)] == [[4.0, 8.0, 12.0], [8.0, 12.0, 16.0]]
    assert [by_rank[rank]["mesh"] for rank in (0, 1)] == [3, 3]
    torch.manual_seed(0)  # rank 0's weights, trained on the mean of both gradients
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for k in range(3):
        optimizer.zero_grad()
        (sum(model(torch.full((1, 4), k + rank + 1.0)).square().sum() for rank in (0, 1)) / 2).backward()
        optimizer.step()
    for rank in (0, 1):
        assert by_rank[rank]["weights"][0] == pytest.approx(model.weight[0].tolist(), rel=1e-4)


@pytest.mark.slow
@pytest.mark.nightly
def test_spmd_on_eight_chips_computes_what_one_computes(emulator):
    (one,), (eight,) = (answers(emulator.run(chips, PROGRAMS, "spmd")) for chips in (1, 8))
    assert (one["count"], eight["count"]) == (1, 8)
    assert eight["losses"] == pytest.approx(one["losses"], rel=1e-5) and one["losses"][2] < one["losses"][0]


@pytest.mark.slow
@pytest.mark.nightly
def test_a_process_of_no_launch_owns_all_chips(emulator):
    assert answers(emulator.run(2, PROGRAMS, "alone")) == [dict(devices=2, sums=[0.0, 3.0])]


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(
    "how, words",
    [
        (
            "never",
            "an all-reduce of f32[3] f32[] was not reached within 5 s by rank 1, for which rank 0 waited",
        ),
        ("other", "rank 0 is in an all-reduce of f32[3] f32[], rank 1 in an all-reduce of f32[5] f32[]"),
    ],
)
def test_a_collective_that_a_rank_misses_ends_with_the_names_of_the_ranks(how, words, emulator):
    assert words in emulator.run(2, PROGRAMS, "part", how, code=1, outer=dict(TPUKIT_EMULATE_WAIT_S="5"))


@pytest.mark.slow
@pytest.mark.nightly
def test_hbm_is_counted_and_ends_with_libtpus_words(emulator):
    text = emulator.run(1, PROGRAMS, "memory", outer=dict(TPUKIT_EMULATE_HBM=f"{(18 << 20) + 4096}"))
    full, freed, never = answers(text)
    assert "RESOURCE_EXHAUSTED: Attempting to reserve 4.00M " in full["error"]
    # Four tensors of 4 MiB, and the numbers that were added
    assert len(full["used"]) == 4 and all(
        0 <= used - (k + 1 << 22) < 4096 for k, used in enumerate(full["used"])
    )
    after = freed["after"]
    assert after["bytes_used"] < (5 << 20) < (16 << 20) <= after["peak_bytes_used"] <= after["bytes_limit"]
    assert after["bytes_limit"] == (18 << 20) + 4096
    words = "Ran out of memory in memory space hbm. Used 4096.00G of 18.00M hbm"
    assert "RESOURCE_EXHAUSTED: XLA:TPU compile" in never["error"] and words in never["error"]


@pytest.mark.slow
@pytest.mark.nightly
def test_a_chip_that_another_process_holds_is_busy(emulator):
    program = (
        "import subprocess, sys, torch_xla; torch_xla.device()\n"
        "again = 'import torch_xla; torch_xla.device()'\n"
        "sys.exit(subprocess.run([sys.executable, '-c', again]).returncode != 0)"
    )
    text = emulator.run(1, "-c", program, code=1)  # torch_xla 2.8 aborts once more when it ends
    assert "open(/dev/vfio/0): Device or resource busy" in text


# The command


@pytest.mark.slow
@pytest.mark.parametrize(
    "end, code",
    [("sys.exit(0)", 0), ("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 128 + signal.SIGKILL)],
)
def test_the_exit_code_is_the_commands_and_nothing_stays(end, code, emulator):
    program = (
        "import os, sys; print(os.environ['TPUKIT_EMULATE_DIRECTORY']);"
        f"print(os.listdir({str(emulate.BUS)!r}), flush=True); {end}"
    )
    text = emulator.run(8, "-c", program, code=code)
    folder = next(line for line in text.splitlines() if line.startswith("/"))
    assert text.count("0009:00:") == 8 and emulate.PREFIX in folder and not Path(folder).exists()


@pytest.mark.slow
@pytest.mark.parametrize("number, send", [(signal.SIGTERM, os.kill), (signal.SIGINT, os.killpg)])
def test_sigterm_and_ctrl_c_end_the_command_and_nothing_stays(number, send, emulator, tmp_path):
    program = f"import pathlib, time; pathlib.Path({str(tmp_path / 'up')!r}).touch(); time.sleep(300)"
    process = emulator.start(1, "-c", program)
    wait_for((tmp_path / "up").exists, process)
    folder = folder_of(process)
    assert folder.is_dir()
    send(process.pid, number)
    process.communicate()
    assert process.returncode == 128 + number and not folder.exists()


@pytest.mark.parametrize(
    "line, words",
    [
        ("emulate v5e-8", "no command to run on v5e-8"),
        ("emulate v5e-3 true", "no emulated machine 'v5e-3'"),
        ("emulate train.py --use_tpu", "no emulated machine 'train.py'"),
    ],
)
def test_wrong_usage_ends_with_2_and_names_the_machines(line, words, capsys):
    assert cli.main(line.split()) == 2
    error = capsys.readouterr().err
    assert words in error and "|".join(emulate.MACHINES) in error and error.count("\n") == 1


def test_what_is_missing_is_said_in_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("CC", "no-such-cc")
    with refuses("no C compiler 'no-such-cc'", "apt install"):
        emulate.build(tmp_path / "libtpu.so")
    monkeypatch.setenv("CC", "false")
    with refuses("false cannot compile", "exit code 1"):
        emulate.build(tmp_path / "libtpu.so")
    for version in ("2.7.1", "2.11.0"):
        monkeypatch.setattr(emulate.importlib.metadata, "version", lambda _, version=version: version)
        with refuses("torch_xla 2.8 or 2.9", version, "pip install"):
            emulate.check_torch_xla()
    monkeypatch.setattr(
        emulate, "run_python", lambda *_: SimpleNamespace(returncode=1, stderr="no network\n")
    )
    with refuses(emulate.PLUGIN, "no network"):
        emulate.install_plugin()
    monkeypatch.setattr(emulate.ctypes, "CDLL", lambda *_, **__: SimpleNamespace(unshare=lambda flags: -1))
    with refuses("mount namespace", "as root"):
        emulate.run(["true"], {}, tmp_path, "")
    monkeypatch.setattr(emulate, "show", lambda bus: None)
    with refuses("cannot run no-such-program"):
        emulate.run(["no-such-program"], {}, tmp_path, "")
    monkeypatch.setattr(emulate, "BUS", tmp_path / "none")
    with refuses(tmp_path / "none", "this machine or container has none"):
        emulate.make_bus(tmp_path / "bus", 2)


def test_only_folders_of_emulations_that_ended_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ended, other = tmp_path / f"{emulate.PREFIX}ended", tmp_path / "tpukit-another"
    for folder in (ended, other):
        (folder / "inside").mkdir(parents=True)
    with emulate.working_folder() as first, emulate.working_folder() as second:
        assert first.is_dir() and second.is_dir() and first != second
        assert not ended.exists() and other.exists()
    assert not first.exists() and not second.exists()
