"""Run judged code: a program as `__main__`, or a solution that serves calls as JSON lines.

The expected results are never in this process: a solution can only return values, which are compared elsewhere.
"""

import atexit
import json
import os
import sys
import threading
from collections.abc import Callable
from itertools import islice
from types import ModuleType
from typing import Any, NoReturn, TextIO

from . import values

REQUESTS, RESPONSES = 3, 4  # descriptors
_MAX_ITEMS = 1_000_000  # taken from an iterator


def run_program(request: values.Request) -> NoReturn:
    """Run `request["source"]` and exit as the interpreter would, without its slow clean-up.

    Waits for non-daemon threads, then runs `atexit` functions: programs may buffer their output.
    """
    sys.argv = ["solution.py"]
    code = 0
    try:
        execute(request["source"], new_module("__main__"))
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        code = code or 1
    os._exit(code & 0xFF)


def new_module(name: str) -> ModuleType:
    """Add an empty module to `sys.modules`, where dataclasses and typing look for it."""
    module = ModuleType(name)
    sys.modules[name] = module
    return module


def execute(source: str, module: ModuleType) -> None:
    """Execute `source` as the module's code: judged code or tests."""
    exec(compile(source, f"{module.__name__}.py", "exec"), vars(module))


def serve_solution(request: values.Request) -> None:
    responses = os.fdopen(RESPONSES, "w", encoding="ascii")
    with os.fdopen(REQUESTS, encoding="ascii") as requests:
        try:
            module = new_module("solution")
            execute(request["source"], module)
            solution = _Solution(vars(module))
        except BaseException as error:
            _write(responses, _raised(error))
            return
        _write(responses, {"value": None})
        for line in requests:
            try:
                response = solution.respond(json.loads(line))
            except BaseException as error:  # SystemExit too: this call failed, the next may not
                response = _raised(error)
            _write(responses, response)
    os._exit(0)  # threads that the solution left do not matter


class _Solution:
    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names
        self._handles: list[Any] = []

    def respond(self, request: dict[str, Any]) -> dict[str, Any]:
        target = self._find(request["target"])
        args = values.decode(request["args"], self._find)
        kwargs = values.decode(request["kwargs"], self._find)
        result = _ACTIONS[request["do"]](target, *args, **kwargs)
        return {"value": values.encode(result, self._hold)}

    def _find(self, reference: dict[str, Any]) -> Any:
        if "handle" in reference:
            return self._handles[reference["handle"]]
        name = reference["name"]
        if name not in self._names and "Solution" in self._names:
            return getattr(self._names["Solution"](), name)
        if name not in self._names:
            raise NameError(f"the solution defines no {name!r}")
        return self._names[name]

    def _hold(self, value: Any) -> dict[str, Any]:
        if hasattr(value, "tolist"):  # arrays and scalars of numpy
            return values.encode(value.tolist(), self._hold)
        self._handles.append(value)
        return {"handle": len(self._handles) - 1}


def _call(target: Any, *args: Any, **kwargs: Any) -> Any:
    return target(*args, **kwargs)


_ACTIONS: dict[str, Callable[..., Any]] = {
    "get": lambda target: target,
    "call": _call,
    "attribute": getattr,
    "item": lambda target, key: target[key],
    "length": len,
    "items": lambda target: list(islice(target, _MAX_ITEMS)),
    "text": str,
}


def _raised(error: BaseException) -> dict[str, Any]:
    kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
    try:
        text = f"{type(error).__name__}: {error}"[:300]
    except BaseException:
        text = type(error).__name__
    return {"raised": [kinds[0] if kinds else "Exception", text]}


def _write(responses: TextIO, response: dict[str, Any]) -> None:
    try:
        text = json.dumps(response)
    except BaseException as error:
        text = json.dumps(_raised(error))
    responses.write(text + "\n")
    responses.flush()
    sys.stdout.flush()
