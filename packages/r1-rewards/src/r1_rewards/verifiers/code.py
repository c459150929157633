"""Score a program by running it against tests in a sandbox."""

import re
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import islice

from r1_rewards.sandbox.code_grading import Grading, count, grade
from r1_rewards.sandbox.code_tests import CodeTests, TestsError, read_tests
from r1_rewards.sandbox.execution import Sandbox, SandboxError, SandboxLimits
from r1_rewards.types import Score

TRUTH_IS_ANSWER = False  # but tests
MAX_CHARACTERS = 200_000  # of a solution

_FENCE = re.compile(r"^[ \t]{0,8}```[ \t]{0,8}([\w+#.-]{0,32})[^\n`]*$", re.MULTILINE)
_PYTHON = {"", "python", "python3", "py", "py3"}


def score(
    response: str,
    ground_truth: str,
    *,
    share: bool = False,
    tolerance: float | None = None,
    timeout: float = 6.0,
    total_timeout: float = 25.0,
    memory_mib: int = 1024,
    module_paths: Sequence[str] = (),
) -> Score:
    r"""Run the response's last Python block, or the whole response, against the tests in `ground_truth`.

    `code_tests` lists the forms of tests: stdin and stdout, calls, asserts. The value is 1 if all pass, else 0, and the
    first failure ends the run; with `share`, all are run and the value is the share that passes. Parts: `accuracy` (all
    passed), and the shares of tests that `passed`, or failed by `wrong`, `exception`, `timeout`, `memory` or `output`
    (too much of it).

    `timeout` is seconds for one test, `total_timeout` for all; keep it below the pool's deadline. If a process is
    killed from outside (SIGKILL, as for lack of memory, or SIGTERM), all tests are run once more. Outputs are compared
    word by word, values as Python compares them; with `tolerance`, floats may differ by it, absolutely or relatively.
    Programs may import from `module_paths`. Raises SandboxError if this system cannot confine the program (nothing is
    run), TestsError for invalid tests.

    Example: `score("```python\nprint(int(input()) + 1)\n```", '{"inputs": ["4"], "outputs": ["5"]}').value` is 1.0.
    """
    tests = read_tests(ground_truth)
    source = solution(response)
    total = count(tests)
    if not source.strip() or len(source) > MAX_CHARACTERS:
        return _score(Counter(exception=1 if not share else total), total, share)
    limits = SandboxLimits(memory_mib=memory_mib, cpu_seconds=total_timeout)
    run = partial(_run_tests, source, tests, limits, Grading(timeout, total_timeout, tolerance), module_paths, share)
    verdicts = run() or run(last=True)
    assert verdicts is not None
    return _score(verdicts, total, share)


def truth_problem(ground_truth: str) -> str | None:
    try:
        read_tests(ground_truth)
    except TestsError as error:
        return str(error)
    return None


def solution(response: str) -> str:
    """Return the last fenced block that is Python or has no language, or else the whole response.

    Text before the last `</think>` is ignored. An unclosed block ends with the response. Linear in the length.
    """
    response = response.rpartition("</think>")[2]
    blocks: list[str] = []
    opened: tuple[str, int] | None = None
    for fence in _FENCE.finditer(response):
        if opened is None:
            opened = (fence[1].lower(), fence.end() + 1)
        elif not fence[1]:
            if opened[0] in _PYTHON:
                blocks.append(response[opened[1] : fence.start()])
            opened = None
    if opened is not None and opened[0] in _PYTHON:
        blocks.append(response[opened[1] :])
    return blocks[-1] if blocks else response


def _run_tests(
    source: str,
    tests: CodeTests,
    limits: SandboxLimits,
    grading: Grading,
    module_paths: Sequence[str],
    share: bool,
    *,
    last: bool = False,
) -> Counter[str] | None:
    total = count(tests)
    verdicts: Counter[str] = Counter()
    try:
        with Sandbox(limits, module_paths) as sandbox:
            for verdict in islice(grade(source, tests, sandbox, grading), total):
                verdicts[verdict] += 1
                if verdict != "passed" and not share:
                    break
    except SandboxError as error:
        if last or not error.killed_from_outside:
            raise
        return None
    killed = sandbox.killed_from_outside and verdicts["passed"] < total
    return None if killed and not last else verdicts


def _score(verdicts: Counter[str], total: int, share: bool) -> Score:
    shares = {name: verdicts[name] / total for name in ("passed", "wrong", "exception", "timeout", "memory", "output")}
    accuracy = float(verdicts["passed"] == total)
    overall = shares["passed"] if share else accuracy
    return Score(overall, {"overall": overall, "accuracy": accuracy, **shares})
