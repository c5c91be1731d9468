"""A run's numbers as TensorBoard events, if tensorboard is installed. Imports no TensorFlow, which would take
the TPU."""

import contextlib
import importlib
import time
from pathlib import Path
from typing import Any

from tpukit.host.tables import GIB


class EventFile:
    """tpukit's one event file in a folder. Those of earlier sessions are removed: a resumed run writes
    all its records again, and may have fewer; files of others stay."""

    _new_writer: Any = None

    def __init__(self, folder: Path):
        self.path = folder / f"events.out.tfevents.{time.time_ns()}.tpukit"
        try:
            from tensorboard.summary.writer.record_writer import RecordWriter

            # By name: protobuf makes the class on loading, where no type checker sees it.
            self._new_event = importlib.import_module("tensorboard.compat.proto.event_pb2").Event
            folder.mkdir(parents=True, exist_ok=True)
            for old in folder.glob("events.out.tfevents.*.tpukit"):
                old.unlink()
        except Exception:  # not installed, or in conflict with its protobuf, or no file can be made
            return
        self._new_writer = RecordWriter
        self._append(self._new_event(wall_time=time.time(), file_version="brain.Event:2"))

    def write(self, record: dict[str, Any]) -> None:
        """Write the numbers of one record of the run, if it has any."""
        if self._new_writer and (scalars := _scalars(record)):
            event = self._new_event(wall_time=record["time"], step=record["step"])
            for tag, value in scalars:
                event.summary.value.add(tag=tag, simple_value=value)
            self._append(event)

    def _append(self, event: Any) -> None:
        # A full disk is reported where the checkpoints are written.
        with contextlib.suppress(OSError), open(self.path, "ab") as file:
            self._new_writer(file).write(event.SerializeToString())


def _scalars(record: dict[str, Any]) -> list[tuple[str, float]]:
    """(tag, number) of a training interval or an evaluation."""
    found = {}
    # A damaged record gives what it has.
    with contextlib.suppress(KeyError, TypeError, AttributeError, ValueError):
        if record["kind"] == "evaluation":
            found = {f"scores/{name}": value for name, value in record["scores"].items()}
        elif record["kind"] == "train":
            speed = record["speed"]
            found = {"loss": record["loss"], "gradient norm": record["grad_norm"]}
            found["learning rate"] = record.get("lr")
            found["speed/samples per second"] = speed["images_per_s"]
            found |= {f"speed/{name}": value for name, value in (speed.get("rates") or {}).items()}
            found["speed/waiting for data"] = speed["wait_s"] / max(speed["seconds"], 1e-9)
            found |= {f"memory/device {n}, GiB": peak / GIB for n, (peak, _) in enumerate(speed["memory"])}
    numbers = [(tag, value) for tag, value in found.items() if isinstance(value, (int, float))]
    return [(tag, value) for tag, value in numbers if abs(value) < 2**127]  # an event holds a float32
