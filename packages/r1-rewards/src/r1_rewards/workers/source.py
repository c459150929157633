"""Import a user's file, and write a function of a notebook cell or a script to a file that workers can import.

Importing a running script would run it again, so the function's source is copied with everything it uses.
"""

import ast
import dis
import importlib.util
import inspect
import re
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from r1_rewards.types import RewardSpecError

_SETTINGS = ("REWARD_TYPE", "REWARD_NAME", "COMPLETIONS")  # of a reward file, see `functions`


def import_file(path: Path, kind: str = "reward", name: str = "r1_reward_file") -> ModuleType:
    """Import a user's file as the module `name`. Raises RewardSpecError, with the line, if that fails."""
    module_spec = importlib.util.spec_from_file_location(name, path)
    if module_spec is None or module_spec.loader is None:
        raise RewardSpecError(f"{kind} file {path} is not a Python file")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses and typing look their module up here
    # At the end, so that a neighbour called math.py cannot take the place of a standard module.
    sys.path += [str(path.parent), str(Path.cwd())]
    try:
        module_spec.loader.exec_module(module)
    except SyntaxError as error:
        where = f", which {path} imports" if error.filename not in (None, str(path)) else ""
        raise RewardSpecError(
            f"{kind} file {error.filename or path}{where}, line {error.lineno}: {error.msg}; correct the file"
        ) from error
    except BaseException as error:  # a file that calls sys.exit() must say so here, not end the worker
        reason = describe_exception(error, str(path))
        raise RewardSpecError(f"{kind} file {path} cannot be imported: {reason}") from error
    return module


def describe_exception(error: BaseException, file: str | None) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    where = f" (line {lines[-1]} of {Path(file).name})" if lines and file else ""
    return f"{type(error).__name__}: {str(error)[:500]}{where}"


def write_function(function: Callable[..., object], folder: Path, kind: str = "reward") -> str:
    """Return `file.py:function` for a function; one of `__main__` is first written to `folder`.

    `kind` names it in errors. Raises RewardSpecError for a lambda, a method or a closure, and for a variable in use
    that has no literal form.
    """
    name = getattr(function, "__name__", type(function).__name__)
    if not inspect.isfunction(function) or name == "<lambda>" or function.__closure__:
        raise RewardSpecError(f"{kind} {name!r}: pass a function written with `def`, using no variables around it")
    if function.__module__ != "__main__" and function.__qualname__ == name:
        return f"{inspect.getsourcefile(function)}:{name}"
    parts: dict[str, str] = {}
    try:
        for setting in _SETTINGS:
            if setting in function.__globals__:
                _add(setting, function.__globals__[setting], function, parts)
        _add(name, function, function, parts)
    except RewardSpecError as error:
        raise RewardSpecError(f"{kind} {name!r}: {error}") from error
    file = folder / f"{name}.py"
    file.write_text("\n\n".join(parts.values()) + "\n", encoding="utf-8")
    return f"{file}:{name}"


def _add(name: str, value: Any, function: Any, parts: dict[str, str]) -> None:
    if name in parts:
        return
    if isinstance(value, ModuleType):
        parts[name] = f"import {value.__name__} as {name}"
    elif isinstance(value, re.Pattern):
        parts[name] = f"{name} = __import__('re').compile({value.pattern!r}, {value.flags})"
    elif inspect.isroutine(value) or inspect.isclass(value):
        if value.__module__ == function.__module__:
            parts[name] = ""  # keeps its place where functions use one another
            source = _source(name, value)
            for used in _global_names(source):
                if used in function.__globals__:
                    _add(used, function.__globals__[used], function, parts)
            attributes = vars(value).items() if inspect.isfunction(value) else ()  # such as a loss's `needs`
            lines = [f"{name}.{key} = {_literal(f'{name}.{key}', one)}\n" for key, one in attributes]
            parts[name] = "".join([parts.pop(name), source, *lines])
        else:
            parts[name] = f"from {value.__module__} import {value.__qualname__} as {name}"
    elif (owner := _special_form(value)) is not None:
        parts[name] = f"from {owner} import {value._name} as {name}"
    else:
        parts[name] = f"{name} = {_literal(name, value)}"


def _special_form(value: Any) -> str | None:
    """Return the module of what annotations are made of, such as `typing.Literal`; None for any other value."""
    module, name = type(value).__module__, getattr(value, "_name", None)
    return module if module == "typing" and name and vars(sys.modules[module]).get(name) is value else None


def _source(name: str, value: Any) -> str:
    try:
        source = textwrap.dedent(inspect.getsource(value))
        defined = [getattr(node, "name", "") for node in ast.parse(source).body]
    except (OSError, TypeError, SyntaxError):
        defined = []
    if defined != [value.__name__]:  # of code that `exec` ran, Python may return other lines
        raise RewardSpecError(f"the source of {name!r} cannot be found; write it to a file")
    return source


def _global_names(source: str) -> list[str]:
    """Return the names that a function's or class's source looks up outside itself."""
    return sorted(
        step.argval
        for code in _codes(compile(source, "<source>", "exec"))
        for step in dis.get_instructions(code)
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    )


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _literal(name: str, value: object) -> str:
    try:
        if ast.literal_eval(repr(value)) == value:
            return repr(value)
    except (ValueError, SyntaxError, TypeError):
        pass
    raise RewardSpecError(
        f"it uses {name!r}, a {type(value).__name__}, which cannot be handed to another process; make it inside the "
        "function, or write the function to a file"
    )
