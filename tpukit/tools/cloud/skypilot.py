"""A task file for SkyPilot, which finds capacity, recovers from a lost spot machine, and cleans up. Runs nothing itself.

Also here: how tpukit is installed on a rented machine, by whatever way that was rented.
"""

import dataclasses
import shlex

from tpukit.host.errors import TpukitError
from tpukit.tools.cloud.rented import check_name
from tpukit.tools.cloud.tpu_types import generation_of

PYTHON = "~/tpukit-python"  # a virtual environment: the images' own Python is older than tpukit needs
PORT = 29500
GITHUB = "git+https://github.com/"
SOURCE = f"{GITHUB}TPUKIT_SOURCE"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A rented machine, or several."""

    accelerator: str = "v5litepod-8"
    """A TPU type with its cores (v5litepod-8, v6e-4, v4-16), or GPUs with their number on each host (T4:1)."""
    name: str = "tpukit"
    """What the machine is called."""
    nodes: int = 1
    """GPU hosts. A TPU slice of several hosts counts as one."""
    spot: bool = True
    """Spare capacity: cheaper, and can be taken away at any time; with a bucket the run goes on from its last checkpoint."""
    bucket: str = ""
    """A storage bucket (gs://...) that keeps a copy of the run; without one the next machine begins anew."""
    idle_minutes: int = 10
    """SkyPilot deletes the machine after so many idle minutes."""
    source: str = SOURCE
    """What pip installs tpukit from."""


def is_tpu(machine):
    return ":" not in machine.accelerator


def skypilot_task(machine, command):
    """A SkyPilot task file (YAML) for `sky jobs launch FILE`.

    command: words after `tpukit` (["train", "mshnet", ...]). Raises TpukitError for what is no training, for a name that cannot
    be one, for a type of TPU that is not known, and where nothing says what to install tpukit from.
    """
    check_command(command)
    check_name(machine.name)
    tpukit = f"{PYTHON}/bin/tpukit {shlex.join(command)}"
    if machine.bucket:
        tpukit += f" --backup /run-copy/{shlex.quote(machine.name)}"
    if is_tpu(machine):
        accelerator = f"tpu-{machine.accelerator}"
        try:
            image = generation_of(machine.accelerator).image
        except TpukitError as error:
            raise TpukitError(f"{error}. A GPU comes with its number on each host, like T4:1") from error
        arguments = f"\n  accelerator_args:\n    runtime_version: {image}"
        start = tpukit
    else:
        accelerator, arguments = machine.accelerator, ""
        start = (
            f"{PYTHON}/bin/torchrun --nnodes $SKYPILOT_NUM_NODES --nproc-per-node $SKYPILOT_NUM_GPUS_PER_NODE \\\n"
            "    --node-rank $SKYPILOT_NODE_RANK "
            f'--master-addr $(echo "$SKYPILOT_NODE_IPS" | head -n1) --master-port {PORT} \\\n'
            f"    -m -- {tpukit.removeprefix(f'{PYTHON}/bin/')}"
        )
    check_source(machine.source)
    mounts = f"file_mounts:\n  /run-copy:\n    source: {machine.bucket}\n    mode: MOUNT\n" if machine.bucket else ""
    setup = "\n".join(f"  {line}" for line in install_steps(machine.source, is_tpu(machine)))
    anew = (
        f"the run goes on from its copy in {machine.bucket}" if machine.bucket else "the run begins anew: no --bucket keeps it"
    )
    return f"""# sky jobs launch {machine.name}.yaml   recovers when a spot machine is taken away, and deletes it at the end
#   then {anew}
# sky launch {machine.name}.yaml        one machine to look at, deleted after {machine.idle_minutes} idle minutes
name: {machine.name}
num_nodes: {machine.nodes}
resources:
  accelerators: {accelerator}{arguments}
  use_spot: {str(machine.spot).lower()}
  job_recovery: {"EAGER_NEXT_REGION" if machine.spot else "none"}
  autostop:
    idle_minutes: {machine.idle_minutes}
    down: true
{mounts}setup: |
{setup}
run: |
  {start}
"""


def check_command(command):
    """Raises TpukitError for what is no training."""
    from tpukit.workloads import WORKLOADS

    if len(command) < 2 or command[0] != "train" or command[1] not in WORKLOADS:
        raise TpukitError(f"what to run comes after `--`: train WORKLOAD [options]. Workloads: {', '.join(WORKLOADS)}")


def is_unfilled(source):
    """Whether it names no repository, as SOURCE where nobody has filled it in."""
    return source.startswith(GITHUB) and "/" not in source.removeprefix(GITHUB)


def check_source(source):
    """Raises TpukitError where tpukit cannot be installed from there."""
    if is_unfilled(source):
        raise TpukitError(f"--source {source!r} names no repository, OWNER/NAME: give what pip is to install tpukit from")


def install_steps(source, tpu):
    """Shell commands that install tpukit into PYTHON; once, where it is there they take a moment."""
    torch = ["'torch==2.9.0'", "'torch_xla[tpu]==2.9.0'"] if tpu else ["torch"]
    return [
        "pip install --quiet --user uv",
        f"~/.local/bin/uv venv --quiet --allow-existing --python 3.12 {PYTHON}",
        f"~/.local/bin/uv pip install --quiet --python {PYTHON}/bin/python {' '.join(torch)} {shlex.quote(source)}",
    ]


def run_folder(command):
    """Where the command keeps its run, on the host that runs it."""
    for word, following in zip(command, [*command[1:], ""]):
        if word.startswith("--run="):
            return word.partition("=")[2]
        if word == "--run":
            return following
    return f"outputs/{command[1]}"
