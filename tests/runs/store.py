"""A real S3 server on loopback, and a connection to it that can vanish."""

import contextlib
import socket
import subprocess
import sys
import threading
import time


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
