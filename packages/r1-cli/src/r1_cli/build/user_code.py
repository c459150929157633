"""Build losses and estimators by name, or from a user's file."""

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from r1_core.registry import Registry

T = TypeVar("T")
Own = Callable[[Any, str], T]

# Functions of the Python program that runs this, by `FILE:NAME` with an absolute path; see `own_functions`.
IN_PROCESS: dict[str, Callable[..., Any]] = {}


def find_in_process(path: Path, name: str) -> Callable[..., Any] | None:
    return IN_PROCESS.get(f"{path.resolve()}:{name}")


def build_by_name(
    registry: Registry[Callable[..., T]], name: str, settings: Mapping[str, Any], own: Callable[[Any, str], T]
) -> T:
    """Return the entry called `name`, built with the `settings` that it takes, or a user's `file.py:function`.

    Args:
        own: makes an entry of the user's function, as `r1_core.own` does.

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
    """Run a user's file in this process and return its function `name`, or return the program's own for it.

    Raises:
        ValueError: the file cannot be run, or has no such function; names the line.
    """
    if (given := find_in_process(path, name)) is not None:
        return given
    spec = importlib.util.spec_from_file_location(f"own_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for the names in their annotations
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == path.resolve()]
        where = f"{path}:{lines[-1]}" if lines else str(path)
        raise ValueError(f"{where} cannot be run: {type(error).__name__}: {error}") from error
    if name not in vars(module):
        raise ValueError(f"{path} defines no {name}")
    return vars(module)[name]
