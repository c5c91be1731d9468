"""Files and folders that appear whole or not at all, locks, and the cache folder."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from tests.conftest import refuses
from tpukit.data import arrays
from tpukit.host import files, waiting
from tpukit.host.folders import atomic_folder
from tpukit.runs.folder_lock import exclusive_lock


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The cache folder of a user who chose none."""
    monkeypatch.delenv("TPUKIT_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return files.cache_folder()


def test_a_lock_is_in_the_cache_folder_of_the_home_and_names_its_holder_and_empties_no_link(cache, tmp_path):
    with files.file_lock(tmp_path / "data"):
        (lock,) = (tmp_path / "home/.cache/tpukit").iterdir()
        assert lock.read_text() == f"process {os.getpid()} on {socket.gethostname()}"
    (tmp_path / "precious").write_text("mine")
    lock.unlink()
    lock.symlink_to(tmp_path / "precious")
    with files.file_lock(tmp_path / "data"):
        assert (tmp_path / "precious").read_text() == "mine"


HOLDER = """
import subprocess, sys, time
from pathlib import Path
from tpukit.host import files
work = dict(sleep=lambda: time.sleep(1000), compute=lambda: sum(range(10**11)),
            child=lambda: subprocess.run([sys.executable, "-c", "sum(range(10**11))"]))
with files.file_lock(Path(sys.argv[1])):
    print(flush=True)
    work[sys.argv[2]]()
"""


@pytest.fixture
def holder(tmp_path):
    """Start a process that holds the lock of tmp_path / "data" and does this work. Ended after the test."""
    with contextlib.ExitStack() as ended:

        def start(work):
            command = [sys.executable, "-c", HOLDER, tmp_path / "data", work]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
            ended.callback(process.wait)
            ended.callback(process.stdout.close)
            ended.callback(os.killpg, process.pid, signal.SIGKILL)
            process.stdout.readline()
            return process.pid

        yield start


def patient(monkeypatch, say_s, give_up_s):
    monkeypatch.setattr(waiting, "SAY_AFTER_S", say_s)
    monkeypatch.setattr(waiting, "GIVE_UP_AFTER_S", give_up_s)


@pytest.mark.parametrize("work", ["sleep", "compute"])
def test_a_lock_of_a_process_that_is_stopped_or_does_nothing_is_waited_for_aloud_and_not_without_end(
    work, holder, tmp_path, monkeypatch, capsys
):
    patient(monkeypatch, 0.2, 1.0)
    pid = holder(work)
    if work == "compute":
        os.kill(pid, signal.SIGSTOP)
    name = f"process {pid} on {socket.gethostname()}"
    with refuses(name, tmp_path / "data"), files.file_lock(tmp_path / "data"):
        pass
    assert capsys.readouterr().out == f"waiting for {name}, which is using {tmp_path / 'data'}\n"


@pytest.mark.parametrize("work", ["compute", "child"])
def test_a_lock_of_a_process_that_works_is_waited_for(work, holder, tmp_path, monkeypatch):
    patient(monkeypatch, 0.2, 1.5)
    pid = holder(work)
    started = time.monotonic()
    threading.Timer(4, os.killpg, (pid, signal.SIGKILL)).start()
    with files.file_lock(tmp_path / "data"):
        assert time.monotonic() - started >= 4


@pytest.mark.parametrize("home", ["/dev/null", ""])
def test_without_a_home_there_is_no_lock_and_a_cache_asks_for_a_folder(home, cache, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", home)
    if not home:  # a user without a name, in a container
        monkeypatch.delenv("HOME")
        monkeypatch.setattr(os, "getuid", lambda: 2**31)
    with files.file_lock(tmp_path / "data"):
        pass
    with refuses("TPUKIT_CACHE"):
        arrays.mapped("set", "key", dict)
    assert not list(tmp_path.iterdir())


def test_a_lock_ends_with_its_block_though_a_process_that_was_forked_in_it_lives_on(cache, tmp_path):
    with files.file_lock(tmp_path / "data"):
        pid = os.fork()
        if pid == 0:
            signal.pause()
    (lock,) = cache.iterdir()
    try:
        with exclusive_lock(lock):  # which would refuse
            pass
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_folder_has_the_mode_that_the_umask_gives_and_its_name_reaches_the_disk(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda opened: (synced.append(os.fstat(opened).st_ino), fsync(opened)))
    before = os.umask(0o077)
    try:
        with atomic_folder(tmp_path / "folder"):
            pass
    finally:
        os.umask(before)
    assert (tmp_path / "folder").stat().st_mode & 0o777 == 0o700
    files.write_atomic(tmp_path / "file", "text")
    assert synced == [place.stat().st_ino for place in (tmp_path, tmp_path / "file", tmp_path)]


def test_a_planted_link_is_not_written_through(tmp_path):
    (tmp_path / "precious").write_text("mine")
    for name in ("file", f".file.{os.getpid()}.partial"):
        (tmp_path / name).symlink_to(tmp_path / "precious")
    files.write_atomic(tmp_path / "file", "new")
    assert (tmp_path / "precious").read_text() == "mine" and (tmp_path / "file").read_text() == "new"


def test_a_folder_that_cannot_be_made_asks_for_another_one(tmp_path):
    (tmp_path / "taken").write_text("a file, where a folder is needed")
    with refuses(tmp_path / "taken", "another folder"), atomic_folder(tmp_path / "taken/set"):
        pass


def test_a_file_and_a_folder_appear_whole_or_not_at_all(tmp_path):
    above = tmp_path / "above"
    with pytest.raises(RuntimeError), atomic_folder(above / "folder") as work:
        (work / "half").touch()
        assert not (above / "folder").exists()
        raise RuntimeError("the process fell over")
    assert os.listdir(above) == []
    with atomic_folder(above / "folder") as work:
        (work / "all").touch()
    assert os.listdir(above) == ["folder"] and os.listdir(above / "folder") == ["all"]
    files.write_atomic(above / "file", "old")
    with pytest.raises(RuntimeError), files.atomic_file(above / "file") as file:
        file.write(b"half of the ne")
        raise RuntimeError("the process fell over")
    assert (above / "file").read_text() == "old" and sorted(os.listdir(above)) == ["file", "folder"]


def test_what_another_thread_is_writing_stays_where_the_rests_of_killed_processes_are_removed(tmp_path):
    rest = tmp_path / ".b.999999999.partial"
    rest.write_bytes(b"half")
    (tmp_path / ".c.999999999.partial").mkdir()  # nothing of `atomic_file`'s
    with files.atomic_file(tmp_path / "a") as file:
        file.write(b"whole")
        files.remove_partials(tmp_path)
        assert not rest.exists()
    assert (tmp_path / "a").read_bytes() == b"whole"
    assert sorted(os.listdir(tmp_path)) == [".c.999999999.partial", "a"]


def test_what_a_process_of_another_user_may_still_be_writing_stays(tmp_path, monkeypatch):
    theirs = tmp_path / ".a.1234.partial"
    theirs.touch()

    def refuse(pid, number):
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    files.remove_partials(tmp_path)
    assert theirs.exists()


NAMES = ["a", "n" * 235, "n" * 255, "\u8bad\u7ec3" * 42 + "abc", "a.1234.b.12345678", "caf\udce9" * 30]
HOSTS = ["", "12345", "vm.us-east1-b.c.project.internal", "h" * 64, "o/d\nd\u00e9 "]


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_up_to_255_bytes_is_written_and_what_a_killed_process_left_of_it_is_removed(
    name, host, tmp_path, monkeypatch
):
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    for folder in ("folder", "file"):
        (tmp_path / folder).mkdir()
    with atomic_folder(tmp_path / "folder" / name) as work:
        left = work.with_name(work.name.replace(f".{os.getpid()}.", ".999999999."))
        left.mkdir()
    with atomic_folder(tmp_path / "folder" / name):
        pass
    with files.atomic_file(tmp_path / "file" / name):
        (partial,) = (tmp_path / "file").iterdir()
        files.remove_partials(tmp_path / "file")
        assert partial.exists()
        partial.with_name(partial.name.replace(f".{os.getpid()}.", ".999999999.")).touch()
        files.remove_partials(tmp_path / "file")
        assert [*partial.parent.iterdir()] == [partial]
    assert os.listdir(tmp_path / "folder") == os.listdir(tmp_path / "file") == [name]


@pytest.mark.parametrize("there", ["elsewhere", "", "x.here"])
def test_what_another_host_writes_stays_until_it_stood_still_for_a_day(there, tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: there)
    with files.atomic_file(tmp_path / "a"):
        (partial,) = tmp_path.iterdir()
        theirs = partial.rename(partial.with_name(partial.name.replace(f".{os.getpid()}.", ".999999999.")))
        monkeypatch.setattr(socket, "gethostname", lambda: "here")
        now = time.time()
        for changed, stays in ((now, True), (now - 3600, True), (0, True), (now - 25 * 3600, False)):
            os.utime(theirs, (changed, changed))
            files.remove_partials(tmp_path)
            assert theirs.exists() == stays
        partial.touch()


def test_what_killed_processes_left_of_a_folder_is_gone_after_the_next_and_nothing_else(tmp_path):
    target = tmp_path / "set.v1"
    with atomic_folder(tmp_path / "set"), atomic_folder(target) as of_this_process:
        left = of_this_process.name.replace(f".{os.getpid()}.", ".999999999.")
        start, elsewhere = left[: -len("01234567.partial")], left.replace(socket.gethostname(), "elsewhere")
        for name in (left, elsewhere, f"{start}xx.partial", ".set.v1.original", f"x{left}"):
            (tmp_path / name).mkdir()
        (tmp_path / f"{start}afileaaa.partial").write_text("a file")
        (tmp_path / f"{start}alinkaaa.partial").symlink_to(tmp_path)
        before = {*tmp_path.iterdir()}
        with atomic_folder(target):
            pass
        assert before - {*tmp_path.iterdir()} == {tmp_path / left}
