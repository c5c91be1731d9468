"""What tests of runs share: comparisons, a real S3 server on loopback, and a connection to it that can
vanish."""

import contextlib
import itertools
import os
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch


def content(folder):
    """Name -> bytes of every file below a folder but the lock."""
    found = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def alike(a, b):
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(alike(a[n], b[n]) for n in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(alike, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def kill_before(number):
    """Let this process be killed before its n-th call, from now on, of what names, removes or syncs files."""
    left = itertools.count(number, -1)
    for place, name in ((os, "replace"), (os, "fsync"), (os, "unlink"), (os, "mkdir"), (Path, "touch")):

        def call(*arguments, _function=getattr(place, name), **options):
            if next(left) == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return _function(*arguments, **options)

        setattr(place, name, call)


@contextlib.contextmanager
def s3_server():
    """The port of a moto server, in a process of its own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert server.poll() is None
            time.sleep(0.1)
        yield port
    finally:
        server.terminate()
        server.wait()


class Line(socketserver.ThreadingTCPServer):
    """A TCP proxy: passes bytes both ways, until `cut`, or until `cut_after` bytes have gone to the
    server."""

    daemon_threads = True

    def __init__(self, port):
        super().__init__(("127.0.0.1", 0), socketserver.BaseRequestHandler)
        self.target, self.port, self.sockets = port, self.server_address[1], []
        self.mend()
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def finish_request(self, client, client_address):
        if self.is_cut:
            return
        server = socket.create_connection(("127.0.0.1", self.target))
        self.sockets += [client, server]
        answers = threading.Thread(target=self._pass, args=(server, client, False), daemon=True)
        answers.start()
        self._pass(client, server, True)
        answers.join()

    def _pass(self, source, target, counts):
        with contextlib.suppress(OSError):
            while part := source.recv(4096):
                self.sent += len(part) * counts
                if self.cut_after is not None and self.sent >= self.cut_after:
                    self.cut()
                target.sendall(part)
        _shut_down(source, target)

    def cut(self):
        """Close every connection, and every new one."""
        self.is_cut = True
        _shut_down(*self.sockets)
        self.sockets.clear()

    def mend(self, cut_after=None):
        """Pass again, up to this number of bytes."""
        self.is_cut, self.sent, self.cut_after = False, 0, cut_after

    def close(self):
        self.cut()
        self.shutdown()
        self.server_close()


def _shut_down(*sockets):
    for one in sockets:
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
