"""A loopback server that answers the real `kaggle` command as Kaggle's API does, records every request, fails
when it is told to, and runs what is pushed in a process like Kaggle's image.

    kaggle kernels push          the real package, unchanged: it talks with https://api.kaggle.com ...
       │  HTTPS_PROXY            ... through this server as its proxy, and takes the certificate made here
       ▼
    Handler.do_CONNECT           speaks for api.kaggle.com and www.kaggleusercontent.com, refuses all others
       ├── do_POST               one method of the server each: SaveKernel, GetKernelSessionStatus, ...
       └── do_GET                the log's stream, the files of an output
    Session                      kaggle_session.py, a thread: queued, running (papermill), then its end

Routes, fields and words: kaggle 2.2.5 and its kagglesdk. What they do not say (words of failures, what a
session leaves that Kaggle ended) is an attribute of `Server`, for tests to set."""

import base64
import collections
import contextlib
import dataclasses
import datetime
import email.utils
import http.server
import json
import os
import re
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

import pytest

from tests.tools.send.kaggle_session import SHAPES, Session

USER = "tester"
KEY = "0123456789abcdef0123456789abcdef"  # of a kaggle.json; nobody's
TOKEN = "KGAT_5ecbea7f00d5ecbea7f00d5ecbea7f00d"  # of an access_token; nobody's
HOSTS = ("api.kaggle.com", "www.kaggleusercontent.com")


@dataclasses.dataclass
class Fault:
    """What the server does instead of answering: an HTTP status; "lost" (the connection, before anything is
    done) or "lost after" (it is done); "hang" or "hang after"; "half" (of the file); "garbage" (no JSON)."""

    call: str
    what: int | str
    times: int
    after: int  # calls that succeed first


@dataclasses.dataclass
class Request:
    call: str
    host: str
    path: str
    headers: dict[str, str]
    body: dict


class Server:
    """Kaggle, for one account. `environ_of(home)` is what makes the `kaggle` command talk with it."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.sessions: list[Session] = []
        self.kernels: dict[str, list[Session]] = {}  # OWNER/SLUG -> its versions
        self.datasets: dict[str, Path] = {}
        self.hosts: set[str] = set()  # all that a client asked for, refused ones too
        self.queue_s = 0.05
        self.page_size = 1000  # at most so many files in an answer, whatever was asked for
        self.has_accelerator = True
        # For each session a function of it and of the seconds that have passed: whether it is killed now.
        self.lives: Iterator[Callable[[Session, float], bool]] = iter(())
        self.alive_from = "*"  # the clock of a session starts when this finds something in its working folder
        self.script: Callable[[Session], None] | None = None  # what a session does in place of its notebook
        self.environ: dict[str, str] = {}  # of the sessions, besides Kaggle's
        self.secret = "session-secret-5ecbea7f00d"  # Kaggle's images hold such a token
        self.unknown = 403  # the status for a kernel that there is not
        self.errors_are_json = False
        self.error_is_source = True  # whether the output of a failed session can be an input
        self.words_of_error = ""
        self.end_of_killed = ("ERROR", "")
        self.end_of_timeout = ("ERROR", "Your notebook exceeded the time limit")
        self.push_error = ""  # of an answer that has status 200
        self.hours = dict(gpuQuota=(3.0, 30.0), tpuQuota=(2.0, 20.0))  # used, total
        self.refresh = "2026-12-01T00:00:00.000Z"
        self.closing = threading.Event()
        self._lock = threading.Lock()

    def __enter__(self):
        self.certificate, context = certificate(self.folder)
        handler = type("Handler", (Handler,), dict(kaggle=self, context=context))
        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        self._http.block_on_close = False
        threading.Thread(
            target=self._http.serve_forever, kwargs=dict(poll_interval=0.05), daemon=True
        ).start()
        return self

    def __exit__(self, *_):
        self.closing.set()
        for session in self.sessions:
            session.kill()
        for session in self.sessions:
            session.ended.wait(20)
        self._http.shutdown()
        self._http.server_close()

    def environ_of(self, home: Path, *, login: str = "key") -> dict[str, str]:
        """The variables of a shell that reaches this server. login: "key" (kaggle.json), "token"
        (access_token), "none"."""
        (home / ".kaggle").mkdir(parents=True, exist_ok=True)
        if login == "key":
            file, text = home / ".kaggle/kaggle.json", json.dumps(dict(username=USER, key=KEY))
        else:
            file, text = home / ".kaggle/access_token", TOKEN
        if login != "none":
            file.write_text(text)
            file.chmod(0o600)
        proxy = "http://127.0.0.1:%d" % self._http.server_address[1]
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("KAGGLE_") and name.lower() not in ("no_proxy", "all_proxy")
        }
        own = dict(HOME=str(home), KAGGLE_CONFIG_DIR=str(home / ".kaggle"))
        own |= dict(REQUESTS_CA_BUNDLE=str(self.certificate), CURL_CA_BUNDLE=str(self.certificate))
        return (
            kept | own | {name: proxy for name in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy")}
        )

    def fail(self, call: str, what: int | str, times: int = 1, *, after: int = 0) -> None:
        """Let the next calls of this name fail (see `Fault`); `after` calls succeed first."""
        self.faults.append(Fault(call, what, times, after))

    def calls(self, call: str) -> list[Request]:
        return [request for request in self.requests if request.call == call]

    def pushed(self) -> list[str]:
        """The names of all kernels that were saved, in order, one for each version."""
        return [session.slug for session in self.sessions]

    def wait(self, limit_s: float = 120) -> None:
        """Wait until all sessions have ended."""
        for session in list(self.sessions):
            assert session.ended.wait(limit_s), f"{session.slug} still runs: {session.log[-20:]}"

    def take_fault(self, call: str) -> int | str | None:
        with self._lock:
            for fault in self.faults:
                if fault.call != call or fault.times <= 0:
                    continue
                if fault.after > 0:
                    fault.after -= 1
                    return None
                fault.times -= 1
                return fault.what
        return None

    def session_of(self, request: dict) -> Session:
        return self.kernel(f"{request.get('userName')}/{request.get('kernelSlug')}")

    def kernel(self, name: str) -> Session:
        if name not in self.kernels:
            words = "Permission 'kernels.get' was denied" if self.unknown == 403 else "Not found"
            raise Refused(self.unknown, words)
        return self.kernels[name][-1]

    # What the API answers, by the name of the call

    def IntrospectToken(self, request):
        return dict(active=True, username=USER) if request.get("token") == TOKEN else dict(active=False)

    def SaveKernel(self, request):
        owner, slug = request["slug"].split("/")
        url = f"https://www.kaggle.com/code/{owner}/{slug}"
        if self.push_error:
            return dict(error=self.push_error)
        if owner != USER:
            return dict(error="Notebook not found")
        if not 5 <= len(request["newTitle"]) <= 50:
            return dict(error="The title must have 5 to 50 characters")
        if request.get("machineShape") not in SHAPES:
            return dict(error=f"Unknown machine shape {request['machineShape']}")
        with self._lock:
            sources = request.get("kernelDataSources", [])
            invalid = [source for source in sources if not self._is_source(source)]
            request["kernelDataSources"] = [source for source in sources if source not in invalid]
            session = Session(self, owner, slug, request)
            self.sessions.append(session)
            versions = self.kernels.setdefault(f"{owner}/{slug}", [])
            versions.append(session)
        threading.Thread(target=session.run, daemon=True).start()
        answer = dict(ref=f"/code/{owner}/{slug}", url=url, versionNumber=len(versions))
        return answer | (dict(invalidKernelSources=invalid) if invalid else {})

    def _is_source(self, name):
        if name not in self.kernels or not self.kernels[name][-1].ended.is_set():
            return False
        return self.error_is_source or self.kernels[name][-1].status == "COMPLETE"

    def GetKernelSessionStatus(self, request):
        session = self.session_of(request)
        answer = dict(status=session.status)
        return answer | (dict(failureMessage=session.message) if session.message else {})

    def ListKernelSessionOutput(self, request):
        session = self.session_of(request)
        names = list(session.files())
        size = min(request.get("pageSize") or 20, self.page_size)
        start = int(request.get("pageToken") or 0)
        base = f"https://{HOSTS[1]}/kf/{session.number}/"
        answer: dict = dict(
            files=[
                dict(fileName=name, url=base + quote(name, safe="")) for name in names[start : start + size]
            ]
        )
        if start + size < len(names):
            answer["nextPageToken"] = str(start + size)
        if session.ended.is_set():
            answer["log"] = json.dumps(session.log)
        return answer

    def GetAcceleratorQuotaStatistics(self, request):
        answer: dict = dict(quotaRefreshTime=self.refresh)
        for name, (used, total) in self.hours.items():
            answer[name] = dict(timeUsed=f"{used * 3600:.0f}s", totalTimeAllowed=f"{total * 3600:.0f}s")
        return answer


class Refused(Exception):
    """The answer is this HTTP status."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class Handler(http.server.BaseHTTPRequestHandler):
    kaggle: Server
    context: ssl.SSLContext
    protocol_version = "HTTP/1.1"
    host = ""

    def log_message(self, *_):
        pass

    def do_CONNECT(self):
        """Become the host that the client wants to reach."""
        self.host = self.path.partition(":")[0]
        self.kaggle.hosts.add(self.host)
        if self.host not in HOSTS:
            return self.send_error(403, "this server speaks for Kaggle alone")
        self.send_response_only(200)
        self.end_headers()
        self.connection = self.context.wrap_socket(self.connection, server_side=True)
        self.rfile, self.wfile = self.connection.makefile("rb"), self.connection.makefile("wb", 0)
        self.close_connection = False

    def finish(self):
        with contextlib.suppress(OSError):
            super().finish()
            self.connection.close()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        self._answer(self.path.rpartition("/")[2], body)

    def do_GET(self):
        parts = urlsplit(self.path).path.split("/")
        if self.host == HOSTS[1]:
            return self._answer("file", dict(session=int(parts[2]), name=unquote(parts[3])))
        self._answer("log", dict(userName=parts[-2], kernelSlug=parts[-1]))

    def _answer(self, call, body):
        kaggle = self.kaggle
        kaggle.requests.append(Request(call, self.host, self.path, dict(self.headers), body))
        fault = kaggle.take_fault(call)
        try:
            if fault == "hang":
                kaggle.closing.wait(600)
            if fault in ("lost", "hang"):
                return self._hang_up()
            if isinstance(fault, int):
                raise Refused(fault, f"the server was told to answer {fault}")
            if call not in ("file", "IntrospectToken") and not self._is_logged_in():
                raise Refused(401, "Unauthenticated")
            if call == "file":
                return self._send_file(body, half=fault == "half")
            if call == "log":
                return self._send_log(kaggle.session_of(body), fault)
            if not hasattr(kaggle, call):
                raise Refused(404, f"this server knows no {call}")
            answer = getattr(kaggle, call)(body)
            if fault == "hang after":
                kaggle.closing.wait(600)
            if fault in ("lost after", "hang after"):
                return self._hang_up()
            self._send(200, b"<html>" if fault == "garbage" else json.dumps(answer).encode())
        except Refused as error:
            # Either is possible: with the first, the command prints "500 Server Error: ... for url: ...".
            kind = "application/json" if kaggle.errors_are_json else "text/html"
            body = json.dumps(dict(code=error.status, message=str(error)))
            self._send(error.status, body.encode(), **{"Content-Type": kind})
        except (BrokenPipeError, ConnectionResetError, ssl.SSLError):
            self._hang_up()  # the client has gone

    def _is_logged_in(self):
        basic = base64.b64encode(f"{USER}:{KEY}".encode()).decode()
        return self.headers.get("Authorization") in (f"Basic {basic}", f"Bearer {TOKEN}")

    def _hang_up(self):
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def _send(self, status, body, **headers):
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        if status == 429:
            self.send_header("Retry-After", "1")
        self.end_headers()
        self.wfile.write(body)

    def _send_file(self, wanted, *, half):
        found = self.kaggle.sessions[wanted["session"] - 1].files().get(wanted["name"])
        if found is None:
            raise Refused(404, "Not found")
        data = found if isinstance(found, bytes) else found.read_bytes()
        date = 0 if isinstance(found, bytes) else found.stat().st_mtime
        start = int(re.findall(r"\d+", self.headers.get("Range", "0"))[0])
        self.send_response(206 if start else 200)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Last-Modified", email.utils.formatdate(date, usegmt=True))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        self.wfile.write(data[start : start + (len(data) - start) // 2] if half else data[start:])
        if half:
            self._hang_up()

    def _send_log(self, session, fault):
        """The log of a session: events while it runs, the whole of it afterwards."""
        if session.ended.is_set():
            return self._send(200, json.dumps(session.log).encode())
        self.close_connection = True
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        sent = 0
        while not self.kaggle.closing.is_set():
            ended = session.ended.is_set()
            for event in session.log[sent:]:
                self._send_event(json.dumps(event))
                sent += 1
            if fault == "lost after" and sent:
                return self._hang_up()
            if ended:
                self._send_event("END_OF_LOG")
                return self.wfile.write(b"0\r\n\r\n")
            time.sleep(0.05)

    def _send_event(self, text):
        data = f"data: {text}\n\n".encode()
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))


def certificate(folder: Path) -> tuple[Path, ssl.SSLContext]:
    """(the file of a certificate of HOSTS, which signs itself; what a server shows it by)."""
    pytest.importorskip("cryptography", reason="cryptography is not installed, which makes a certificate")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "Kaggle of the tests")])
    now = datetime.datetime.now(datetime.timezone.utc)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host) for host in HOSTS]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    file, private = folder / "certificate.pem", folder / "key.pem"
    file.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private.touch(0o600)
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file, private)
    return file, context


def notebook(*cells: str) -> str:
    """A notebook of these cells of code, as text."""
    import nbformat

    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    made.metadata["kernelspec"] = dict(name="python3", display_name="Python 3", language="python")
    return nbformat.writes(made)


Ran = collections.namedtuple("Ran", "code out err")


def run(command: list, environ: dict[str, str], cwd: Path, limit_s: float = 300) -> Ran:
    """Run a command to its end."""
    ran = subprocess.run(
        command,
        env=environ,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit_s,
    )
    return Ran(ran.returncode, ran.stdout, ran.stderr)
