"""The loopback server is what the real `kaggle` command takes for Kaggle: every route, a real session, every
way to fail. What is tested against it (test_kaggle.py) rests on this."""

import csv
import io
import json
import sys

import pytest

from tests.tools.send import kaggle_server as loopback
from tests.tools.send.kaggle_server import KEY, TOKEN, USER
from tests.tools.send.kaggle_session import needs_sessions

pytest.importorskip("kaggle", reason="kaggle is not installed: pip install kaggle")
pytestmark = pytest.mark.slow


@pytest.fixture
def server(tmp_path):
    with loopback.Server(tmp_path / "kaggle") as server:
        yield server


@pytest.fixture
def kaggle(server, tmp_path):
    """Run `kaggle ...` in a shell that is logged in."""

    def run(*arguments, login="key", **more):
        environ = server.environ_of(tmp_path / f"home-{login}", login=login) | more
        return loopback.run([sys.executable, "-m", "kaggle", *arguments], environ, tmp_path)

    return run


@pytest.fixture
def folder(tmp_path):
    """Make what `kaggle kernels push -p` takes."""

    def make(*cells, slug="a-notebook", **more):
        folder = tmp_path / f"push-{slug}"
        folder.mkdir(exist_ok=True)
        (folder / "session.ipynb").write_text(loopback.notebook(*cells))
        metadata = dict(id=f"{USER}/{slug}", title=slug, code_file="session.ipynb", language="python")
        metadata |= dict(kernel_type="notebook", is_private=True, enable_internet=False) | more
        (folder / "kernel-metadata.json").write_text(json.dumps(metadata))
        return folder

    return make


def scripted(session):
    """A session that writes two files and three lines of log."""
    (session.working / "outputs/run").mkdir(parents=True)
    (session.working / "outputs/run/records.jsonl").write_text("{}\n")
    (session.working / "session.json").write_text("{}")
    for line in ("one\n", "two\n", "three\n"):
        session.say(line)


@needs_sessions
def test_a_pushed_notebook_runs_in_kaggles_folders_without_network_and_without_this_tree(
    server, kaggle, folder, tmp_path
):
    write = "import os, pathlib, socket\npathlib.Path('outputs').mkdir()\n"
    write += "pathlib.Path('outputs/a.txt').write_text(os.getcwd() + ' ' + os.environ['ISTPUVM'])"
    kaggle("kernels", "push", "-p", folder(write, slug="first-one"), "--accelerator", "TpuV5E8")
    server.wait()
    read = "print(open('/kaggle/input/notebooks/tester/first-one/outputs/a.txt').read())\nimport os, socket\n"
    read += "print(sorted(os.listdir('/sys/class/net')), os.environ['KAGGLE_KERNEL_RUN_TYPE'], end=' ')\n"
    # Not found, or the empty folder that hides it: it depends on how this tree is installed.
    read += "from importlib.util import find_spec\nfound = find_spec('tpukit')\nprint(found and found.origin)"
    change = "open('/kaggle/input/notebooks/tester/first-one/outputs/a.txt', 'w')"
    second = folder(read, change, slug="second-one", kernel_sources=[f"{USER}/first-one"])
    ran = kaggle("kernels", "push", "-p", second, "--timeout", "600")
    assert "successfully pushed" in ran.out and not ran.code
    followed = kaggle("kernels", "logs", "-f", f"{USER}/second-one").out
    server.wait()
    assert "/kaggle/working 1\n" in followed  # the machine's variables, and the first one's output
    assert "Batch None" in followed and "Read-only file system" in followed
    assert kaggle("kernels", "status", f"{USER}/first-one").out.split('"')[1] == "KernelWorkerStatus.COMPLETE"
    assert kaggle("kernels", "status", f"{USER}/second-one").out.split('"')[1] == "KernelWorkerStatus.ERROR"
    kaggle("kernels", "output", f"{USER}/first-one", "-p", tmp_path / "back")
    assert (tmp_path / "back/outputs/a.txt").read_text() == "/kaggle/working 1"
    assert server.pushed() == ["first-one", "second-one"] and server.hosts == set(loopback.HOSTS)


@needs_sessions
def test_a_session_ends_at_its_time_limit_or_when_it_is_killed_and_what_it_wrote_stays(
    server, kaggle, folder
):
    cell = "import time; open('a', 'w').write('kept')\nwhile True: time.sleep(0.1)"
    server.lives, server.alive_from = iter([lambda _, passed_s: passed_s > 0.5]), "a"
    kaggle("kernels", "push", "-p", folder(cell, slug="killed-one"))
    server.wait()
    kaggle("kernels", "push", "-p", folder(cell, slug="timed-out"), "--timeout", "2")
    server.wait()
    assert [session.files()["a"].read_text() for session in server.sessions] == ["kept"] * 2
    assert "exceeded the time limit" in kaggle("kernels", "status", f"{USER}/timed-out").out
    assert all(session.process.returncode for session in server.sessions)


def test_an_output_of_several_pages_and_the_log_come_back_whole(server, kaggle, folder, tmp_path):
    server.script, server.page_size = scripted, 1
    kaggle("kernels", "push", "-p", folder("1"))
    server.wait()
    assert len(server.calls("ListKernelSessionOutput")) == 0
    ran = kaggle("kernels", "output", f"{USER}/a-notebook", "-p", tmp_path / "back", "--page-size", "1")
    assert not ran.code and len(server.calls("ListKernelSessionOutput")) == 2, ran
    names = {path.relative_to(tmp_path / "back").as_posix() for path in (tmp_path / "back").rglob("*.json*")}
    assert names == {"session.json", "outputs/run/records.jsonl"}
    events = json.loads((tmp_path / "back/a-notebook.log").read_text())
    assert [event["data"] for event in events] == ["one\n", "two\n", "three\n"]
    assert kaggle("kernels", "logs", "-f", f"{USER}/a-notebook").out == "one\ntwo\nthree\n"


def test_the_log_of_a_running_session_is_a_stream_that_goes_on_after_a_lost_connection(
    server, kaggle, folder
):
    def slowly(session):
        session.say("begins\n")
        while len(server.calls("log")) < 2:
            assert not server.closing.wait(0.05)
        session.say("ends\n")

    server.script = slowly
    kaggle("kernels", "push", "-p", folder("1"))
    server.fail("log", "lost after")
    assert kaggle("kernels", "logs", "-f", f"{USER}/a-notebook").out == "begins\nends\n"


def test_the_quota_is_what_the_server_was_told(server, kaggle):
    rows = list(csv.DictReader(io.StringIO(kaggle("quota", "--format", "csv").out)))
    assert [(row["resource"], row["remaining"]) for row in rows] == [("GPU", "27.00h"), ("TPU", "18.00h")]
    assert rows[0]["refreshAt"] == "2026-12-01T00:00:00+00:00"


@pytest.mark.parametrize("login, header", [("key", "Basic "), ("token", "Bearer ")])
def test_both_ways_to_log_in_are_known_and_no_other(server, kaggle, login, header):
    assert not kaggle("quota", login=login).code
    assert server.calls("GetAcceleratorQuotaStatistics")[0].headers["Authorization"].startswith(header)
    assert USER in kaggle("config", "view", login=login).out
    ran = kaggle("quota", login="none")
    assert ran.code and "Authentication required" in ran.out
    ran = kaggle("quota", login="none", KAGGLE_USERNAME=USER, KAGGLE_KEY="wrong")
    assert ran.code and "Authentication required" in ran.out
    assert KEY not in ran.out and TOKEN not in ran.out


@pytest.mark.parametrize(
    "what, words",
    [
        (401, "Cannot access kernel"),
        (403, "Cannot access kernel"),
        (404, "404 Client Error"),
        (429, "429 Client Error"),
        (500, "500 Server Error"),
        (503, "503 Server Error"),
        ("lost", "RemoteDisconnected"),
        ("lost after", "RemoteDisconnected"),
        ("garbage", "Expecting value"),
    ],
)
def test_a_call_fails_as_it_was_told_and_the_next_one_succeeds(server, kaggle, folder, what, words):
    server.script = scripted
    kaggle("kernels", "push", "-p", folder("1"))
    server.fail("GetKernelSessionStatus", what)
    ran = kaggle("kernels", "status", f"{USER}/a-notebook")
    assert ran.code == 1 and words in ran.out + ran.err, ran
    assert not kaggle("kernels", "status", f"{USER}/a-notebook").code


def test_a_push_whose_answer_is_lost_has_happened_and_a_refused_one_has_not(server, kaggle, folder):
    server.script = scripted
    server.fail("SaveKernel", "lost after")
    assert kaggle("kernels", "push", "-p", folder("1")).code and server.pushed() == ["a-notebook"]
    server.push_error = "Maximum batch TPU session count of 1 reached."
    ran = kaggle("kernels", "push", "-p", folder("1", slug="another"))
    assert ran.out == f"Kernel push error: {server.push_error}\n" and not ran.code
    assert server.pushed() == ["a-notebook"]
    assert "Cannot access kernel" in kaggle("kernels", "status", f"{USER}/another").err


def test_a_source_that_is_no_output_is_left_out_with_a_word(server, kaggle, folder):
    server.script = scripted
    ran = kaggle("kernels", "push", "-p", folder("1", kernel_sources=[f"{USER}/none-such"]))
    assert "not valid kernel sources" in ran.out and not ran.code
    assert server.sessions[0].request["kernelDataSources"] == []


def test_half_a_file_is_refused_or_fetched_again_and_a_hostile_name_is_refused(
    server, kaggle, folder, tmp_path
):
    server.script = scripted
    kaggle("kernels", "push", "-p", folder("1"))
    server.wait()
    server.fail("file", "half")
    ran = kaggle("kernels", "output", f"{USER}/a-notebook", "-p", tmp_path / "back")
    whole = (tmp_path / "back/outputs/run/records.jsonl").read_text() == "{}\n"
    assert ran.code or whole, ran
    server.sessions[0].hostile = {"../../outside.txt": b"x"}
    ran = kaggle("kernels", "output", f"{USER}/a-notebook", "-p", tmp_path / "back2")
    assert ran.code and not list(tmp_path.glob("**/outside.txt"))
