"""A stand-in for Google's `colab` command (google-colab-cli 0.6), recorded from its source: the commands that
`tpukit send colab` uses, what they print, and their exit codes. Every machine is a real Jupyter kernel in a
namespace of its own, with a /content of its own and Colab's variables.

What the source says, and what matters here: `exec` runs every cell, also after one that failed, and ends with
exit code 0 all the same; cells that are sent while others run wait; `status` of a name that is not known ends
with exit code 0; `download` and `upload` do not need the kernel; a machine that is gone ends `exec` with 1.

The folder COLAB_COMMAND holds what it knows: `calls.jsonl` (the arguments of every call), `machines/NAME/`
(`machine.json`, `root/content`), and what a test tells it to do:

    refuse.txt     `new` ends with 1 and prints this, as for an accelerator that the account may not use
    take.json      {"NAME": "words"}: a machine is taken away when its notebook prints the words
    end.json       the same, but the notebook's process gets SIGTERM, as from a session's own timer
    logged_out     every command asks for a login, and ends, as nobody answers
"""

import argparse
import contextlib
import json
import os
import queue
import secrets
import shutil
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).parents[3]
HOME = Path(os.environ["COLAB_COMMAND"])
MACHINES = HOME / "machines"
PATIENCE_S = 3  # for a busy kernel before the first cell; ten there
IN_CONTENT = "import os; os.makedirs('/content', exist_ok=True); os.chdir('/content')"
ACCELERATORS = {"v5e1": "V5E1", "v6e1": "V6E1", "t4": "T4", "l4": "L4", "a100": "A100"}
VARIANTS = {"tpu": "TPU", "gpu": "GPU"}


def main():
    with open(HOME / "calls.jsonl", "a") as file:
        file.write(json.dumps(sys.argv[1:]) + "\n")
    parser = argparse.ArgumentParser(prog="colab")
    commands = parser.add_subparsers(dest="command", required=True)
    options = {
        "new": ["--tpu", "--gpu"],
        "status": [],
        "stop": [],
        "restart-kernel": [],
        "exec": ["-f", "--timeout"],
        "upload": ["local", "remote"],
        "download": ["remote", "local"],
    }
    for name, names in options.items():
        command = commands.add_parser(name)
        command.add_argument("-s", dest="session", required=True)
        for option in names:
            command.add_argument(option)
    asked = parser.parse_args()
    if (HOME / "logged_out").exists():
        print("https://accounts.google.com/o/oauth2/auth?token_usage=remote")
        input("Authorization code: ")  # EOFError, as stdin is empty
    globals()[f"run_{asked.command.replace('-', '_')}"](asked)


class Machine:
    """One of the machines, by its name; `is_there` is False for one that nobody made, or that was taken."""

    def __init__(self, name):
        self.name, self.folder = name, MACHINES / name
        self.content = self.folder / "root/content"

    @property
    def is_there(self):
        return (self.folder / "machine.json").exists()

    @property
    def facts(self):
        return json.loads((self.folder / "machine.json").read_text())

    def make(self, accelerator, variant):
        (self.folder / "root").mkdir(parents=True)
        self.content.mkdir()
        facts = dict(endpoint=f"m-s-{secrets.token_hex(4)}", accelerator=accelerator, variant=variant)
        facts["pid"] = self._start_kernel(variant)
        (self.folder / "machine.json").write_text(json.dumps(facts))

    def _start_kernel(self, variant):
        from jupyter_client.connect import write_connection_file

        from release import twins

        connection = self.folder / "kernel.json"
        # Sockets of files: a network of its own does not reach the kernel's ports.
        write_connection_file(str(connection), transport="ipc", ip=str(self.folder / "kernel"))
        image = twins.IMAGES["Colab TPU" if variant == "TPU" else "Colab GPU"]
        mount = self.folder / "mount"
        mount.mkdir()
        command = ["unshare", "--net", "--mount", *(["--map-root-user"] if os.getuid() else [])]
        command += ["bash", "-c", twins.SANDBOX, "bash", mount, "/content", self.content]
        command += [sys.executable, "-m", "ipykernel_launcher", "-f", connection]
        home = self.folder / "home"
        home.mkdir()
        kept = {name: os.environ.get(name, "") for name in ("PATH", "XLA_FLAGS", "OMP_NUM_THREADS")}
        environ = {**kept, **image["environ"], "HOME": str(home), "LANG": "C.UTF-8", "TPUKIT_OFFLINE": "1"}
        with open(self.folder / "kernel.log", "ab") as log:
            process = subprocess.Popen(
                command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        return process.pid

    def restart(self):
        facts = self.facts
        self._kill(facts["pid"])
        shutil.rmtree(self.folder / "mount")
        shutil.rmtree(self.folder / "home")
        facts["pid"] = self._start_kernel(facts["variant"])
        (self.folder / "machine.json").write_text(json.dumps(facts))

    def take(self):
        """Nothing of it is left, as where Colab takes a machine away."""
        pid = self.facts["pid"]
        (self.folder / "machine.json").unlink()
        self._kill(pid)
        shutil.rmtree(self.folder)

    def terminate(self):
        """SIGTERM for the kernel, the process that answers; unshare became it."""
        os.kill(self.facts["pid"], signal.SIGTERM)

    def _kill(self, pid):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        for _ in range(100):  # its mounts go with the last of its processes
            if not any(_group(process) == pid for process in Path("/proc").glob("[0-9]*")):
                return
            time.sleep(0.05)

    def run(self, code, show, timeout_s=None):
        """Send code to the kernel, and show what it prints until it is done. Returns the outputs that a
        notebook keeps. Raises ConnectionError for a machine that is gone, TimeoutError."""
        from jupyter_client.blocking.client import BlockingKernelClient

        client = BlockingKernelClient(connection_file=str(self.folder / "kernel.json"))
        client.load_connection_file()
        client.start_channels()
        try:
            self._wait(client)
            return self._until_idle(client, client.execute(code), show, timeout_s)
        finally:
            client.stop_channels()

    def _wait(self, client):
        """Until something is heard of the kernel, which answers this even while it runs something else."""
        started = time.monotonic()
        while self.is_there and time.monotonic() < started + 60:
            client.control_channel.send(client.session.msg("kernel_info_request"))
            with contextlib.suppress(queue.Empty):
                client.get_iopub_msg(timeout=0.5)
                return

    def _until_idle(self, client, request, show, timeout_s):
        from nbformat.v4 import output_from_msg

        outputs, started = [], time.monotonic()
        while True:
            try:
                message = client.get_iopub_msg(timeout=0.2)
            except queue.Empty:
                if not self.is_there:
                    raise ConnectionError("Connection to remote host was lost.") from None
                if timeout_s and time.monotonic() > started + timeout_s:
                    raise TimeoutError("Timeout waiting for output") from None
                continue
            if message["parent_header"].get("msg_id") != request:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                return outputs
            if kind in ("stream", "display_data", "execute_result", "error"):
                outputs.append(output_from_msg(message))
                show(outputs[-1])


def _group(process):
    try:
        return os.getpgid(int(process.name))
    except ProcessLookupError:
        return None


def needed(asked):
    machine = Machine(asked.session)
    if not machine.is_there:
        print(f"[colab] Session '{asked.session}' not found.")
        sys.exit(1)
    return machine


def run_new(asked):
    print(f"[colab] Creating session '{asked.session}'...")
    if (HOME / "refuse.txt").exists():
        print((HOME / "refuse.txt").read_text(), file=sys.stderr)
        sys.exit(1)
    kind = "tpu" if asked.tpu else "gpu" if asked.gpu else ""
    accelerator = ACCELERATORS[(asked.tpu or asked.gpu).lower()] if kind else "NONE"
    Machine(asked.session).make(accelerator, VARIANTS.get(kind, "DEFAULT"))
    print("[colab] Session READY.")


def run_status(asked):
    machine = Machine(asked.session)
    if not machine.is_there:
        print(f"[colab] Session '{asked.session}' not found.")
        return
    facts = machine.facts
    hardware = "CPU" if facts["accelerator"] == "NONE" else facts["accelerator"]
    line = f"[{machine.name}] {facts['endpoint']} | Hardware: {hardware} | Variant: {facts['variant']}"
    print(f"{line} | Status: IDLE")


def run_stop(asked):
    machine = Machine(asked.session)
    if not machine.is_there:
        print(f"[colab] Session '{asked.session}' not found.")
        return
    print(f"[colab] Stopping session '{asked.session}'...")
    machine.take()
    print("[colab] Session terminated.")


def run_restart_kernel(asked):
    needed(asked).restart()


def run_upload(asked):
    machine = needed(asked)
    if not os.path.isfile(asked.local):
        print(f"[colab] Local file '{asked.local}' not found.")
        sys.exit(1)
    shutil.copyfile(asked.local, machine.folder / "root" / asked.remote.lstrip("/"))
    print(f"[colab] Uploaded '{asked.local}' to '{asked.remote}'")


def run_download(asked):
    file = needed(asked).folder / "root" / asked.remote.lstrip("/")
    if not file.is_file():
        print(f"[colab] Download failed: File or directory not found: {asked.remote}")
        sys.exit(1)
    shutil.copyfile(file, asked.local)
    print(f"[colab] Downloaded '{asked.remote}' to '{asked.local}'")


def told(file, name):
    """The words of a test's file for a machine, or some that nobody prints."""
    words = json.loads((HOME / file).read_text()) if (HOME / file).exists() else {}
    return words.get(name, "\0")


def run_exec(asked):
    import nbformat

    machine, timeout_s = needed(asked), float(asked.timeout or 30)
    book = None
    if asked.f and asked.f.endswith(".ipynb"):
        print(f"[colab] Parsing notebook '{asked.f}'...")
        book = nbformat.read(asked.f, 4)
        cells = [cell for cell in book.cells if cell.cell_type == "code"]
    else:
        cells = [nbformat.v4.new_code_cell(Path(asked.f).read_text() if asked.f else sys.stdin.read())]
    taken, ended = told("take.json", machine.name), told("end.json", machine.name)

    def show(output):
        if output.output_type == "stream":
            file = sys.stderr if output.name == "stderr" else sys.stdout
            print(output.text, end="", file=file, flush=True)
            if book and taken in output.text:
                machine.take()
            elif book and ended in output.text:
                machine.terminate()
        elif output.output_type == "error":
            print("".join(output.traceback), file=sys.stderr, flush=True)
        elif "text/plain" in output.data:
            print(output.data["text/plain"], flush=True)

    try:
        machine.run(IN_CONTENT, show, PATIENCE_S)
        for number, cell in enumerate(cells, 1):
            if book:
                name = cell.get("id", secrets.token_hex(4))
                print(f"[colab] Executing cell {number}/{len(cells)} - {name}...", flush=True)
            cell.outputs = machine.run(cell.source, show, timeout_s)
    finally:
        if book:
            output_file = os.path.splitext(asked.f)[0] + "_output.ipynb"
            print(f"[colab] Saving notebook with outputs to '{output_file}'...")
            nbformat.write(book, output_file)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    try:
        main()
    except Exception:  # the command shows a traceback, too
        traceback.print_exc()
        sys.exit(1)
