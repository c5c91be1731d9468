"""A run's numbers as TensorBoard's events, where tensorboard is installed. TensorFlow is never imported, which would take a
TPU."""

import contextlib
import time
from pathlib import Path


class Events:
    """The one event file of tpukit in `folder`. Those of earlier sessions go: a run writes its records anew, and may have
    fewer. Anybody else's stay."""

    def __init__(self, folder):
        folder, self._writer = Path(folder), None
        try:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.record_writer import RecordWriter
        except Exception:  # not installed, or at odds with its protobuf, which raises many types: a run goes on without it
            return
        self._event, self._summary = Event, Summary
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for old in folder.glob("events.out.tfevents.*.tpukit"):
                old.unlink()
            now = time.time_ns()
            self._file = open(folder / f"events.out.tfevents.{now // 10**9}.{now % 10**9}.tpukit", "xb")
        except OSError:
            return
        self._writer = RecordWriter(self._file)
        self._write(time.time(), file_version="brain.Event:2")

    def scalars(self, step, at, values):
        """Write numbers by name; None is left out. at: seconds since 1970."""
        if self._writer:
            value = [
                self._summary.Value(tag=name, simple_value=number) for name, number in values.items() if number is not None
            ]
            self._write(at, step=step, summary=self._summary(value=value))

    def close(self):
        if self._writer:
            self._writer = None
            with contextlib.suppress(OSError):
                self._file.close()

    def _write(self, at, **values):
        try:
            self._writer.write(self._event(wall_time=at, **values).SerializeToString())
            self._file.flush()
        except OSError:  # a full disk says so where the checkpoints are written
            self.close()
