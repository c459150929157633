"""Write a function of a notebook cell or a script to a file that worker processes can import.

Importing a running script would run it again, so the function's source is copied with everything it uses.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from r1_rewards.types import RewardSpecError

_SETTINGS = ("REWARD_TYPE", "REWARD_NAME", "COMPLETIONS")  # of a reward file, see `functions`


def write_function(function: Callable[..., object], folder: Path) -> str:
    """Return `file.py:function` for a function; one of `__main__` is first written to `folder`.

    Raises RewardSpecError for a lambda, a method or a closure, and for a variable in use that has no literal form.
    """
    name = getattr(function, "__name__", str(function))
    if not inspect.isfunction(function) or name == "<lambda>" or function.__closure__:
        raise RewardSpecError(f"reward {name!r}: pass a function written with `def`, using no variables around it")
    if function.__module__ != "__main__" and function.__qualname__ == name:
        return f"{inspect.getsourcefile(function)}:{name}"
    parts: dict[str, str] = {}
    for setting in _SETTINGS:
        if setting in function.__globals__:
            _add(setting, function.__globals__[setting], function, parts)
    _add(name, function, function, parts)
    file = folder / f"{name}.py"
    file.write_text("\n\n".join(parts.values()) + "\n", encoding="utf-8")
    return f"{file}:{name}"


def _add(name: str, value: Any, function: Any, parts: dict[str, str]) -> None:
    if name in parts:
        return
    if isinstance(value, ModuleType):
        parts[name] = f"import {value.__name__} as {name}"
    elif inspect.isroutine(value) or inspect.isclass(value):
        if value.__module__ == function.__module__:
            parts[name] = ""  # keeps its place where functions use one another
            source = _source(name, value)
            for used in _names(source):
                if used in function.__globals__:
                    _add(used, function.__globals__[used], function, parts)
            parts[name] = parts.pop(name) + source
        else:
            parts[name] = f"from {value.__module__} import {value.__qualname__} as {name}"
    else:
        parts[name] = f"{name} = {_literal(name, value)}"


def _source(name: str, value: Any) -> str:
    try:
        return textwrap.dedent(inspect.getsource(value))
    except (OSError, TypeError) as error:
        raise RewardSpecError(f"reward: the source of {name!r} cannot be found; write it to a file") from error


def _names(source: str) -> list[str]:
    return sorted({node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)})


def _literal(name: str, value: object) -> str:
    try:
        if ast.literal_eval(repr(value)) == value:
            return repr(value)
    except (ValueError, SyntaxError, TypeError):
        pass
    raise RewardSpecError(
        f"reward: it uses {name!r}, a {type(value).__name__}, which cannot be handed to another process; make it "
        "inside the function, or write the reward to a file"
    )
