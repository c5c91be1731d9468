"""Working on a rented machine: a shell, a training that outlives the connection, its log, its run brought home."""

import re
import shlex
from pathlib import Path

from tpukit.host.errors import TpukitError
from tpukit.tools.cloud import rented
from tpukit.tools.cloud.gcloud import Gcloud
from tpukit.tools.cloud.guard import GUARD_LOG
from tpukit.tools.cloud.skypilot import PYTHON, SOURCE, check_command, check_source, install_steps, run_folder

JOB = "tpukit-job"  # in the home folder of every host: log.txt, pid, and run, which names the run's folder
TPUKIT = f"{PYTHON}/bin/tpukit"

# Before anything is installed, too: that would change the packages of a training that runs.
REFUSE_SECOND = """\
if [ -s ~/{job}/pid ] && kill -0 "$(cat ~/{job}/pid)" 2> /dev/null; then
  echo "a training runs here already: tpukit cloud watch; it is not disturbed"; exit 3
fi
"""
# setsid and nohup: it goes on when the ssh connection ends. The chips serve one process, so a second training is refused.
START = (
    REFUSE_SECOND
    + """\
cd && mkdir -p {job} || exit 1
echo {run} > {job}/run
nohup setsid bash -c {inner} > {job}/log.txt 2>&1 < /dev/null &
echo $! > {job}/pid
sleep {pause_s}
tail -n 3 {job}/log.txt
tail -n 1 {guard_log} 2> /dev/null || echo "no word from what deletes this machine in the end: look after it yourself\""""
)
FOLLOW = """\
cd && [ -s {job}/pid ] || {{ echo "nothing was started here: tpukit cloud run"; exit 3; }}
{tpukit} watch "$(cat {job}/run)" --once 2> /dev/null
tail -n 30 {follow} {job}/log.txt"""


def run(
    name: str = "tpukit",
    /,
    command: tuple[str, ...] = (),
    *,
    source: str = SOURCE,
    zone: str = "",
    project: str = "",
    dry_run: bool = False,
):
    """Install tpukit on every host of a machine, and start a training on all of them. It goes on when the connection is lost.

    Args:
        name: what the machine is called.
        command: words after `tpukit`: train, a workload, its options.
        source: what pip installs tpukit from.
        zone: where; it is looked for in all zones unless given.
        project: Google Cloud project; the one of gcloud's configuration unless given.
        dry_run: print the commands, and run none.
    """
    command = list(command)
    start = start_script(command)
    cloud = Gcloud(project, dry_run)
    machine = _running(cloud, name, zone)
    if not dry_run:
        check_source(source)
    install = REFUSE_SECOND.format(job=JOB) + " && ".join(install_steps(source, tpu=True))
    _ssh(cloud.show, cloud, machine, install, worker="all")
    _ssh(cloud.show, cloud, machine, start, worker="all")
    if not dry_run:
        print(f"started: tpukit cloud watch {name} follows it, tpukit cloud fetch {name} brings its run here")


def watch(name: str = "tpukit", /, *, once: bool = False, zone: str = "", project: str = "", dry_run: bool = False):
    """Follow the training on a machine: how far it is, then its log as it grows. Ctrl-C ends the watching alone.

    Args:
        name: what the machine is called.
        once: look once.
        zone: where; it is looked for in all zones unless given.
        project: Google Cloud project; the one of gcloud's configuration unless given.
        dry_run: print the commands, and run none.
    """
    cloud = Gcloud(project, dry_run)
    follow = "" if once else f'-f --pid="$(cat {JOB}/pid)"'
    _ssh(cloud.show, cloud, _running(cloud, name, zone), FOLLOW.format(job=JOB, tpukit=TPUKIT, follow=follow))


def fetch(name: str = "tpukit", /, *, to: Path | None = None, zone: str = "", project: str = "", dry_run: bool = False):
    """Bring the run on a machine here, also while it still trains; what is here of it already is overwritten.

    Args:
        name: what the machine is called.
        to: folder that gets the run's folder; outputs/NAME unless given.
        zone: where; it is looked for in all zones unless given.
        project: Google Cloud project; the one of gcloud's configuration unless given.
        dry_run: print the commands, and run none.
    """
    cloud = Gcloud(project, dry_run)
    return fetch_run(cloud, _running(cloud, name, zone), to)


def fetch_run(cloud, machine, to=None):
    """Copy the run from the first host. Returns its folder here."""
    folder = Path(to or Path("outputs") / machine.name)
    if cloud.dry_run:
        print("# RUN is what the next command prints")
    ask = f"cat {JOB}/run || {{ echo 'nothing was started here: tpukit cloud run' >&2; exit 3; }}"
    run = _ssh(cloud.ask, cloud, machine, ask, instead="RUN").strip().rpartition("\n")[2]
    if not cloud.dry_run:
        _check_folder(run)
        folder.mkdir(parents=True, exist_ok=True)
    words = cloud.tpus("tpu-vm", "scp", "--recurse", f"{machine.name}:{run}", str(folder), "--worker=0", zone=machine.zone)
    cloud.show(*words)
    here = folder / Path(run).name
    if not cloud.dry_run:
        print(f"the run is here: {here}  (tpukit show {here})")
    return here


def shell(name: str = "tpukit", /, *, worker: int = 0, zone: str = "", project: str = "", dry_run: bool = False):
    """Open a shell on a machine, over ssh.

    Args:
        name: what the machine is called.
        worker: which host of a slice.
        zone: where; it is looked for in all zones unless given.
        project: Google Cloud project; the one of gcloud's configuration unless given.
        dry_run: print the commands, and run none.
    """
    cloud = Gcloud(project, dry_run)
    machine = _running(cloud, name, zone)
    cloud.hand_over(*cloud.tpus("tpu-vm", "ssh", machine.name, f"--worker={worker}", zone=machine.zone))


def start_script(command, pause_s=3):
    """What starts `tpukit COMMAND` on a host, and shows its first words. Raises TpukitError for what is no training."""
    check_command(command)
    run = _check_folder(run_folder(command))
    inner = f'{TPUKIT} {shlex.join(command)}; echo "the training ended with exit code $?"'
    return START.format(job=JOB, run=run, inner=shlex.quote(inner), guard_log=GUARD_LOG, pause_s=pause_s)


def _check_folder(run):
    if not re.fullmatch(r"[\w.~/+-]+", run) or run.startswith("-") or ".." in Path(run).parts:
        raise TpukitError(
            f"run folder {run!r}: on a rented machine its name has letters, digits, and . _ + - / alone, and no .."
        )
    return run


def _running(cloud, name, zone):
    """The machine of that name, which is there."""
    machine = rented.find_ours(cloud, name, zone)
    if machine.state in rented.TAKEN:
        raise TpukitError(
            f"{name} was taken away (spot capacity), with what was on it: tpukit cloud delete {name}, then create"
        )
    if not cloud.dry_run and not machine.node:
        meaning = rented.REQUESTS.get(machine.state, "")
        raise TpukitError(f"{name} is no machine yet, or no more. Its request is {machine.state}: {meaning}")
    return machine


def _ssh(how, cloud, machine, script, worker="0", **more):
    return how(
        *cloud.tpus("tpu-vm", "ssh", machine.name, f"--worker={worker}", f"--command={script}", zone=machine.zone), **more
    )
