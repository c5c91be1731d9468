"""The settings of a task, as a run keeps them and compares them when it is resumed."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol

from tpukit.host.errors import TpukitError


class Described(Protocol):
    """A task as a run sees it: a frozen dataclass of settings, with a name."""

    name: ClassVar[str]
    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def weights(self) -> Path | None: ...


def setting(default: Any, *, free: bool = False) -> Any:
    """A dataclass field of a task. free=True: a resumed run may change it, because it does not change the
    result."""
    return dataclasses.field(default=default, metadata={"free": free})


def settings_dict(task: Described) -> dict[str, Any]:
    """Return the settings of a task as a dict that JSON keeps unchanged."""
    values = {field.name: getattr(task, field.name) for field in dataclasses.fields(task)}
    return json.loads(json.dumps(values, default=str))


def check_settings(folder: Path, config: Mapping[str, Any], task: Described) -> None:
    """Raise TpukitError if the run in a folder is of another task, or of settings that would change its
    result. config: of the run, see `Run.config`."""
    if config["task"] != task.name:
        raise TpukitError(f"{folder} holds a run of {config['task']}, not {task.name}: choose another")
    trained, new = config["settings"], settings_dict(task)
    fixed = [field.name for field in dataclasses.fields(task) if not field.metadata.get("free")]
    old = {name: trained.get(name, "no such setting") for name in fixed}
    changed = [name for name in fixed if old[name] != new[name]]
    if not changed:
        return
    lines = [f"  {name}: the run has {old[name]!r}, the task {new[name]!r}" for name in changed]
    advice = "Set them back to resume it, or choose another run folder (--run outputs/NAME)."
    raise TpukitError("\n".join([f"{folder} holds a run with other settings:", *lines, advice]))
