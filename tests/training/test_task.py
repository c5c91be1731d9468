"""A task on its way to another process."""

import dataclasses
import json
from pathlib import Path

from tpukit import MNIST
from tpukit.training.task import from_settings, to_request


@dataclasses.dataclass(frozen=True, kw_only=True)
class Own(MNIST):
    """A workload with settings of every type."""

    notes: Path | None = Path("notes")
    places: tuple[Path, ...] = (Path("a"), Path("b"))
    sizes: tuple[int, ...] | None = (3, 4)


def test_a_task_arrives_in_another_process_as_it_was_sent(digits):
    task = Own(dataset_dir=digits, weights="w.pth", batch_size=4, places=(Path("c"),), sizes=None)
    request = json.loads(json.dumps(to_request(task)[0]))
    received = from_settings(Own, request["settings"] | dict(of_an_older_version=1))
    assert received == dataclasses.replace(task, weights=Path("w.pth")) and isinstance(received.notes, Path)
    assert from_settings(Own, {}) == Own()
