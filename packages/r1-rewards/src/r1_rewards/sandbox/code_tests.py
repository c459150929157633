"""Read the tests of a coding task in the forms in which data sets publish them.

- `{"inputs": […], "outputs": […]}`: texts for stdin and stdout (APPS, TACO, CodeContests); with `"fn_name": "f"`, each
  input is a list of arguments and each output the result of the function, or of the method of a class `Solution`.
- `[{"input": …, "output": …, "testtype": "stdin" | "functional"}, …]` (LiveCodeBench), or `{"tests": […], "fn_name":
  …}`: functional inputs have one JSON value per argument and line, outputs one JSON value.
- `{"test_list": ["assert …", …], "test_setup_code": …}` (MBPP), or the bare list of texts.
- `{"test": "def check(candidate): …", "entry_point": "f", "prompt": …}` (HumanEval); tests and solution may use the
  prompt's helper functions.
- Python source: each top-level `assert`, each function `test_…` (also `async`), and each such method, own or inherited,
  of a class `Test…` or a subclass of `unittest.TestCase` is one test.

Asserts that nothing would run, and expected outputs that are all empty or all null, are refused as errors of the data.
"""

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# What LeetCode and its data sets take for granted.
IMPORTS = "import collections, functools, heapq, itertools, math, re, string\nfrom typing import *\n"


class TestsError(ValueError):
    __test__ = False


@dataclass(frozen=True, slots=True)
class StdinTests:
    pairs: list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class CallTests:
    """Arguments for a function and expected plain values; a solution may return tuples for lists."""

    function: str
    pairs: list[tuple[list[Any], Any]]
    wrapped: bool  # an expected list of one value may stand for the value, as in APPS


@dataclass(frozen=True, slots=True)
class AssertTests:
    """Source texts that raise if the solution is wrong, and the setup to execute before them."""

    setup: str
    units: list[str]
    prefix: str = ""  # put before the solution as well


CodeTests = StdinTests | CallTests | AssertTests


def read_tests(ground_truth: str) -> CodeTests:
    tests = _read(ground_truth)
    if isinstance(tests, StdinTests) and not any(expected.strip() for _, expected in tests.pairs):
        raise TestsError("every expected output is empty: a program that prints nothing would pass")
    if isinstance(tests, CallTests) and all(_is_null(expected, tests.wrapped) for _, expected in tests.pairs):
        raise TestsError("every expected value is null: a function that does nothing would pass")
    return tests


def _is_null(expected: object, wrapped: bool) -> bool:
    return expected is None or (wrapped and expected == [None])


def _read(ground_truth: str) -> CodeTests:
    try:
        data = json.loads(ground_truth)
    except ValueError:
        return _read_source(ground_truth)
    match data:
        case {"inputs": [*inputs], "outputs": [*outputs]}:
            return _read_columns(inputs, outputs, data.get("fn_name"))
        case {"tests": [*tests]}:
            return _read_records(tests, data.get("fn_name"))
        case {"test_list": [*units]}:
            setup = str(data.get("test_setup_code") or "")
            return AssertTests(setup, _texts(units, _parse(setup)))
        case {"test": str(test), "entry_point": str(name)}:
            prefix = str(data.get("prompt") or "")
            if "check" not in _defined(_parse(test)):
                raise TestsError("the test defines no function 'check', which is called with the solution's")
            # The prompt defines the function, too, without a body.
            return AssertTests(f"{prefix}\n{test}", [f"from solution import {name}\ncheck({name})"], prefix)
        case [str(), *_]:
            return AssertTests("", _texts(data, []))
        case [{}, *_]:
            return _read_records(data, None)
    raise TestsError(f"tests of no known form: {ground_truth[:80]!r}; see the README for those that are")


def _read_columns(inputs: list[Any], outputs: list[Any], function: object) -> CodeTests:
    if len(inputs) != len(outputs) or not inputs:
        raise TestsError(f"there are {len(inputs)} inputs and {len(outputs)} outputs; there must be as many, and some")
    if function is None:
        return StdinTests([(_text(given), _text(wanted)) for given, wanted in zip(inputs, outputs, strict=True)])
    for index, given in enumerate(inputs):
        if not isinstance(given, list):
            raise TestsError(f"input {index} is {str(given)[:80]!r}, not a list of arguments for {function}")
    return CallTests(str(function), list(zip(inputs, outputs, strict=True)), wrapped=True)


def _read_records(records: Sequence[Any], function: object) -> CodeTests:
    if not all(isinstance(record, Mapping) and {"input", "output"} <= set(record) for record in records) or not records:
        raise TestsError("each test needs 'input' and 'output', and there must be one")
    kinds = {str(record.get("testtype", "stdin")) for record in records}
    if kinds == {"stdin"} and function is None:
        return StdinTests([(_text(record["input"]), _text(record["output"])) for record in records])
    if kinds == {"stdin"} or kinds != {"functional"}:
        raise TestsError(f"tests of the kinds {sorted(kinds)}, with fn_name {function!r}; one kind at a time")
    if function is None:
        raise TestsError('functional tests need the function: {"tests": […], "fn_name": "f"}')
    try:
        pairs = [
            ([json.loads(line) for line in str(record["input"]).splitlines() if line.strip()],
             json.loads(record["output"]))
            for record in records
        ]  # fmt: skip
    except (TypeError, ValueError) as error:
        raise TestsError(f"a functional test is not JSON, one value per line: {error}") from error
    return CallTests(str(function), pairs, wrapped=False)


def _read_source(source: str) -> AssertTests:
    statements = _parse(source)
    units = [ast.unparse(node) for node in statements if isinstance(node, ast.Assert)] + _calls(statements)
    setup = [node for node in statements if not isinstance(node, ast.Assert)]
    # In loops and the like, asserts run with the set-up, and fail every test.
    if not units and any(isinstance(node, _COMPOUND) and _asserts(node) for node in setup):
        units = ["pass"]
    if not units:
        raise TestsError("the tests have neither an assert at top level nor a function test_…")
    return AssertTests("\n".join(map(ast.unparse, setup)), units)


_COMPOUND = (ast.For, ast.While, ast.With, ast.Try)
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def _calls(statements: Sequence[ast.stmt], setup: Sequence[ast.stmt] = ()) -> list[str]:
    """Return source that calls each test function and method, also inherited ones.

    `setup` runs before and may define base classes. Raises TestsError for asserts that nothing would run.
    """
    calls: list[str] = []
    idle: list[ast.ClassDef | _Function] = []
    classes = {node.name: node for node in (*setup, *statements) if isinstance(node, ast.ClassDef)}
    for node in statements:
        if isinstance(node, _Function) and node.name.startswith("test"):
            calls.append(_call(node.name, node, 0))
        elif isinstance(node, ast.ClassDef):
            lineage = _lineage(node, classes)
            found = {one.name: one for kind in reversed(lineage) for one in kind.body if isinstance(one, _Function)}
            methods = [one for name, one in found.items() if name.startswith("test")]
            if any(ast.unparse(base).endswith("TestCase") for kind in lineage for base in kind.bases):
                suite = "unittest.TestSuite([{}({!r})])"
                calls += [f"import unittest\n{suite.format(node.name, one.name)}.debug()" for one in methods]
            elif node.name.startswith("Test"):
                calls += [_call(f"{node.name}().{one.name}", one, 1) for one in methods]
            elif _asserts(node):
                idle.append(node)
    used = {inner.id for node in statements for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    for node in statements:
        if isinstance(node, _Function) and not node.name.startswith("test") and _asserts(node):
            idle.append(node)
    for node in idle:
        if node.name not in used:
            kind, name = ("class", "Test…") if isinstance(node, ast.ClassDef) else ("function", "test_…")
            raise TestsError(f"the {kind} {node.name!r} has asserts, and nothing calls it; call it, or name it {name}")
    return calls


def _lineage(node: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> list[ast.ClassDef]:
    found = [node]
    for kind in found:
        named = (classes.get(ast.unparse(base)) for base in kind.bases)
        found += [base for base in named if base is not None and base not in found]
    return found


def _call(target: str, function: _Function, bound: int) -> str:
    wanted = function.args.posonlyargs + function.args.args
    if len(wanted) - bound > len(function.args.defaults) or function.decorator_list:
        raise TestsError(
            f"the test {function.name!r} takes arguments or is decorated, as for pytest, which is not here"
        )
    return f"import asyncio\nasyncio.run({target}())" if isinstance(function, ast.AsyncFunctionDef) else f"{target}()"


def _asserts(node: ast.AST) -> bool:
    return any(isinstance(inner, ast.Assert) for inner in ast.walk(node))


def _defined(statements: Sequence[ast.stmt]) -> set[str]:
    functions = {node.name for node in statements if isinstance(node, _Function)}
    return functions | {
        target.id
        for node in statements if isinstance(node, ast.Assign)
        for target in node.targets if isinstance(target, ast.Name)
    }  # fmt: skip


def _parse(source: str) -> list[ast.stmt]:
    try:
        return ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError) as error:
        raise TestsError(f"tests that are neither JSON nor Python: {error}") from error


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _texts(values: list[Any], setup: Sequence[ast.stmt]) -> list[str]:
    if not values or not all(isinstance(value, str) for value in values):
        raise TestsError("a list of tests holds source texts, and at least one")
    units = []
    for value in values:
        try:
            statements = ast.parse(value).body
        except (SyntaxError, ValueError, RecursionError) as error:
            raise TestsError(f"the test {value[:80]!r} is not Python: {error}") from error
        units.append("\n".join([value, *_calls(statements, setup)]))
    return units
