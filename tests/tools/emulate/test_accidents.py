"""Accidents on two emulated chips: kills, a core that raises or hangs, an interrupt, a taken chip. Each
is a sentence, and a resumed run is the straight one."""

import os
import random
import signal
import time

import pytest

from tests.conftest import exact, wait_for
from tests.tools.emulate import programs
from tests.tools.emulate.conftest import PROGRAMS, children
from tpukit import Run

pytestmark = [pytest.mark.slow, pytest.mark.nightly]
KILLS = 30


def training(run, digits):
    """The arguments by which a run is trained, or resumed."""
    command = ("-m", "tpukit", "train", "mnist", "--run", run, "--dataset-dir", digits)
    return (*command, *programs.OPTIONS)


@pytest.fixture(scope="module")
def straight(digits, tmp_path_factory):
    """What a run without accidents logs."""
    made = []

    def records(emulator):
        if not made:
            run = tmp_path_factory.mktemp("straight") / "run"
            emulator.run(2, *training(run, digits))
            made.append(exact(Run(run)))
        return made[0]

    return records


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_runs_that_are_killed_at_random_moments_become_the_straight_run(emulator, straight, digits, tmp_path):
    """The command, the training process or a core is killed, while they start or after some steps."""
    wanted, chance, kills, runs = straight(emulator), random.Random(0), 0, 0
    while kills < KILLS:
        run = tmp_path / f"{runs}"
        records = run / "records.jsonl"
        process = emulator.start(2, *training(run, digits))
        steps = len(Run(run).records("train")) + chance.randint(1, 6) if records.exists() else 1
        until = time.monotonic() + (chance.uniform(0, 8) if chance.random() < 0.25 else 500)

        def is_due(run=run, records=records, process=process, steps=steps, until=until):
            is_there = records.exists() and len(Run(run).records("train")) >= steps
            return is_there or time.monotonic() > until or process.poll() is not None

        wait_for(is_due, timeout_s=600)
        time.sleep(chance.uniform(0, 0.3))
        victims = [process.pid]
        for _ in range(2):  # the training process, the cores
            victims += [child for victim in victims[-2:] for child in children_of(victim)]
        victim = chance.choice(victims)
        if process.poll() is None:
            kill(victim)
            kills += 1
        text, _ = process.communicate(timeout=300)
        if process.returncode == 0:
            assert exact(Run(run)) == wanted, text
            runs += 1
    emulator.run(2, *training(run, digits))
    assert exact(Run(run)) == wanted
    assert runs >= 2


def children_of(pid):
    try:
        return children(pid)
    except OSError:  # it ended meanwhile
        return []


def kill(pid):
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


@pytest.mark.parametrize(
    "kind, words",
    [
        ("raises", ["core 1 (rank 1)", "failed", "ValueError: sample 7 is broken"]),
        ("hangs", ["no core completed a step for 5 s", "in accident", "core 0", "core 1"]),
        ("dies", ["core 1", "SIGKILL"]),
        ("opened", ["Runtime is already initialized", "Restart the session"]),
    ],
)
def test_what_went_wrong_on_a_core_is_told_and_no_process_stays(kind, words, emulator):
    text = emulator.run(2, PROGRAMS, "accident", kind, code=1)
    for word in words:
        assert word in text, text
    assert "left: []" in text


def test_an_interrupted_run_saves_a_step_of_all_chips_and_resumes(emulator, straight, digits, tmp_path):
    process = emulator.start(2, *training(tmp_path / "run", digits))
    records = tmp_path / "run" / "records.jsonl"
    wait_for(lambda: records.exists() and len(Run(tmp_path / "run").records("train")) > 5, process)
    os.killpg(process.pid, signal.SIGINT)
    text, _ = process.communicate(timeout=300)
    assert process.returncode == 130 and "Traceback" not in text, text
    emulator.run(2, *training(tmp_path / "run", digits))
    assert exact(Run(tmp_path / "run")) == straight(emulator)


@pytest.mark.parametrize("chips", [1, 2])
def test_a_chip_that_another_process_holds_is_a_sentence(chips, emulator, digits, tmp_path):
    text = emulator.run(chips, PROGRAMS, "beside_a_holder", *training(tmp_path / "run", digits), code=1)
    assert "tpukit: " in text and "Device or resource busy" in text, text
    assert "`tpukit doctor` names it" in text and "Traceback" not in text, text


def test_a_notebook_that_opened_a_chip_trains_on_it_alone(emulator, digits, tmp_path):
    text = emulator.run(1, PROGRAMS, "after_opening", tmp_path / "run", digits)
    assert Run(tmp_path / "run").records("start")[0]["accelerator"] == "tpu", text
