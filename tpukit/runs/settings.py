"""The settings of a task, as a run keeps them and compares them when it is resumed."""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import UnionType
from typing import (
    Any,
    ClassVar,
    Literal,
    Protocol,
    Self,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import numpy as np

from tpukit.host.environment import Environment
from tpukit.host.errors import TpukitError


class Described(Protocol):
    """A task as a run sees it: a frozen dataclass of settings, with a name."""

    name: ClassVar[str]
    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def weights(self) -> Path | None: ...
    def choose_settings(self, env: Environment) -> Self: ...


Kind = TypeVar("Kind", bound=Described)


def setting(default: Any, *, free: bool = False) -> Any:
    """Return a dataclass field of a task. free=True: a resumed run may change it, because it does not change
    the result."""
    return dataclasses.field(default=default, metadata={"free": free})


def as_declared(name: str, value: Any, declared: Any) -> Any:
    """Return the value of a setting in its declared type: a whole float as an int, a str as a Path, a list,
    as in JSON, as a tuple. Raises TpukitError for a value of another type. name: of the setting."""
    if get_origin(declared) is Literal:
        if value not in get_args(declared):
            raise TpukitError(f"{name}={value!r}: choose one of {', '.join(get_args(declared))}")
        return value
    members = get_args(declared) if get_origin(declared) in (Union, UnionType) else [declared]
    kinds = {get_origin(member) or member: get_args(member) for member in members}
    if type(value) in kinds:
        return value
    if Path in kinds and isinstance(value, str):
        return Path(value) if value else None  # a field of a notebook that was left empty
    if tuple in kinds and isinstance(value, list):
        of_items = kinds[tuple][0]
        return tuple(as_declared(name, item, of_items) for item in cast(list[Any], value))
    # What is left is of no declared type, or of a subclass of one: a bool is an int in Python, but no number
    # here.
    is_number = _is_number(value)
    is_whole = is_number and (isinstance(value, int) or float(value).is_integer())
    if bool in kinds and not isinstance(value, bool):
        raise _wrong_type(name, value, "True or False")
    if int in kinds:
        if not is_whole:
            raise _wrong_type(name, value, "a whole number")
        return value if isinstance(value, int) else int(value)  # of papermill, or of NumPy
    if float in kinds and not is_number:
        raise _wrong_type(name, value, "a number")
    if str in kinds and not isinstance(value, str):
        raise _wrong_type(name, value, "a text in quotes")
    if tuple in kinds and not isinstance(value, tuple):
        raise _wrong_type(name, value, "a tuple, such as ('head',)")
    return cast(Any, value)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool)


def _wrong_type(name: str, value: Any, wanted: str) -> TpukitError:
    return TpukitError(f"{name}={value!r} ({name.upper()} in a notebook): it must be {wanted}")


def require_at_least(task: Described, least: float, *names: str) -> None:
    """Raise TpukitError for a setting with a smaller value, NaN, or one that 64 bits do not hold. None is
    fine."""
    _require(task, least, 2**63 - 1, f"it must be {least} or more", names)


def require_shares(task: Described, *names: str) -> None:
    """Raise TpukitError for a setting that is not from 0 to 1. None is fine."""
    _require(task, 0, 1, "it must be from 0 to 1", names)


def _require(task: Described, least: float, most: float, rule: str, names: Iterable[str]) -> None:
    for name in names:
        value = getattr(task, name)
        if value is not None and not least <= value <= most:
            raise TpukitError(f"{name}={value!r}: {rule}")


def settings_dict(task: Described) -> dict[str, Any]:
    """Return the settings of a task as a dict that JSON keeps unchanged."""
    values = {field.name: getattr(task, field.name) for field in dataclasses.fields(task)}
    return json.loads(json.dumps(values, default=str))


def names_of_chosen(given: Described, chosen: Described) -> list[str]:
    """Return the names of the settings that `choose_settings` filled in. given: the task before it."""
    names = [field.name for field in dataclasses.fields(given)]
    return [name for name in names if getattr(given, name) is None and getattr(chosen, name) is not None]


def with_chosen(task: Kind, config: Mapping[str, Any]) -> Kind:
    """Return a task with the settings that a run chose, where the task leaves them None. config: of the
    run."""
    fields, settings = {field.name for field in dataclasses.fields(task)}, config["settings"]
    names = fields & settings.keys() & {*config.get("chosen", ())}
    kept = {name: settings[name] for name in names if getattr(task, name) is None}
    return dataclasses.replace(task, **kept) if kept else task


def check_settings(folder: Path, config: Mapping[str, Any], task: Described) -> None:
    """Raise TpukitError if the run in a folder is of another task, or of settings that would change its
    result. config: of the run, see `Run.config`."""
    if config["task"] != task.name:
        raise TpukitError(f"{folder} holds a run of {config['task']}, not {task.name}: choose another")
    trained, new = config["settings"], settings_dict(task)
    fixed = [field.name for field in dataclasses.fields(task) if not field.metadata.get("free")]
    names = [*fixed, *sorted(trained.keys() - new.keys())]
    old, now = ({name: values.get(name, "no such setting") for name in names} for values in (trained, new))
    changed = [name for name in names if old[name] != now[name]]
    if not changed:
        return
    lines = [f"  {name}: the run has {old[name]!r}, the task {now[name]!r}" for name in changed]
    advice = "Set them back to resume it, or choose another run folder (--run outputs/NAME)."
    raise TpukitError("\n".join([f"{folder} holds a run with other settings:", *lines, advice]))


def model_settings(task: Described) -> dict[str, Any]:
    """Return the settings that a result depends on, without paths, for JSON, to keep with the weights."""
    fixed = [f.name for f in dataclasses.fields(task) if not f.metadata.get("free") and f.name != "weights"]
    return {name: value for name, value in settings_dict(task).items() if name in fixed}


def from_settings(kind: type[Kind], given: Mapping[str, Any]) -> Kind:
    """Return a task of a class with settings as `settings_dict` gives them. What is given for no field of the
    class is left out. Raises TpukitError as `as_declared`."""
    types, fields = get_type_hints(kind), {field.name for field in dataclasses.fields(kind)}
    names = fields & given.keys()
    return kind(**{name: as_declared(name, given[name], types[name]) for name in names})
