"""Execute tests against a solution in another process and report one verdict per test.

The tests see proxies: a call sends its arguments by value to the solution's process and returns a plain value. Nothing
of the solution runs here, so none of its patches, `__eq__` or exits can change a verdict.
"""

import ast
import builtins
import contextlib
import importlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NoReturn

from . import values
from .solution import execute, new_module

REQUESTS, RESPONSES = 3, 4  # descriptors: what this process reads, and what it writes


class UnsendableArgument(TypeError):
    pass


_TESTS_AT_FAULT = (UnsendableArgument, SyntaxError, ModuleNotFoundError)


def run_assertions(request: values.Request) -> None:
    """Execute the setup `request["source"]` and each of `request["units"]`; write a verdict for each."""
    wire = _Wire()
    sys.modules["solution"] = _SolutionModule(wire)
    tests = new_module("tests")
    try:
        for name, is_module in foreign_names([request["source"], *request["units"]]).items():
            _provide(name, is_module, tests, wire)
        execute(request["source"], tests)
    except _TESTS_AT_FAULT as error:
        wire.write({"broken": _describe(error)})
    except BaseException as error:  # of the solution's making, as where it lacks what the set-up uses
        for _ in request["units"]:
            wire.write({"verdict": False, "why": _describe(error)})
    else:
        _try_units(request["units"], tests, wire)
    os._exit(0)


def _try_units(units: list[str], tests: ModuleType, wire: "_Wire") -> None:
    for unit in units:
        wire.write({"begin": unit[:200]})
        try:
            execute(unit, tests)
        except _TESTS_AT_FAULT as error:
            wire.write({"broken": _describe(error)})
            return
        except BaseException as error:
            wire.write({"verdict": False, "why": _describe(error)})
        else:
            wire.write({"verdict": True, "why": ""})


class Proxy:
    """A function, class or other object of the solution that is not a plain value.

    It cannot be compared or used as a truth value, because the solution's own code would decide the result.
    """

    def __init__(self, wire: "_Wire", target: dict[str, Any]) -> None:
        object.__setattr__(self, "_wire", wire)
        object.__setattr__(self, "_target", target)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._wire.ask("call", self._target, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return self._wire.ask("attribute", self._target, (name,))

    def __getitem__(self, key: Any) -> Any:
        return self._wire.ask("item", self._target, (key,))

    def __len__(self) -> Any:
        return self._wire.ask("length", self._target)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._wire.ask("items", self._target))

    def __str__(self) -> str:
        return str(self._wire.ask("text", self._target))

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError("the solution's own objects cannot be compared by tests; compare plain values of them")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __contains__ = _refuse
    __hash__ = None  # type: ignore[assignment]


class _SolutionModule(ModuleType):
    def __init__(self, wire: "_Wire") -> None:
        super().__init__("solution")
        self.__dict__["_wire"] = wire

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return _fetch(name, self._wire)
        except NameError as error:
            raise AttributeError(name) from error


class _Wire:
    def __init__(self) -> None:
        self._reader = os.fdopen(REQUESTS, encoding="ascii")
        self._writer = os.fdopen(RESPONSES, "w", encoding="ascii")

    def write(self, message: dict[str, Any]) -> None:
        self._writer.write(json.dumps(message) + "\n")
        self._writer.flush()

    def ask(
        self, do: str, target: dict[str, Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        request = {"do": do, "target": target, "args": values.encode(list(args), _send)}
        self.write({"ask": {**request, "kwargs": values.encode(kwargs or {}, _send)}})
        line = self._reader.readline()
        if not line:
            os._exit(1)
        response = json.loads(line)
        if "raised" in response:
            kind, text = response["raised"]
            raise _builtin_exception(kind)(text)
        return values.decode(response["value"], lambda reference: Proxy(self, reference))


def _builtin_exception(name: str) -> type[Exception]:
    found = getattr(builtins, name, None)
    if isinstance(found, type) and issubclass(found, Exception) and not issubclass(found, _NEVER_RAISED):
        return found
    return RuntimeError


# The last two would end a loop over the solution's results, such as `all(map(f, …))`, as if all had been well.
_NEVER_RAISED = (
    *_TESTS_AT_FAULT, UnicodeDecodeError, UnicodeEncodeError, UnicodeTranslateError, ExceptionGroup,
    StopIteration, StopAsyncIteration,
)  # fmt: skip


def _send(value: Any) -> dict[str, Any]:
    if isinstance(value, Proxy):
        return object.__getattribute__(value, "_target")
    raise UnsendableArgument(
        f"a test passes a {type(value).__name__} to the solution; only plain values can be sent to its process "
        "(None, bool, numbers, text, bytes, lists, tuples, sets, dicts)"
    )


def foreign_names(sources: list[str]) -> dict[str, bool]:
    """Return the names that the tests read and Python lacks, and whether each is only used with a dot, as a module."""
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    uses = Counter(node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))
    dotted = Counter(
        node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    )
    return {name: uses[name] <= dotted[name] for name in sorted(uses) if not hasattr(builtins, name)}


def _provide(name: str, is_module: bool, tests: ModuleType, wire: _Wire) -> None:
    if is_module and name in sys.stdlib_module_names:
        vars(tests)[name] = importlib.import_module(name)
        return
    with contextlib.suppress(NameError):
        vars(tests)[name] = _fetch(name, wire)


def _fetch(name: str, wire: _Wire) -> Any:
    found = wire.ask("get", {"name": name})
    return Proxy(wire, {"name": name}) if isinstance(found, Proxy) else found


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:300]
