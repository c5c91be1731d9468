"""The numbers of a run as a TensorBoard event file: `tpukit report RUN --tensorboard FOLDER`.

Needs neither tensorboard nor TensorFlow. The file is a sequence of TFRecords (tensorflow/core/lib/io/
record_writer.h), each of which holds an `Event` (tensorflow/core/util/event.proto) in protobuf's encoding."""

import functools
import struct
from collections.abc import Iterator
from pathlib import Path

from tpukit.host import files
from tpukit.host.tables import GIB
from tpukit.reporting.findings import Record, valid_records
from tpukit.runs.run import Run

MAX_FLOAT32 = 2.0**127
# Tags of protobuf's fields: number * 8 + wire type
WALL_TIME, STEP, FILE_VERSION, SUMMARY, VALUE, NAME, SIMPLE_VALUE = 0x09, 0x10, 0x1A, 0x2A, 0x0A, 0x0A, 0x15


def write_events(run: Run, folder: Path) -> Path:
    """Write the numbers of a run's records to one event file in `folder`. An earlier file of this run there
    is replaced. Returns its path."""
    records = valid_records(run.records())
    first = records[0]["time"] if records else 0.0
    path = folder / f"events.out.tfevents.{int(first)}.tpukit"
    with files.explain_unwritable(folder):
        folder.mkdir(parents=True, exist_ok=True)
    events = [_event(first, 0, _message(FILE_VERSION, b"brain.Event:2"))]
    for record in records:
        values = [_message(VALUE, _value(name, number)) for name, number in _scalars(record)]
        if values:
            events.append(_event(record["time"], record["step"], _message(SUMMARY, b"".join(values))))
    files.write_atomic(path, b"".join(map(_tf_record, events)))
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
        if isinstance(value, (int, float)) and abs(value) < MAX_FLOAT32:
            yield name, value


def _value(name: str, number: float) -> bytes:
    return _message(NAME, name.encode()) + struct.pack("<Bf", SIMPLE_VALUE, number)


def _event(time_s: float, step: int, content: bytes) -> bytes:
    return struct.pack("<Bd", WALL_TIME, time_s) + bytes([STEP]) + _varint(step) + content


def _message(tag: int, content: bytes) -> bytes:
    return bytes([tag]) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    """Seven bits a byte, the lowest first; the eighth bit says that more follow."""
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    return bytes([*encoded, number])


def _tf_record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + _masked_crc32c(length) + data + _masked_crc32c(data)


def _masked_crc32c(data: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _crc32c_of_byte((crc ^ byte) & 0xFF)
    crc ^= 0xFFFFFFFF
    rotated = crc >> 15 | crc << 17
    return struct.pack("<I", (rotated + 0xA282EAD8) & 0xFFFFFFFF)


@functools.cache
def _crc32c_of_byte(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte
