"""The code verifier: how solutions are found and run, and what counts as right."""

import json
import os
import signal
import threading
import time

import pytest
from code_answers import ADD, ADD_ASSERTS, ADD_CHECK, ADD_FORMS, ADD_LIVE, PLUS_ONE, fenced, outcomes, score
from faults_table import note_fault
from patience import eventually, growing

from r1_rewards import RewardInput, RewardSpecError, code, load
from r1_rewards.sandbox.code_grading import same_output, same_value
from r1_rewards.sandbox.execution import Sandbox
from r1_rewards.sandbox.jail import kernel, values
from r1_rewards.workers.descendants import children

pytestmark = pytest.mark.skipif(not kernel.SUPPORTED, reason="judged code is confined on Linux, x86_64 or aarch64")


def test_a_right_program_passes_and_a_wrong_one_does_not():
    assert score("print(int(input()) + 1)", PLUS_ONE).parts == {
        "overall": 1.0, "accuracy": 1.0, "passed": 1.0, "wrong": 0.0, "exception": 0.0, "timeout": 0.0, "memory": 0.0,
        "output": 0.0,
    }  # fmt: skip
    assert score("print(5)", PLUS_ONE).value == 0.0
    assert score("print(5)", PLUS_ONE, share=True).parts["overall"] == 0.5


@pytest.mark.parametrize("tests", ADD_FORMS)
def test_every_form_of_function_tests_tells_right_from_wrong(tests):
    assert score("def add(a, b):\n    return a + b", tests, share=True).value == 1.0
    assert score("def add(a, b):\n    return a", tests, share=True).value < 1.0
    missing = {"wrong": 1.0} if tests == ADD_CHECK else {"exception": 1.0}  # whose prompt defines it, without a body
    assert outcomes(score("def subtract(a, b):\n    return a - b", tests, share=True)) == missing
    assert outcomes(score("def add(a, b: return", tests, share=True)) == {"exception": 1.0}


@pytest.mark.parametrize("tests", [ADD, ADD_LIVE])
def test_a_method_of_a_solution_class_is_called_as_on_leetcode(tests):
    source = "class Solution:\n    def add(self, a: List[int], b) -> Optional[int]:\n        return a + b"
    assert score(source, tests).value == 1.0


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ("raise ValueError", "exception"),
        ("raise SystemExit(0)", "exception"),
        ("import os; os._exit(0)", "exception"),
        ("while True: pass", "timeout"),
        ("return bytearray(1 << 33)", "memory"),
        ("return 'x' * 20_000_000", "output"),
        ("return -1", "wrong"),
    ],
)
@pytest.mark.parametrize("tests", [ADD, ADD_ASSERTS])
def test_a_failing_call_costs_its_own_test_and_names_its_cause(tests, body, cause):
    source = f"def add(a, b):\n    if a == 1:\n        {body}\n    return a + b"

    def result(seconds):
        return outcomes(score(source, tests, share=True, timeout=seconds))

    wanted = {"passed": 0.5, cause: 0.5}
    assert growing(result, wanted.__eq__, (1.0, 10.0, 60.0) if cause == "timeout" else (120.0,)) == wanted


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("raise ValueError", "exception"),
        ("print(5); exit(1)", "exception"),
        ("print(5, flush=True); import os; os.abort()", "exception"),
        ("import time; time.sleep(9)", "timeout"),
        ("x = bytearray(1 << 33)", "memory"),
        ("while True: print('x' * 1000)", "output"),
        ("", "exception"),
    ],
)
def test_a_failing_program_names_its_cause(source, cause):
    timeout = 0.5 if cause == "timeout" else 120.0
    assert outcomes(score(source, PLUS_ONE, share=True, timeout=timeout)) == {cause: 1.0}


def test_tests_after_the_total_time_are_timeouts():
    tests = json.dumps({"inputs": ["", "", "", ""], "outputs": ["1", "1", "1", "1"]})
    result = score("import time; time.sleep(9)", tests, share=True, timeout=0.3, total_timeout=0.5)
    assert outcomes(result) == {"timeout": 1.0}


def test_running_stops_at_the_first_failure_unless_the_share_counts():
    tests = json.dumps({"inputs": ["1", "2", "3"], "outputs": ["1", "2", "x"]})
    assert outcomes(score("print(2)", tests)) == {"wrong": pytest.approx(1 / 3)}
    assert outcomes(score("print(2)", tests, share=True)) == {
        "wrong": pytest.approx(2 / 3),
        "passed": pytest.approx(1 / 3),
    }


def test_tests_use_objects_iterators_and_exceptions_of_the_solution():
    source = (
        "class Point:\n    def __init__(self, x): self.x = x\n    def moved(self, by): return Point(self.x + by)\n"
        "    def __len__(self): return 7\n"
        "def squares(n):\n    yield from (i * i for i in range(n))\n"
        "def fail(): raise KeyError('k')\n"
    )
    tests = (
        "assert Point(3).moved(1).x == 4\nassert len(Point(1)) == 7\nassert list(squares(3)) == [0, 1, 4]\n"
        "def test_raises():\n    try:\n        fail()\n    except KeyError:\n        return\n    assert False\n"
        "assert (1, {2: {3}}, b'x', 1j) == echo((1, {2: {3}}, b'x', 1j))\n"
    )
    assert score(source + "def echo(x): return x", tests).value == 1.0


@pytest.mark.parametrize(
    ("response", "source"),
    [
        ("```python\na\n```\ntext\n```py\nb\n```\n", "b\n"),
        ("```python\na\n```\nRun it:\n```bash\npython a.py\n```", "a\n"),
        ("```\na\n```", "a\n"),
        ("  ```Python\na\n  ```", "a\n"),
        ("```python\na", "a"),
        ("<think>\n```python\nx\n```\n</think>\n```python\na\n```", "a\n"),
        ("<think>\n```python\nx\n```\n</think>a = 1", "a = 1"),
        ("<think>hm</think>a = 1", "a = 1"),
        ("a = '```'", "a = '```'"),
        ("", ""),
    ],
)
def test_the_last_python_block_is_the_solution(response, source):
    assert code.solution(response) == source


def test_finding_the_solution_takes_linear_time():
    assert code.solution("`" * 1_000_000) == "`" * 1_000_000
    assert code.solution("```" + " " * 1_000_000 + "\n```" * 100_000) is not None


def test_text_that_is_no_program_earns_nothing():
    for response in ("", "I do not know.", "\ud800", "\x00", "```python\n```", "x = 1\n" * 100_000):
        assert code.score(response, PLUS_ONE).value == 0.0


@pytest.mark.parametrize(
    ("expected", "found", "tolerance", "same"),
    [
        ("1 2\n3", "1 2 3\n\n", None, True),
        ("1.0", "1.00", None, False),
        ("1.0", "1.00", 1e-9, True),
        ("0.1", "0.1001", 1e-3, True),
        ("1", "inf", 1e9, False),
        ("nan", "nan", None, True),
        ("1", "1 1", None, False),
        ("", " \n", None, True),
        ("9" * 1000, "9" * 999 + "8", 1e-3, False),
    ],
)
def test_outputs_are_compared_word_by_word(expected, found, tolerance, same):
    assert same_output(expected, found, tolerance) is same


@pytest.mark.parametrize(
    ("expected", "found", "tolerance", "same"),
    [
        ([1, 2], (1, 2), None, True),
        ({"1": [2]}, {"1": (2,)}, None, True),
        (0.3, 0.1 + 0.2, None, False),
        (0.3, 0.1 + 0.2, 1e-9, True),
        ([0.3], [0.1 + 0.2], 1e-9, True),
        ("1", 1, 1e-9, False),
        (None, None, None, True),
        ([1], 1, None, False),
        pytest.param(10**400, 1e300, 1e-9, False, id="huge"),
    ],
)
def test_values_are_compared_as_json(expected, found, tolerance, same):
    assert same_value(expected, found, tolerance) is same


def test_plain_values_survive_the_wire():
    value = [None, True, 2**70, -1, 1.5, float("inf"), 2j, "é\ud800", b"x", (1, [2]), {3}, {(4,): {5: "x"}}]
    assert values.decode(json.loads(json.dumps(values.encode(value, None))), None) == value


def test_the_verifier_scores_in_workers_and_says_what_protects_it(capfd):
    inputs = [RewardInput(fenced(f"print(int(input()) + {number})"), PLUS_ONE) for number in (1, 2, 1)]
    with load("code", {"share": True, "timeout": 120.0}, timeout=600.0, workers=2) as verifier:
        scores = verifier([*inputs, RewardInput("x", "no tests")])
    assert [score.value for score in scores] == [1.0, 0.0, 1.0, 0.0]
    assert scores[3].error.message.startswith("TestsError")
    assert "protected by: files, limits, network" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"), [({"level": "open_files"}, "takes no 'level'"), ({"shares": True}, "'shares'")]
)
def test_options_that_do_not_exist_are_refused_when_loading(options, message):
    with pytest.raises(RewardSpecError, match=message):
        load("code", options)


def test_a_solution_that_returns_a_set_where_json_expects_a_list_is_wrong_and_a_dict_of_numbers_is_right():
    calls = '{"inputs": [[4]], "outputs": [{"4": [1, 2]}], "fn_name": "f"}'
    assert score("def f(x): return {x: [1, 2]}", calls).value == 1.0
    assert score("def f(x): return {x: {1, 2}}", calls).value == 0.0


@pytest.mark.parametrize("name", ["select", "array", "copy", "queue", "token"])
def test_a_function_may_be_called_like_a_standard_module(name):
    tests = json.dumps([f"assert {name}(2) == 4", f"assert list(map({name}, [1, 2])) == [2, 4]"])
    assert score(f"def {name}(x): return 2 * x", tests).value == 1.0


def test_a_program_may_write_to_the_null_device():
    source = "import os\nwith open(os.devnull, 'w') as file: print('x', file=file)\nprint(int(input()) + 1)"
    assert score(source, PLUS_ONE).value == 1.0


SLOW_ADD = "import time\ndef add(a, b):\n    time.sleep(0.3)\n    return a + b\n"
SUPERVISOR, LAUNCHER, PROGRAM = 1, 2, 3  # by how many generations they are below the process that scores


def descendants(generation):
    found = [os.getpid()]
    for _ in range(generation):
        found = [child for pid in found for child in children(pid)]
    return set(found)


def kill_one(generation, delay, before, killed):
    """Kill the first new descendant of a generation, `delay` seconds after it is seen; tell which in `killed`."""
    assert eventually(lambda: descendants(generation) - before)
    time.sleep(delay)
    killed += sorted(descendants(generation) - before)[:1]
    os.kill(killed[0], signal.SIGKILL)


@pytest.mark.parametrize(
    ("tests", "generation", "delay"),
    [
        (PLUS_ONE, PROGRAM, 0.1), (PLUS_ONE, LAUNCHER, 0.0), (PLUS_ONE, SUPERVISOR, 0.0),
        (ADD, PROGRAM, 0.1), (ADD, SUPERVISOR, 0.1), (ADD_ASSERTS, PROGRAM, 0.1), (ADD_ASSERTS, LAUNCHER, 0.0),
    ],
)  # fmt: skip
def test_a_solution_that_is_killed_from_outside_is_judged_once_more(tests, generation, delay):
    source = "import time\ntime.sleep(0.3)\nprint(int(input()) + 1)" if tests == PLUS_ONE else SLOW_ADD
    killed = []
    killer = threading.Thread(target=kill_one, args=(generation, delay, descendants(generation), killed))
    killer.start()
    assert score(source, tests, share=True).value == 1.0
    killer.join()
    assert killed
    note_fault("SIGKILL of a generated program or of its sandbox", outcome="goes on")


def test_a_solution_that_is_killed_again_has_failed(monkeypatch):
    def notice(sandbox, report):
        tries.append(report)
        sandbox.killed_from_outside = True

    tries = []
    monkeypatch.setattr(Sandbox, "_notice_kill", notice)
    assert outcomes(score("import sys\nsys.exit(3)", PLUS_ONE)) == {"exception": 0.5}
    assert len(tries) == 2
