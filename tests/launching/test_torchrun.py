"""`launch` under torchrun, on one host and on two."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.launching.conftest import CPU, are_gone, difference, losses, wait_for
from tests.launching.launched import children
from tpukit import MNIST, Run, train
from tpukit.devices.runtime import Runtime

pytestmark = pytest.mark.slow
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def train_command(data, run, *more):
    """The command after `torchrun ... -m`; `--` keeps torchrun from reading tpukit's options as its own."""
    settings = ["--batch-size", "8", "--channels", "4", "--log-every", "1", "--lr", "0.1", *more]
    return ["-m", "--", "tpukit", "train", "mnist", "--dataset-dir", str(data), "--run", str(run), *settings]


@pytest.fixture(scope="module")
def mnist_alone(odd, tmp_path_factory):
    task = MNIST(dataset_dir=odd, batch_size=8, channels=4, lr=0.1, log_every=1, epochs=2)
    run = Run.open(tmp_path_factory.mktemp("alone"), task)
    train(task, run, runtime=Runtime("cpu"), progress=False)
    return run


def test_the_same_command_runs_under_torchrun(odd, tmp_path, mnist_alone):
    command = [*TORCHRUN, "--nproc-per-node", "2", *train_command(odd, tmp_path / "run", "--epochs", "2")]
    ran = subprocess.run(command, cwd=ROOT, env=CPU, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert difference(losses(Run(tmp_path / "run")), losses(mnist_alone)) < 1e-4
    for words in ("dataset mnist:", "all 2 cores started", "whose weights are kept"):
        assert ran.stdout.count(words) == 1, words


def under_torchrun(program, folder, data):
    """A finished torchrun of two processes that run a program, after `task`, `run` and `launch` are known."""
    head = (
        "import os, weakref; from pathlib import Path; import torch.distributed as dist\n"
        "from tests.launching.launched import Watched; from tpukit import Run, launch, train\n"
        f"data, folder = Path({str(data)!r}), Path({str(folder)!r})\n"
    )
    (folder / "program.py").write_text(head + program)
    command = [*TORCHRUN, "--nproc-per-node", "2", str(folder / "program.py")]
    environ = {**CPU, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=300)


def test_no_thread_of_the_process_group_is_left_when_a_rank_ends(odd, tmp_path):
    program = """
groups = []
def function(task, run, runtime):
    groups.append(weakref.ref(dist.group.WORLD))
    return train(task, run, runtime=runtime)
task = Watched(dataset_dir=data, epochs=1)
launch(function, task, Run.open(folder / "run", task))
Path("left" + os.environ["RANK"]).write_text(str(groups[0]()))  # printed at once, lines would mix
"""
    ran = under_torchrun(program, tmp_path, odd)
    assert ran.returncode == 0, ran.stdout + ran.stderr[-3000:]
    assert [(tmp_path / f"left{rank}").read_text() for rank in range(2)] == ["None", "None"]


def test_torchruns_report_names_the_rank_that_failed_first(odd, tmp_path):
    program = """
task = Watched(dataset_dir=data, accident="raise")
launch(train, task, Run.open(folder / "run", task))
"""
    ran = under_torchrun(program, tmp_path, odd)
    assert ran.returncode == 1 and "in step 30: sample 7 is broken" in ran.stderr
    first = ran.stderr.split("Root Cause")[1]
    assert "rank      : 1" in first and "ValueError: sample 7 is broken" in first


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_the_ranks_end_with_torchruns_agent_however_it_ends(odd, tmp_path):
    run = tmp_path / "run"
    command = [*TORCHRUN, "--nproc-per-node", "2", *train_command(odd, run, "--epochs", "100000")]
    agent = subprocess.Popen(command, cwd=ROOT, env=CPU, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    ranks = []
    try:
        wait_for((run / "progress.json").exists, agent)
        ranks = children(agent.pid)
        assert len(ranks) == 2 and not are_gone(ranks, timeout_s=0)
        agent.kill()
        agent.wait()
        assert are_gone(ranks)
    finally:
        agent.kill()
        agent.wait()
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)


@pytest.fixture
def two_hosts():
    """Two network namespaces with a link between them: their names and addresses."""
    if os.getuid() != 0 or not shutil.which("ip"):
        pytest.skip("network namespaces need root and iproute2")
    tag = f"tk{os.getpid() % 100000}"
    names, addresses = [f"{tag}a", f"{tag}b"], ["10.213.7.1", "10.213.7.2"]

    def ip(*words):
        return subprocess.run(["ip", *words], check=True, capture_output=True)

    made = []
    try:
        try:
            for name in names:
                ip("netns", "add", name)
                made.append(name)
            link = f"link add link0 netns {names[0]} type veth peer name link0 netns {names[1]}"
            ip(*link.split())
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        for name, address in zip(names, addresses):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "link0")
            for device in ("link0", "lo"):
                ip("-n", name, "link", "set", device, "up")
        yield list(zip(names, addresses))
    finally:
        for name in made:
            ip("netns", "del", name)


def test_two_hosts_that_share_no_disk_train_as_one_and_resume(two_hosts, odd, tmp_path, mnist_alone):
    """Only the first host has the run; the second gets the checkpoint over the network."""

    def train_on_both(epochs, node_ranks=(0, 1)):
        first = two_hosts[node_ranks.index(0)][1]
        agents = []
        for host, ((name, address), node_rank) in enumerate(zip(two_hosts, node_ranks)):
            command = ["ip", "netns", "exec", name, *TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1"]
            command += ["--node-rank", str(node_rank), "--master-addr", first, "--master-port", "29511"]
            command += ["--local-addr", address]
            command += train_command(odd, tmp_path / f"host{host}", "--epochs", str(epochs))
            environ = {**CPU, "GLOO_SOCKET_IFNAME": "link0", "TPUKIT_CACHE": str(tmp_path / f"cache{host}")}
            pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            agents.append(subprocess.Popen(command, cwd=ROOT, env=environ, **pipes))
        printed = [agent.communicate(timeout=300) for agent in agents]
        return [agent.returncode for agent in agents], printed

    for epochs in (1, 2):
        codes, printed = train_on_both(epochs)
        assert codes == [0, 0], printed[0][1][-3000:] + printed[1][1][-3000:]
        assert "all 2 cores started" in printed[0][0] and "Scores" not in printed[1][0]
    run = Run(tmp_path / "host0")
    assert difference(losses(run), losses(mnist_alone)) < 1e-4
    assert [r["step"] for r in run.records("start")] == [0, 24]
    assert not (tmp_path / "host1/records.jsonl").exists() and not list(tmp_path.glob("host1/checkpoints/*"))
    codes, printed = train_on_both(3, node_ranks=(1, 0))
    assert codes == [1, 1] and "rank 1 has one of step 48" in printed[1][1], printed[1][1][-2000:]
