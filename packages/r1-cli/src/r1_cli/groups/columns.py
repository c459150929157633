"""Which columns of a data row reach a reward: those that JSON can carry to a worker process."""

from collections.abc import Mapping
from typing import Any


def json_columns(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns that can be written as JSON; bytes and dates cannot."""
    return {name: value for name, value in columns.items() if is_json(value)}


def is_json(value: Any) -> bool:
    """Whether a value can be written as JSON."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and is_json(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(is_json, value))
    return value is None or isinstance(value, str | int | float | bool)
