"""Check a JSON value against a type annotation."""

from types import UnionType
from typing import Any, Literal, get_args, get_origin


def has_type(value: Any, expected: Any) -> bool:
    """Return True if a value is of the expected type: one as in annotations, or a dict of the types of some
    values of an object.

    A value that may be None may also be missing. A number is finite and below 2**63 in size."""
    if isinstance(expected, dict):
        return isinstance(value, dict) and all(has_type(value.get(key), expected[key]) for key in expected)
    if expected is Any:
        return True
    origin, inner = get_origin(expected), get_args(expected)
    if origin is UnionType:
        return any(has_type(value, one) for one in inner)
    if origin is Literal:
        return value in inner
    if origin is list:
        return isinstance(value, list) and all(has_type(item, inner[0]) for item in value)
    if origin is tuple:  # which JSON writes as a list
        return isinstance(value, list) and len(value) == len(inner) and all(map(has_type, value, inner))
    if origin is dict:
        return isinstance(value, dict) and all(has_type(item, inner[1]) for item in value.values())
    if expected in (int, float):
        return isinstance(value, (int, expected)) and not isinstance(value, bool) and abs(value) < 2**63
    return isinstance(value, expected)
