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

    _writer: Any = None

    def __init__(self, folder: Path):
        try:
            from tensorboard.summary.writer.record_writer import RecordWriter

            # By name: protobuf makes the two classes on loading, where no type checker sees them.
            Event = importlib.import_module("tensorboard.compat.proto.event_pb2").Event
            Summary = importlib.import_module("tensorboard.compat.proto.summary_pb2").Summary

            folder.mkdir(parents=True, exist_ok=True)
            for old in folder.glob("events.out.tfevents.*.tpukit"):
                old.unlink()
            self._file = open(folder / f"events.out.tfevents.{time.time_ns()}.tpukit", "xb", buffering=0)
        except Exception:  # not installed, or in conflict with its protobuf, or no file can be made
            return
        self._Event, self._Summary, self._writer = Event, Summary, RecordWriter(self._file)
        self._write(time.time(), file_version="brain.Event:2")

    def write(self, record: dict[str, Any]) -> None:
        """Write the numbers of one record of the run, if it has any."""
        if self._writer and (scalars := _scalars(record)):
            values = [self._Summary.Value(tag=tag, simple_value=value) for tag, value in scalars]
            self._write(record["time"], step=record["step"], summary=self._Summary(value=values))

    def close(self) -> None:
        if self._writer:
            self._writer = None
            with contextlib.suppress(OSError):
                self._file.close()

    def _write(self, wall_time: float, **values: Any) -> None:
        try:
            self._writer.write(self._Event(wall_time=wall_time, **values).SerializeToString())
        except OSError:  # a full disk is reported where the checkpoints are written
            self.close()


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
            found["speed/waiting for data"] = speed["wait_s"] / max(speed["seconds"], 1e-9)
            found |= {f"memory/device {n}, GiB": peak / GIB for n, (peak, _) in enumerate(speed["memory"])}
    numbers = [(tag, value) for tag, value in found.items() if isinstance(value, (int, float))]
    return [(tag, value) for tag, value in numbers if abs(value) < 2**127]  # an event holds a float32
