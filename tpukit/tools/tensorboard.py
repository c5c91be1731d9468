"""The numbers of a run as a TensorBoard event file: `tpukit report RUN --tensorboard FOLDER`."""

import io
from collections.abc import Iterator
from pathlib import Path

from tpukit.host import files
from tpukit.host.errors import explained
from tpukit.host.tables import GIB
from tpukit.reporting.findings import Record, readable
from tpukit.runs.run import Run


def write_events(run: Run, folder: Path) -> Path:
    """Write the numbers of a run's records to one event file in `folder`. An earlier file of this run there
    is replaced. Return its path. Raise TpukitError if the package tensorboard is missing."""
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
    with files.explain_unwritable(folder):
        folder.mkdir(parents=True, exist_ok=True)
    files.write_atomic(path, content.getvalue())
    return path


def _scalars(record: Record) -> Iterator[tuple[str, float]]:
    """Yield (name, number) of a training interval or an evaluation."""
    numbers = {}
    if record["kind"] == "evaluation":
        numbers = {f"scores/{name}": value for name, value in record["scores"].items()}
    elif record["kind"] == "train":
        speed = record["speed"]
        numbers["loss"] = record["loss"]
        numbers["gradient norm"] = record["grad_norm"]
        numbers["learning rate"] = record.get("lr")
        numbers["speed/samples per second"] = speed["images_per_s"]
        numbers["speed/waiting for data"] = speed["wait_s"] / max(speed["seconds"], 1e-9)
        for name, value in (speed.get("rates") or {}).items():
            numbers[f"speed/{name}"] = value
        for device, (peak, _) in enumerate(speed["memory"]):
            numbers[f"memory/device {device}, GiB"] = peak / GIB
    for name, value in numbers.items():
        if isinstance(value, (int, float)) and abs(value) < 2.0**127:
            yield name, value
