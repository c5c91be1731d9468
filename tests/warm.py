"""Python processes that have torch loaded when they start: to import it takes 2 s of a core, torch_xla 6 s.

A server for each pytest process has imported them, opened no device and started no thread; each process is a
fork of it. `[*warm.python(), "-c", program]` stands for `[sys.executable, "-c", program]`, and the kernel
`warm.kernel()` for `python3`: a client that passes on its arguments, variables, folder and standard streams,
then signals, and ends as the fork does. A test about a process itself (its pid, children, threads, terminal
or imports) starts `sys.executable`. With TPUKIT_TEST_COLD=1 all do."""

# The client needs none of what is imported in a function, and starts in 0.05 s.
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

KERNEL = "tpukit-warm"
# What is read when torch, torch_xla or Python are loaded: with another value of these, nothing loaded serves.
AT_START = ("OMP_NUM_THREADS", "MALLOC_", "PYTHON", "LD_", "TORCH_", "TPUKIT_TEST_COLD")
FOLLOWED = ("PYTHONPATH", "PYTHON_EXECUTABLE")
# Those sent on; the client's other signals are its own.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


# The side of pytest

_started: list[str] = []
_stop: list[Callable[[], object]] = []


def python() -> list[str]:
    """Return the start of a command that runs Python in a fork of this process's server, which it starts."""
    if "TPUKIT_TEST_COLD" in os.environ:
        return [sys.executable]
    if not _started:
        _started.extend([sys.executable, "-I", "-S", __file__, _start_server()])
    return list(_started)


def kernel() -> str:
    """Return the name of a Jupyter kernel whose process is such a fork."""
    if not (command := python())[1:]:
        return "python3"
    place = Path(command[-1], "kernels", KERNEL)
    if not place.is_dir():
        place.mkdir(parents=True)
        argv = [*command, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        spec = dict(argv=argv, display_name=KERNEL, language="python")
        (place / "kernel.json").write_text(json.dumps(spec))
    os.environ["JUPYTER_PATH"] = command[-1]
    return KERNEL


def _start_server() -> str:
    import shutil
    import subprocess
    import tempfile

    folder = tempfile.mkdtemp(prefix="tpukit-warm-")
    sockets = []
    for name in ("torch", "torch_xla"):
        sockets.append(socket.socket(socket.AF_UNIX))
        sockets[-1].bind(f"{folder}/{name}")
        sockets[-1].listen(64)
    at_start = {name: value for name, value in os.environ.items() if _is_read_at_start(name)}
    with open(f"{folder}/environ.json", "w") as file:
        json.dump(at_start, file)
    # The server ends with the writing end, which only this process has.
    ends, stays = os.pipe()
    fds = [listening.fileno() for listening in sockets]
    command = [sys.executable, __file__, "--serve", *map(str, [ends, *fds])]
    environ = {**os.environ, "PJRT_DEVICE": "CPU"}
    environ.pop("PYTHONPATH", None)
    server = subprocess.Popen(command, env=environ, pass_fds=[ends, *fds], stdin=subprocess.DEVNULL)
    os.close(ends)
    for listening in sockets:
        listening.close()

    def end():
        os.close(stays)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:  # a fork of this process is left, which has that end, too
            server.kill()
        shutil.rmtree(folder)

    _stop.append(end)
    return folder


def stop() -> None:
    """End the server, if there is one, and wait for it."""
    for act in _stop:
        act()
    _stop.clear()


def _is_read_at_start(name: str) -> bool:
    return name.startswith(AT_START) and name not in FOLLOWED


# The client


def client(folder: str, command: list[str]) -> None:
    environ = dict(os.environ)
    with open(f"{folder}/environ.json") as file:
        at_start = json.load(file)
    serves = {name: value for name, value in environ.items() if _is_read_at_start(name)} == at_start
    kind = command[1 if command[0] == "-P" else 0]
    if not serves or (kind.startswith("-") and kind not in ("-c", "-m")):
        os.execv(sys.executable, [sys.executable, *command])
    # torch_xla, when it is imported, looks for a device unless it is named.
    loaded = "torch_xla" if environ.get("PJRT_DEVICE") == "CPU" else "torch"
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(f"{folder}/{loaded}")
    request = json.dumps(dict(command=command, environ=environ, folder=os.getcwd())).encode()
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until they can be sent on
    connection.sendall(len(request).to_bytes(8))
    socket.send_fds(connection, [b"f"], [0, 1, 2])
    connection.sendall(request)
    answers = connection.makefile()
    child = int(answers.readline())
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: _send(child, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    status = int(answers.readline())
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
        os.kill(os.getpid(), -status)
    os._exit(status)


def _send(child: int, number: int) -> None:
    try:
        os.kill(child, number)
    except ProcessLookupError:  # it has just ended
        pass


# The server


def serve(ends: int, listening: socket.socket) -> dict:
    """Answer clients until pytest has ended. Returns in a fork only: what it was asked to run."""
    running: dict[int, socket.socket] = {}
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([ends, listening, woken, *running.values()], [], [])
        if ends in ready:
            for child in running:
                os.kill(child, signal.SIGKILL)
            return {}
        if woken in ready:
            os.read(woken, 4096)
        while running and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            connection = running.pop(ended[0], None)
            if connection:
                with connection:
                    _tell(connection, os.waitstatus_to_exitcode(ended[1]))
        for child, connection in running.items():
            if connection in ready:  # whose client has ended: it says nothing
                os.kill(child, signal.SIGKILL)
        if listening in ready:
            connection, _ = listening.accept()
            request, fds = _receive(connection)
            child = os.fork()
            if not child:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for other in (connection, listening, *running.values()):
                    other.close()
                for fd in (ends, woken, wakes):
                    os.close(fd)
                for number, fd in enumerate(fds):
                    os.dup2(fd, number)
                    os.close(fd)
                return request
            for fd in fds:
                os.close(fd)
            _tell(connection, child)
            running[child] = connection


def _receive(connection: socket.socket) -> tuple[dict, list[int]]:
    size = int.from_bytes(_exactly(connection, 8))
    _, fds, _, _ = socket.recv_fds(connection, 1, 3)
    return json.loads(_exactly(connection, size)), list(fds)


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += connection.recv(size - len(data))
    return data


def _tell(connection: socket.socket, number: int) -> None:
    try:
        connection.sendall(f"{number}\n".encode())
    except OSError:  # its client has been killed
        pass


# The fork


def become(environ: dict[str, str], folder: str, added: dict[str, str], path: list[str]) -> None:
    """Take over what a process has from its starter, and draw what is drawn when it starts."""
    import io
    import logging
    import tempfile

    os.environ.clear()
    os.environ.update({**added, **environ})
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background commands ignore it
    if torch_xla := sys.modules.get("torch_xla"):
        torch_xla._setup_xla_flags()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    first = environ.get("PYTHONPATH")
    sys.path[:] = [*(first.split(os.pathsep) if first else []), *path]
    sys.stdin = open(0, closefd=False)
    unbuffered = bool(environ.get("PYTHONUNBUFFERED"))
    output = open(1, "wb", 0 if unbuffered else -1, closefd=False)
    sys.stdout = io.TextIOWrapper(output, write_through=unbuffered)
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    for handler in logging.root.handlers:  # torch_xla's
        handler.setStream(sys.stderr)
    tempfile.tempdir = None
    if process := sys.modules.get("multiprocessing.process"):
        process.ORIGINAL_DIR = folder  # where the processes that it spawns look for its file
    sys.excepthook = _without_this_file


def run(command: list[str]) -> None:
    """Run what Python's command line names, as its `__main__`."""
    import runpy
    import types

    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    if is_safe := command[0] == "-P":
        command = command[1:]
    kind, *rest = command
    if not is_safe:
        folders = {"-m": os.getcwd(), "-c": ""}
        sys.path.insert(0, folders.get(kind, os.path.dirname(os.path.realpath(kind))))
    if kind == "-m":
        sys.argv = command
        runpy._run_module_as_main(sys.argv.pop(1))  # pyright: ignore
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = command
        main.__file__ = kind
        with open(kind, "rb") as file:
            exec(compile(file.read(), kind, "exec"), main.__dict__)


def _without_this_file(kind, error, trace):
    while trace and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


def main(ends: int, *listening: int) -> None:
    """Serve, in two processes: one loads torch and one torch_xla, when they are first asked."""
    import gc
    import importlib.util

    sockets = [socket.socket(fileno=fd) for fd in listening]
    before, path = dict(os.environ), sys.path[1:]
    other = os.fork()
    mine = sockets.pop(0 if other else 1)
    sockets.pop().close()
    select.select([ends, mine], [], [])
    if not select.select([ends], [], [], 0)[0]:
        # torch._dynamo: which torch_xla loads, and an optimizer's first step.
        has_xla = not other and importlib.util.find_spec("torch_xla")
        importlib.import_module("torch_xla" if has_xla else "torch._dynamo")
        gc.freeze()
    added = {name: value for name, value in os.environ.items() if name not in before}
    if request := serve(ends, mine):
        become(request["environ"], request["folder"], added, path)
        run(request["command"])
    elif other:
        os.waitpid(other, 0)


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        main(*map(int, sys.argv[2:]))
    else:
        client(sys.argv[1], sys.argv[2:])
