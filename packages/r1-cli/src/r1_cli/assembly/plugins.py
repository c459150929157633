"""The math that a configuration names: one of ours by name, or a user's own from a file."""

import importlib.util
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from r1_core.registry import Registry

T = TypeVar("T")
Own = Callable[[Any, str], T]


def choose(
    registry: Registry[Callable[..., T]], name: str, settings: Mapping[str, Any], own: Callable[[Any, str], T]
) -> T:
    """Return the entry called `name`, built with those of `settings` that it has, or a user's `file.py:function`.

    `own` makes an entry of the user's, as `r1_core.own` does.

    Raises:
        ValueError: there is no such name, or a setting is out of its range.
    """
    path, colon, function = name.rpartition(":")
    if colon:
        return own(load_function(Path(path), function), name)
    factory = registry.get(name)
    known = inspect.signature(factory).parameters
    return factory(**{key: value for key, value in settings.items() if key in known})


def load_function(path: Path, name: str) -> Any:
    """Run a user's file and return what it calls `name`. The file runs in this process: it is the user's own."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)
