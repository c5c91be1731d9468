"""`tpukit cloud`: writes what other tools run on rented machines, a gcloud script or a SkyPilot task. Runs nothing itself.

On a TPU slice the same `tpukit train` is started on every host; the cores find one another. On several GPU hosts torchrun starts it.
"""

import dataclasses
import re
import shlex

from tpukit.errors import TpukitError

# TPU generation -> the machine image that Google's documentation ("TPU software versions") gives for PyTorch.
RUNTIME_VERSIONS = {
    "v6e": "v2-alpha-tpuv6e",
    "v5p": "v2-alpha-tpuv5",
    "v5litepod": "v2-alpha-tpuv5-lite",
    "v4": "tpu-ubuntu2204-base",
    "v3": "tpu-ubuntu2204-base",
    "v2": "tpu-ubuntu2204-base",
}
PYTHON = "~/tpukit-python"  # a virtual environment: the images' own Python is older than tpukit needs
LABEL = "made-by=tpukit"
PORT = 29500


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """A rented machine, or several."""

    accelerator: str = "v5litepod-8"
    """A TPU type with its cores (v5litepod-8, v6e-4, v4-16), or for SkyPilot also GPUs with their number on each host (T4:2)."""
    name: str = "tpukit"
    """What the machine is called."""
    zone: str = "us-central1-a"
    """Google Cloud zone, for gcloud. SkyPilot looks for one with capacity."""
    nodes: int = 1
    """GPU hosts, for SkyPilot. A TPU slice of several hosts counts as one."""
    spot: bool = True
    """Spare capacity: cheaper, and can be taken away at any time; the run goes on from its last checkpoint."""
    bucket: str = ""
    """A storage bucket (gs://...), for SkyPilot, that keeps a copy of the run, so that it survives the machine."""
    idle_minutes: int = 10
    """SkyPilot deletes the machine after so many idle minutes."""
    source: str = "git+https://github.com/TPUKIT_SOURCE"
    """What pip installs tpukit from."""


def is_tpu(machine):
    return ":" not in machine.accelerator


def gcloud_script(machine, command):
    """A bash script that requests a TPU, waits for it, trains on all its hosts, brings the run back, and deletes it.

    command: words after `tpukit` (["train", "mshnet", ...]). Raises TpukitError for a type that is no TPU.
    """
    name, zone = shlex.quote(machine.name), f"--zone {shlex.quote(machine.zone)}"
    on_all = f"gcloud compute tpus tpu-vm ssh {name} {zone} --worker=all --command"
    runtime = _runtime_version(machine)
    spot = " --spot" * machine.spot
    run = _run_folder(command)
    return f"""#!/usr/bin/env bash
# {machine.accelerator}: `{shlex.join(["tpukit", *command])}` on all its hosts at once. Costs money until the last line has run.
set -euo pipefail

# Ask for the machine, and wait until it is there.
gcloud compute tpus queued-resources create {name} --node-id {name} {zone} \\
  --accelerator-type {shlex.quote(machine.accelerator)} --runtime-version {runtime} --labels {LABEL}{spot}
trap 'gcloud compute tpus queued-resources delete {name} {zone} --force --quiet' EXIT  # whatever happens below
until state=$(gcloud compute tpus queued-resources describe {name} {zone} --format='value(state.state)') && [ "$state" = ACTIVE ]; do
  case "$state" in FAILED|SUSPENDED) echo "the request ended as $state"; exit 1;; esac
  sleep 30
done

# Install on every host, train on every host, and bring the run back from the first, which is rank 0's.
{on_all} {shlex.quote(" && ".join(_setup(machine)))}
{on_all} {shlex.quote(f"{PYTHON}/bin/tpukit {shlex.join(command)}")}
gcloud compute tpus tpu-vm scp --recurse {zone} --worker=0 {name}:{shlex.quote(run)} {name}-run
"""


def skypilot_task(machine, command):
    """A SkyPilot task file (YAML): `sky jobs launch FILE` finds capacity, recovers from a lost spot machine, and cleans up."""
    tpukit = f"{PYTHON}/bin/tpukit {shlex.join(command)}"
    if machine.bucket:
        tpukit += f" --backup /run-copy/{shlex.quote(machine.name)}"
    if is_tpu(machine):
        accelerator = f"tpu-{machine.accelerator}"
        arguments = f"\n  accelerator_args:\n    runtime_version: {_runtime_version(machine)}"
        start = tpukit
    else:
        accelerator, arguments = machine.accelerator, ""
        start = (
            f"{PYTHON}/bin/torchrun --nnodes $SKYPILOT_NUM_NODES --nproc-per-node $SKYPILOT_NUM_GPUS_PER_NODE \\\n"
            f'    --node-rank $SKYPILOT_NODE_RANK --master-addr $(echo "$SKYPILOT_NODE_IPS" | head -n1) --master-port {PORT} \\\n'
            f"    -m -- {tpukit.removeprefix(f'{PYTHON}/bin/')}"
        )
    mounts = f"file_mounts:\n  /run-copy:\n    source: {machine.bucket}\n    mode: MOUNT\n" if machine.bucket else ""
    setup = "\n".join(f"  {line}" for line in _setup(machine))
    return f"""# sky jobs launch {machine.name}.yaml   recovers when a spot machine is taken away, and deletes it at the end
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


def _setup(machine):
    torch = ["'torch==2.9.0'", "'torch_xla[tpu]==2.9.0'"] if is_tpu(machine) else ["torch"]
    return [
        "pip install --quiet --user uv",
        f"~/.local/bin/uv venv --quiet --python 3.12 {PYTHON}",
        f"~/.local/bin/uv pip install --quiet --python {PYTHON}/bin/python {' '.join(torch)} {shlex.quote(machine.source)}",
    ]


def _runtime_version(machine):
    generation = re.fullmatch(r"(\w+)-\d+", machine.accelerator)
    if not generation or generation[1] not in RUNTIME_VERSIONS:
        types = ", ".join(f"{name}-CORES" for name in RUNTIME_VERSIONS)
        raise TpukitError(f"accelerator {machine.accelerator!r} is no TPU type that is known here: {types}")
    return RUNTIME_VERSIONS[generation[1]]


def _run_folder(command):
    """Where the command keeps its run, on the host that runs it."""
    if "--run" in command[:-1]:
        return command[command.index("--run") + 1]
    return f"outputs/{command[1]}"
