"""Machines that tests pretend to run on: their variables, chips, and GPUs."""

import os

KAGGLE_TPU = dict(
    KAGGLE_KERNEL_RUN_TYPE="Interactive",
    KAGGLE_URL_BASE="https://www.kaggle.com",
    TPU_ACCELERATOR_TYPE="v5litepod-8",
    ISTPUVM="1",
    TPU_CHIPS_PER_HOST_BOUNDS="2,4,1",
    TPU_PROCESS_ADDRESSES="local",
)
COLAB_TPU = {
    "COLAB_RELEASE_TAG": "release-colab_1", "COLAB_TPU_1VM": "1", "TPU_ACCELERATOR_TYPE": "v5e-1",
    "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1",
}  # fmt: skip


def add_chips(root, count):
    chips = [(f"0000:00:{index:02x}.0", "0x0063") for index in range(count)]
    for name, device_id in [*chips, ("0000:01:00.0", "0x0042")]:  # Google's network card, not a chip
        device = root / "sys/bus/pci/devices" / name
        device.mkdir(parents=True)
        (device / "vendor").write_text("0x1ae0\n")
        (device / "device").write_text(f"{device_id}\n")


def nvidia_smi(folder, listed):
    """Variables of a process for which `nvidia-smi -L` lists these GPUs."""
    text = "\n".join(listed)
    script = folder / "nvidia-smi"
    script.write_text(f"#!/bin/sh\n[ \"$1\" = -L ] && echo '{text}'\n", errors="surrogateescape")
    script.chmod(0o755)
    return {**os.environ, "PATH": str(folder)}
