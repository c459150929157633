"""Run a solution against its tests in sandboxes and return one verdict per test.

The solution's process receives inputs only, never expected values.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from r1_rewards.sandbox.code_tests import IMPORTS, AssertTests, CallTests, CodeTests, StdinTests, TestsError
from r1_rewards.sandbox.execution import Execution, Sandbox
from r1_rewards.sandbox.jail import values
from r1_rewards.sandbox.pipes import JsonChannel, OutputError

Verdict = Literal["passed", "wrong", "exception", "timeout", "memory", "output"]

_FLOAT_CHARACTERS = 400  # of a printed number
_DECOY_SECONDS = 4.0  # to find out whether tests can fail
_MOST_REMEMBERED = 4096
_ASSERTING: set[tuple[str, ...]] = set()  # tests that are known to fail for some answer
_NO_ASSERTIONS = (
    "the tests assert nothing about what the solution returns: they pass whatever it answers; compare its results with "
    "`assert`, in statements that run"
)


@dataclass(frozen=True, slots=True)
class Grading:
    """Seconds for one test and for all of them; how far floats may be off, absolutely or relatively."""

    seconds: float
    total_seconds: float
    tolerance: float | None


class _Failed(Exception):
    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict)
        self.verdict = verdict


def grade(source: str, tests: CodeTests, sandbox: Sandbox, grading: Grading) -> Iterator[Verdict]:
    """Yield a verdict for each test, in order; tests are run as the verdicts are consumed.

    Tests beyond the total time are timeouts. Raises SandboxError, and TestsError for tests that cannot be run.
    """
    deadline = time.monotonic() + grading.total_seconds
    match tests:
        case StdinTests():
            return _grade_stdin(source, tests, sandbox, grading, deadline)
        case CallTests():
            return _grade_calls(source, tests, sandbox, grading, deadline)
        case AssertTests():
            return _grade_asserts(source, tests, sandbox, grading, deadline)


def count(tests: CodeTests) -> int:
    return len(tests.units) if isinstance(tests, AssertTests) else len(tests.pairs)


def _grade_stdin(
    source: str, tests: StdinTests, sandbox: Sandbox, grading: Grading, deadline: float
) -> Iterator[Verdict]:
    for stdin, expected in tests.pairs:
        seconds = min(grading.seconds, deadline - time.monotonic())
        if seconds <= 0:
            yield "timeout"
            continue
        execution = sandbox.run(source, stdin.encode("utf-8", "surrogatepass"), seconds)
        yield _verdict_of(execution) or (
            "passed"
            if same_output(expected, execution.stdout.decode("utf-8", "replace"), grading.tolerance)
            else "wrong"
        )


def _verdict_of(execution: Execution) -> Verdict | None:
    if execution.ending in ("timeout", "output"):
        return "timeout" if execution.ending == "timeout" else "output"
    if execution.code == 0:
        return None
    last_line = execution.stderr.rstrip().rsplit(b"\n", 1)[-1]
    return "memory" if last_line.startswith(b"MemoryError") else "exception"


def same_output(expected: str, found: str, tolerance: float | None) -> bool:
    """Whether two outputs have the same words, separated by any whitespace.

    With a tolerance, finite numbers may differ by it, absolutely or relatively.
    """
    left, right = expected.split(), found.split()
    if len(left) != len(right):
        return False
    return all(
        a == b or (tolerance is not None and _close_words(a, b, tolerance)) for a, b in zip(left, right, strict=True)
    )


def _close_words(left: str, right: str, tolerance: float) -> bool:
    if max(len(left), len(right)) > _FLOAT_CHARACTERS:
        return False
    try:
        return _close(float(left), float(right), tolerance)
    except ValueError:
        return False


def _close(left: float, right: float, tolerance: float) -> bool:
    try:
        return math.isfinite(left) and math.isclose(left, right, rel_tol=tolerance, abs_tol=tolerance)
    except OverflowError:  # an integer beyond the range of floats
        return False


def _grade_calls(
    source: str, tests: CallTests, sandbox: Sandbox, grading: Grading, deadline: float
) -> Iterator[Verdict]:
    solution = _SolutionProcess(IMPORTS + source, sandbox)
    for args, expected in tests.pairs:
        request = {
            "do": "call",
            "target": {"name": tests.function},
            "args": values.encode(args, _refuse),
            "kwargs": values.encode({}, _refuse),
        }
        try:
            response = solution.ask(request, min(deadline, time.monotonic() + grading.seconds))
            yield _verdict_on(response, expected, tests.wrapped, grading.tolerance)
        except _Failed as failure:
            yield failure.verdict
    solution.close()


def _verdict_on(response: dict[str, Any], expected: object, wrapped: bool, tolerance: float | None) -> Verdict:
    if "raised" in response:
        raised = response["raised"]
        return "memory" if isinstance(raised, list) and raised[:1] == ["MemoryError"] else "exception"
    try:
        found = values.decode(response.get("value"), _refuse, text_keys=True)
        right = same_value(expected, found, tolerance)
        if wrapped and isinstance(expected, list) and len(expected) == 1:
            right = right or same_value(expected[0], found, tolerance)
    except (TypeError, ValueError, AttributeError, IndexError, KeyError, RecursionError):
        return "wrong"  # what no honest result looks like
    return "passed" if right else "wrong"


def same_value(expected: object, found: object, tolerance: float | None) -> bool:
    """Whether a returned plain value equals what JSON expects: tuples count as lists, dict keys are text.

    With a tolerance, floats may differ by it.
    """
    if isinstance(expected, list):
        if not isinstance(found, list | tuple) or len(expected) != len(found):
            return False
        return all(same_value(a, b, tolerance) for a, b in zip(expected, found, strict=True))
    if isinstance(expected, dict):
        if not isinstance(found, dict):
            return False
        return expected.keys() == found.keys() and all(
            same_value(value, found[key], tolerance) for key, value in expected.items()
        )
    if tolerance is not None and isinstance(expected, int | float) and isinstance(found, int | float):
        return expected == found or _close(expected, found, tolerance)
    return bool(expected == found)


def _grade_asserts(
    source: str, tests: AssertTests, sandbox: Sandbox, grading: Grading, deadline: float
) -> Iterator[Verdict]:
    solution = _SolutionProcess(f"{tests.prefix}\n{source}", sandbox)
    with Sandbox(sandbox.limits, sandbox.module_paths) as own_sandbox:  # where the solution is not
        tester = own_sandbox.start("assertions", tests.setup, tests.units)
        unit_deadline = min(deadline, time.monotonic() + grading.seconds)
        failed: Verdict | None = None
        verdicts, passed = 0, 0
        try:
            while verdicts < len(tests.units):
                message = tester.hear(deadline)
                if "ask" in message:
                    try:
                        response = solution.ask(message["ask"], unit_deadline)
                    except _Failed as failure:
                        failed = failure.verdict
                        # To a test that looks for names before it begins, a solution that does not load has none.
                        response = {"raised": ["NameError", f"the solution gave no result: {failed}"]}
                    tester.tell(response, deadline)
                elif "begin" in message:
                    unit_deadline = min(deadline, time.monotonic() + grading.seconds)
                    failed = solution.broken
                elif "broken" in message:
                    raise TestsError(f"the tests cannot be run: {message['broken']}")
                else:
                    verdicts += 1
                    verdict = failed or _verdict_from(message)
                    passed += verdict == "passed"
                    if passed == len(tests.units):
                        own_sandbox.end()
                        if problem := assertion_problem(tests, own_sandbox):
                            raise TestsError(problem)
                    yield verdict
        except (TimeoutError, EOFError, OutputError) as error:
            if isinstance(error, EOFError):
                own_sandbox.end(ended=True)
            for _ in range(len(tests.units) - verdicts):
                yield "timeout" if isinstance(error, TimeoutError) else "output"
        finally:
            tester.close()
            solution.close()
            sandbox.killed_from_outside |= own_sandbox.killed_from_outside


def assertion_problem(tests: CodeTests, sandbox: Sandbox) -> str | None:
    """Return why these tests pass any solution, or None; `sandbox` must be idle.

    Decoys replace the solution. Slow tests count as good. Raises SandboxError.
    """
    if not isinstance(tests, AssertTests) or (key := (tests.setup, *tests.units)) in _ASSERTING:
        return None
    decoys = sandbox.start("decoys", tests.setup, tests.units)
    try:
        if decoys.hear(time.monotonic() + _DECOY_SECONDS).get("can_fail") is False:
            return _NO_ASSERTIONS
    except (TimeoutError, EOFError, OutputError):
        return None
    finally:
        decoys.close()
        sandbox.end()
    if len(_ASSERTING) >= _MOST_REMEMBERED:
        _ASSERTING.clear()
    _ASSERTING.add(key)
    return None


def _verdict_from(message: dict[str, Any]) -> Verdict:
    if message["verdict"]:
        return "passed"
    kind = message["why"].partition(":")[0]
    return {"AssertionError": "wrong", "MemoryError": "memory"}.get(kind, "exception")  # type: ignore[return-value]


class _SolutionProcess:
    def __init__(self, source: str, sandbox: Sandbox) -> None:
        self._source = source
        self._sandbox = sandbox
        self._conversation: JsonChannel | None = None
        self.broken: Verdict | None = None  # why the solution cannot even be loaded

    def ask(self, request: dict[str, object], deadline: float) -> dict[str, Any]:
        if self.broken:
            raise _Failed(self.broken)
        if self._conversation is None:
            loaded = self._exchange(None, deadline)
            if "raised" in loaded:
                self.broken = _verdict_on(loaded, None, False, None)
                self.close()
                raise _Failed(self.broken)
        return self._exchange(request, deadline)

    def close(self, *, ended: bool = False) -> None:
        if self._conversation is not None:
            self._conversation.close()
            self._conversation = None
            self._sandbox.end(ended=ended)

    def _exchange(self, request: dict[str, object] | None, deadline: float) -> dict[str, Any]:
        try:
            if self._conversation is None:
                self._conversation = self._sandbox.start("solution", self._source)
            if request is not None:
                self._conversation.tell(request, deadline)
            return self._conversation.hear(deadline)
        except TimeoutError as error:
            self.close()
            raise _Failed("timeout") from error
        except (EOFError, OutputError) as error:
            self.close(ended=isinstance(error, EOFError))
            raise _Failed("exception" if isinstance(error, EOFError) else "output") from error


def _refuse(value: object) -> object:
    raise ValueError(f"{type(value).__name__} is no plain value")
