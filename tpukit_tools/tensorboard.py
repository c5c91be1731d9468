"""The numbers of a run as a TensorBoard event file: `tpukit report RUN --tensorboard FOLDER`."""

import io
from collections.abc import Iterator
from pathlib import Path

from tpukit.host import files
from tpukit.host.errors import explained
from tpukit.reporting.findings import Record, readable
from tpukit.runs.run import Run


def write_events(run: Run, folder: Path) -> Path:
    """Write a run's numbers to one event file in `folder`, in place of its earlier one; return the path."""
    with explained("event files need tensorboard (pip install tensorboard)"):
        # What torch.utils.tensorboard uses, too; none of it imports TensorFlow.
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.summary.writer.record_writer import RecordWriter
    records = readable(run.records())
    first = records[0]["time"] if records else 0.0
    content = io.BytesIO()
    writer = RecordWriter(content)
    writer.write(Event(wall_time=first, file_version="brain.Event:2").SerializeToString())
    for record in records:
        values = [Summary.Value(tag=name, simple_value=number) for name, number in _scalars(record)]
        event = Event(wall_time=record["time"], step=record["step"], summary=Summary(value=values))
        writer.write(event.SerializeToString())
    path = folder / f"events.out.tfevents.{int(first)}.tpukit"
    folder.mkdir(parents=True, exist_ok=True)
    files.write_atomic(path, content.getvalue())
    return path


def _scalars(record: Record) -> Iterator[tuple[str, float]]:
    """Yield (name, number) of a training interval or an evaluation."""
    numbers = {f"scores/{name}": value for name, value in record.get("scores", {}).items()}
    if record["kind"] == "train":
        numbers = {"loss": record["loss"], "gradient norm": record["grad_norm"]}
        numbers["learning rate"] = record.get("lr")
        numbers["speed/samples per second"] = record["speed"]["images_per_s"]
    for name, value in numbers.items():
        if isinstance(value, (int, float)) and abs(value) < 2.0**127:
            yield name, value
