"""What tests of runs share: comparisons, a real S3 server on loopback, and a connection to it that can
vanish."""

import contextlib
import itertools
import os
import signal
import socket
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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = "import sys, threading; from moto.server import ThreadedMotoServer; "
    program += "ThreadedMotoServer('127.0.0.1', int(sys.argv[1])).start(); threading.Event().wait()"
    server = subprocess.Popen(
        [sys.executable, "-c", program, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
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


class Line:
    """A TCP proxy: passes bytes both ways, until `cut`, or until `cut_after` bytes have gone to the
    server."""

    def __init__(self, port):
        self.target, self.sent, self.cut_after = port, 0, None
        self.listener, self.sockets = socket.create_server(("127.0.0.1", 0)), []
        self.port, self.is_cut = self.listener.getsockname()[1], False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            if self.is_cut:
                client.close()
                continue
            server = socket.create_connection(("127.0.0.1", self.target))
            self.sockets += [client, server]
            threading.Thread(target=self._pass, args=(client, server, True), daemon=True).start()
            threading.Thread(target=self._pass, args=(server, client, False), daemon=True).start()

    def _pass(self, source, target, counts):
        with contextlib.suppress(OSError):
            while part := source.recv(4096):
                if counts:
                    self.sent += len(part)
                    if self.cut_after is not None and self.sent >= self.cut_after:
                        self.cut()
                target.sendall(part)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def cut(self):
        """Close every connection, and every new one."""
        self.is_cut = True
        for one in self.sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self.sockets.clear()

    def mend(self, cut_after=None):
        """Pass again, up to this number of bytes."""
        self.is_cut, self.sent, self.cut_after = False, 0, cut_after

    def close(self):
        self.cut()
        self.listener.close()
