"""Execute tests against decoys in place of a solution, to find out whether any answer could fail them."""

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from . import values
from .assertions import RESPONSES, foreign_names
from .solution import execute, new_module

_DECISIONS = 100_000  # truth values that the tests may ask for in one run, lest a loop never end
PLAIN: tuple[Any, ...] = (
    None,
    True,
    -12345,
    0.125,
    "decoy",
    b"",
    [],
    (),
    {},
    set(),
)  # answers of the runs after the first two


def run_decoys(request: values.Request) -> None:
    """Execute the request's tests against decoys; write whether an answer could fail them."""
    units = [request["source"], *request["units"]]
    failed = any(_fails(units, Decoy(DecoyRun(truth)), Exception) for truth in (False, True))
    failed = failed or any(_fails(units, Stub(answer), AssertionError) for answer in PLAIN)
    with os.fdopen(RESPONSES, "w", encoding="ascii") as responses:
        responses.write(json.dumps({"can_fail": failed}) + "\n")
    os._exit(0)


class _Endless(Exception):
    pass


class DecoyRun:
    """One run of the tests, in which every truth value that depends on a decoy is `truth`."""

    def __init__(self, truth: bool) -> None:
        self.truth, self._left = truth, _DECISIONS

    def decide(self) -> bool:
        self._left -= 1
        if self._left < 0:
            raise _Endless
        return self.truth


class Decoy:
    """An object that supports every operation with a decoy as its result; comparisons return the run's truth value.

    Conversions to numbers, lengths and text differ between the two runs.
    """

    def __init__(self, run: DecoyRun) -> None:
        self._run = run

    def __getattr__(self, name: str) -> "Decoy":
        if name.startswith("_"):
            raise AttributeError(name)
        return Decoy(self._run)

    def __call__(self, *_: object, **__: object) -> "Decoy":
        return Decoy(self._run)

    def __bool__(self) -> bool:
        return self._run.decide()

    def __contains__(self, _: object) -> bool:
        return self._run.decide()

    def __iter__(self) -> Iterator["Decoy"]:
        return iter((Decoy(self._run), Decoy(self._run)))

    def __next__(self) -> "Decoy":
        self._run.decide()
        return Decoy(self._run)

    def __len__(self) -> int:
        return 7 if self._run.truth else 0

    def __index__(self) -> int:
        return 12345 if self._run.truth else -1

    __int__ = __index__

    def __float__(self) -> float:
        return 12345.5 if self._run.truth else float("nan")

    def __str__(self) -> str:
        return "decoy" if self._run.truth else ""

    __repr__ = __str__

    def __format__(self, _: str) -> str:
        return str(self)

    def __setitem__(self, _: object, __: object) -> None: ...

    def __delitem__(self, _: object) -> None: ...

    def __enter__(self) -> "Decoy":
        return self

    def __exit__(self, *_: object) -> None: ...

    __hash__ = object.__hash__


_TWO_SIDED = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift"
_OPERATORS = [
    *(side + name for name in _TWO_SIDED.split() for side in ("", "r")),
    *["eq", "ne", "lt", "le", "gt", "ge", "getitem", "neg", "pos", "abs", "invert", "round", "trunc", "floor", "ceil"],
]
for _name in _OPERATORS:
    setattr(Decoy, f"__{_name}__", Decoy.__call__)


class Stub:
    def __init__(self, answer: Any, name: str = "") -> None:
        self._answer, self._name = answer, name

    def __call__(self, *_: object, **__: object) -> Any:
        return Stub(self._answer) if self._name[:1].isupper() else self._answer

    def __getattr__(self, name: str) -> "Stub":
        if name.startswith("_"):
            raise AttributeError(name)
        return Stub(self._answer, name)


class _DecoyModule(ModuleType):
    def __init__(self, find: Callable[[str], object]) -> None:
        super().__init__("solution")
        self.__dict__["_find"] = find

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._find(name)


def _fails(sources: list[str], decoy: Decoy | Stub, counts: type[Exception]) -> bool:
    def find(name: str) -> Any:
        return Stub(decoy._answer, name) if isinstance(decoy, Stub) else Decoy(decoy._run)

    tests = new_module("tests")
    sys.modules["solution"] = _DecoyModule(find)
    try:
        for name, is_module in foreign_names(sources).items():
            if is_module and name in sys.stdlib_module_names:
                vars(tests)[name] = importlib.import_module(name)
            elif not name.startswith("__"):
                vars(tests)[name] = find(name)
    except Exception:
        return True
    for source in sources:
        try:
            execute(source, tests)
        except counts:
            return True
        except BaseException:
            if counts is Exception:
                return True
    return False
