"""The code verifier: the forms of tests, what counts as right, and that no reward hacker gets a point."""

import json
import os
import signal
import threading
import time

import pytest
from patience import eventually, growing

from r1_rewards import RewardInput, RewardSpecError, code, load
from r1_rewards.sandbox.code_grading import assertion_problem, same_output, same_value
from r1_rewards.sandbox.code_tests import AssertTests, CallTests, StdinTests, TestsError, read_tests
from r1_rewards.sandbox.execution import Sandbox
from r1_rewards.sandbox.jail import kernel, values
from r1_rewards.workers.descendants import children

pytestmark = pytest.mark.skipif(not kernel.SUPPORTED, reason="judged code is confined on Linux, x86_64 or aarch64")

PLUS_ONE = json.dumps({"inputs": ["4\n", "-1"], "outputs": ["5", "0\n"]})
ADD = json.dumps({"fn_name": "add", "inputs": [[1, 2], [[1], [2]]], "outputs": [3, [1, 2]]})
ADD_ASSERTS = json.dumps({"test_list": ["assert add(1, 2) == 3", "assert add([1], [2]) == [1, 2]"]})
ADD_CHECK = json.dumps(
    {
        "prompt": "def twice(x):\n    return 2 * x\ndef add(a, b):\n    '''Add.'''\n",
        "entry_point": "add",
        "test": "def check(candidate):\n    for i in range(9):\n        assert candidate(i, i) == twice(i)\n",
    }
)
ADD_LIVE = json.dumps({"fn_name": "add", "tests": [{"input": "1\n2", "output": "3", "testtype": "functional"}]})
ADD_SOURCE = (
    "import math\nx = 1\nassert add(x, 2) == 3\ndef test_more():\n    assert math.isclose(add(0.1, 0.2), 0.3)\n"
)
ADD_FORMS = [ADD, ADD_ASSERTS, ADD_CHECK, ADD_LIVE, ADD_SOURCE]


def fenced(source):
    return f"Let me think.\n```python\n{source}\n```\nDone."


def score(source, tests, **settings):
    return code.score(fenced(source), tests, **{"timeout": 120.0, "total_timeout": 600.0, **settings})


def outcomes(score):
    return {name: value for name, value in score.parts.items() if value and name not in ("overall", "accuracy")}


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


# What a reward hacker puts where the solution belongs. None knows the answers; each tries to do without.
FORGERIES = {
    "an object that equals everything": "class E:\n    def __eq__(s, o): return True\n"
    "    def __ne__(s, o): return False\n"
    "    def __bool__(s): return True\n    def __float__(s): return 3.0\ndef add(a, b): return E()",
    "an integer that equals everything": "class E(int):\n    def __eq__(s, o): return True\n"
    "    __hash__ = int.__hash__\n"
    "def add(a, b): return E(0)",
    "a list that equals everything": "class E(list):\n    def __eq__(s, o): return True\ndef add(a, b): return E()",
    "an object that calls itself an array": "class E:\n    def tolist(s): return E2()\nclass E2:\n"
    "    def __eq__(s, o): return True\ndef add(a, b): return E()",
    "exit at import": "import sys\nprint('all tests passed')\nsys.exit(0)",
    "hard exit at import": "import os\nos._exit(0)",
    "exit in the call": "def add(a, b):\n    import sys\n    sys.exit(0)",
    "hard exit in the call": "def add(a, b):\n    import os\n    os._exit(0)",
    "a patched json": "import json, sys\njson.dumps = lambda *a, **k: '{\"value\": true}'\ndef add(a, b): return None",
    "a patched harness": "import sys\nv = sys.modules['jail.values']\nv.encode = lambda *a: 3\n"
    "sys.modules['jail.answer'].values.encode = lambda *a: True\ndef add(a, b): return None",
    "patched builtins": "import builtins\nbuiltins.AssertionError = KeyboardInterrupt\nbuiltins.all = lambda x: True\n"
    "builtins.isinstance = lambda a, b: True\ndef add(a, b): return None",
    "a forged line": 'import os\nos.write(4, b\'{"value": true}\\n{"verdict": true, "why": ""}\\n\')\n'
    'def add(a, b):\n    os.write(4, b\'{"verdict": true, "why": ""}\\n\')',
    "a flood of forged lines": "import os, threading\ndef flood():\n"
    "    while True: os.write(4, b'{\"verdict\": true}\\n')\n"
    "threading.Thread(target=flood, daemon=True).start()\ndef add(a, b): return None",
    "a forged answer that names a handle": 'import os\nos.write(4, b\'{"value": {"handle": {"name": 1}}}\\n\' * 9)\n'
    "def add(a, b): return None",
    "a raised number": "import os\nos.write(4, b'{\"raised\": 5}\\n' * 9)\ndef add(a, b): return None",
    "values that no encoder writes": "import json, os\nfor tag in ('int', 'float', 'complex', 'set', 'dict', 'x'):\n"
    "    for body in (5, None, [], [[]], [[1]], {}, 'x'):\n"
    "        os.write(4, json.dumps({'value': {tag: body}}).encode() + b'\\n')\ndef add(a, b): return None",
    "a key too long to print": "def add(a, b): return {10 ** 10000: 1}",
    "a swapped pipe": "import os\nr, w = os.pipe()\nos.dup2(w, 4)\nos.close(3)\ndef add(a, b): return 3",
    "its own checker": "def check(f): return True\ndef test_more(): return True\nclass math:\n"
    "    isclose = staticmethod(lambda *a, **k: True)\ndef twice(x): return None\ndef add(a, b): return None",
    "an exception that ends tests": "class Done(BaseException): pass\ndef add(a, b): raise Done('passed')",
    "an exception the harness knows": "def add(a, b):\n    raise ModuleNotFoundError('numpy')",
    "a trace function": "import sys\nsys.settrace(lambda *a: None)\nsys.excepthook = lambda *a: os._exit(0)\n"
    "def add(a, b): 1 / 0",
    "garbage instead of JSON": "import os\nos.write(4, b'[' * 100000 + b'\\n')\ndef add(a, b): return None",
    "a patched unittest": "import unittest\nunittest.TestCase.assertEqual = lambda *a, **k: None\n"
    "unittest.TestSuite.debug = lambda *a: None\ndef add(a, b): raise unittest.SkipTest('passed')",
    "patched frames": "import sys\ndef add(a, b):\n    f = sys._getframe()\n    while f:\n        print(f.f_locals)\n"
    "        f.f_locals.update(result=3, request=None)\n        f = f.f_back\n    return 0",
    "an alarm that exits": "import signal, sys\nsignal.signal(signal.SIGALRM, lambda *a: sys.exit(0))\n"
    "signal.setitimer(signal.ITIMER_REAL, 0.01)\ndef add(a, b):\n    while True: pass",
    "a deep list": "def add(a, b):\n    x = []\n    for _ in range(100_000): x = [x]\n    return x",
    "a cycle": "def add(a, b):\n    x = []\n    x.append(x)\n    return x",
    "not a number": "def add(a, b): return float('nan')",
    "a clean-up that answers": "import atexit, os\natexit.register(lambda: os.write(4, b'{\"value\": true}\\n'))\n"
    "def add(a, b): raise SystemExit",
}


@pytest.mark.parametrize(
    "tests", [ADD, ADD_ASSERTS, ADD_CHECK, ADD_SOURCE], ids=["calls", "asserts", "check", "source"]
)
@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forgery_earns_nothing(forgery, tests):
    result = score(FORGERIES[forgery], tests, share=True, timeout=0.7, total_timeout=2.0, tolerance=1e-6)
    assert result.parts["passed"] == 0.0, result.parts


@pytest.mark.parametrize(
    "source",
    [
        "print('PASSED')\nprint('1 passed')\nprint('{\"verdict\": true}')",
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "import os, sys\nsys.stdout = open(os.devnull, 'w')",
        "import os\nfor fd in range(3, 256):\n    try: os.write(fd, b'0\\n')\n    except OSError: pass",
        "import os, sys\nfor fd in range(256):\n    try: print(os.read(fd, 99))\n    except OSError: pass",
    ],
)
def test_a_program_that_does_not_compute_earns_nothing(source):
    assert score(source, PLUS_ONE, share=True, timeout=0.5).parts["passed"] == 0.0


SEARCH = """
import gc, os, sys
def search():
    found = []
    frame = sys._getframe()
    while frame:
        found += [frame.f_locals, frame.f_globals]
        frame = frame.f_back
    found += gc.get_objects()
    found += [dict(os.environ), sys.argv, sys.path, list(sys.modules)]
    for folder in ('/', '/proc/self', '/proc', '/work', '/tmp', '/dev/shm', '..', {folder!r}):
        try: found += [(name, open(os.path.join(folder, name), 'rb').read(100000)) for name in os.listdir(folder)]
        except OSError: pass
    for fd in range(3, 256):
        try:
            os.set_blocking(fd, False)
            found.append(os.read(fd, 100000))
        except OSError: pass
    text = ''
    for item in found:
        try: text += repr(item)
        except BaseException: pass
    start = text.find(chr(116) + 'reasure-')
    return text[start:start + 13] if start >= 0 else None
def seek(x): return search()
if __name__ == '__main__': print(search())
"""


@pytest.mark.parametrize(
    "tests",
    [
        json.dumps({"inputs": ["1", "2"], "outputs": ["treasure-7261", "treasure-7261"]}),
        json.dumps({"fn_name": "seek", "inputs": [[1], [2]], "outputs": ["treasure-7261"] * 2}),
        json.dumps(["assert seek(1) == 'treasure-7261'", "assert seek(2) == 'treasure-7261'"]),
        "def test_a():\n    assert seek(1) == 'treasure-7261'\ndef test_b():\n    assert seek(2) == 'treasure-7261'\n",
    ],
    ids=["stdin", "calls", "asserts", "source"],
)
def test_the_expected_values_are_nowhere_to_be_found(tests, tmp_path):
    (tmp_path / "tests.json").write_text(tests)
    result = score(SEARCH.format(folder=str(tmp_path)), tests, share=True)
    assert result.parts["passed"] == 0.0
    assert result.parts["wrong"] > 0.0  # it searched, and returned


def test_the_search_for_expected_values_finds_what_it_is_given():
    tests = json.dumps({"inputs": ["treasure-7261"], "outputs": ["treasure-7261"]})
    source = "kept = input()\n" + SEARCH.format(folder="/nowhere")
    assert score(source, tests).value == 1.0


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


def test_the_forms_of_tests_are_told_apart():
    assert read_tests(PLUS_ONE) == StdinTests([("4\n", "5"), ("-1", "0\n")])
    assert read_tests(json.dumps({"inputs": [["1", "2"]], "outputs": ["3"]})) == StdinTests([("1\n2", "3")])
    assert read_tests(json.dumps([{"input": "1", "output": "2"}])) == StdinTests([("1", "2")])
    assert read_tests(ADD_LIVE) == CallTests("add", [([1, 2], 3)], wrapped=False)
    assert read_tests("x = 1\nassert f(x)") == AssertTests("x = 1", ["assert f(x)"])


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


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ("not python at all (", "neither JSON nor Python"),
        ("x = 1", "neither an assert"),
        ("{}", "no known form"),
        ("[]", "no known form"),
        ('{"inputs": [1], "outputs": []}', "1 inputs and 0 outputs"),
        ('{"inputs": [1], "outputs": [1], "fn_name": "f"}', "not a list of arguments for f"),
        ('{"tests": [{"input": "1"}]}', "needs 'input' and 'output'"),
        ('{"tests": [{"input": "1", "output": "1", "testtype": "functional"}]}', "need the function"),
        ('{"fn_name": "f", "tests": [{"input": "x", "output": "1", "testtype": "functional"}]}', "is not JSON"),
        ('["assert ("]', "is not Python"),
        ('["import no_such_module\\nassert f(1)"]', "No module named 'no_such_module'"),
        ('["assert f(lambda: 1)"]', "a test passes a function"),
    ],
)
def test_tests_that_cannot_be_run_are_refused_by_name(tests, message):
    with pytest.raises(TestsError, match=message):
        code.score("```python\ndef f(x): return 1\n```", tests)


def test_values_with_one_hash_are_never_hashed_by_the_caller():
    numbers = [{"int": hex(((1 << 61) - 1) * i)} for i in range(3)]
    with pytest.raises(ValueError, match="a set"):
        values.decode({"set": numbers}, dict, text_keys=True)
    found = values.decode({"dict": [[number, 1] for number in numbers]}, dict, text_keys=True)
    assert list(found) == [str(((1 << 61) - 1) * i) for i in range(3)]


def test_a_solution_that_returns_a_set_where_json_expects_a_list_is_wrong_and_a_dict_of_numbers_is_right():
    calls = '{"inputs": [[4]], "outputs": [{"4": [1, 2]}], "fn_name": "f"}'
    assert score("def f(x): return {x: [1, 2]}", calls).value == 1.0
    assert score("def f(x): return {x: {1, 2}}", calls).value == 0.0


UNITTEST = """
import unittest
assert True
class TestAdd(unittest.TestCase):
    def setUp(self):
        self.three = 3
    def test_add(self):
        self.assertEqual(add(1, 2), self.three)
"""
ASYNC = "async def test_add():\n    assert add(1, 2) == 3\n"
PYTEST = "class TestAdd:\n    def test_add(self):\n        assert add(1, 2) == 3\n"
LOOP = "for n in range(3):\n    assert add(n, 2) == n + 2\n"
LISTED = json.dumps(["def test_add():\n    assert add(1, 2) == 3"])


@pytest.mark.parametrize(
    "tests", [UNITTEST, ASYNC, PYTEST, LOOP, LISTED], ids=["unit", "async", "pytest", "for", "list"]
)
def test_every_way_to_write_a_test_is_run(tests):
    assert score("def add(a, b): return a + b", tests).value == 1.0
    assert score("def add(a, b): return a - b", tests).value == 0.0


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ("assert True", "assert nothing about what the solution returns"),
        ("def check(f):\n    assert f(1) == 2\nassert add(1, 2) == 3", "'check' has asserts, and nothing calls it"),
        ("if __name__ == '__main__':\n    assert add(1, 2) == 3", "neither an assert at top level"),
        ("def test_add(fixture):\n    assert add(1, 2) == 3", "'test_add' takes arguments"),
        (json.dumps({"test": "x = 1", "entry_point": "add"}), "no function 'check'"),
        (
            json.dumps({"test": "def check(candidate): pass", "entry_point": "add"}),
            "assert nothing about what the solution returns",
        ),
        (
            "class Checker:\n    def check(self): assert add(1, 2) == 3\nassert callable(add)",
            "the class 'Checker' has asserts",
        ),
        (json.dumps(["add"]), "assert nothing about what the solution returns"),
    ],
)
def test_tests_that_run_nothing_are_an_error_of_the_data(tests, message):
    with pytest.raises(TestsError, match=message):
        score("def add(a, b): return a + b\ndef check(f): pass", tests)


@pytest.mark.parametrize(
    "tests",
    [
        {"inputs": ["1", "2"], "outputs": ["", " \n"]},
        [{"input": "1", "output": "", "testtype": "stdin"}],
        {"inputs": [[1], [2]], "outputs": [None, [None]], "fn_name": "f"},
        {"tests": [{"input": "1", "output": "null", "testtype": "functional"}], "fn_name": "f"},
    ],
)
def test_expected_outputs_that_are_all_empty_or_null_are_an_error_of_the_data(tests):
    with pytest.raises(TestsError, match=r"every expected (output is empty|value is null)"):
        score("def f(x): pass", json.dumps(tests))
    assert code.truth_problem(json.dumps(tests))


def test_one_of_several_expected_outputs_may_be_empty_or_null():
    assert score("if n := input(): print(n)", json.dumps({"inputs": ["\n", "2"], "outputs": ["", "2"]})).value == 1.0
    pairs = {"inputs": [[0], [2]], "outputs": [None, 2], "fn_name": "f"}
    assert score("def f(x): return x or None", json.dumps(pairs)).value == 1.0


NO_ASSERTIONS = [
    "def test_add(): pass",
    "def test_add(): add(1, 2)",
    "def test_add():\n    x = add(1, 2) == 3",
    "def helper(): return 1\ndef test_add():\n    assert helper() == 1",
    "class Case: pass\ndef test_add():\n    Case().x = add(1, 2)",
    "def test_add():\n    undefined = 1\n    try: assert add(1, missing) == 3\n    except Exception: pass",
    "def check():\n    assert add(1, 2) == 3\nif __name__ == '__main__':\n    check()\nassert True",
    "try:\n    assert add(1, 2) == 3\nexcept AssertionError:\n    pass",
    "for n in []:\n    assert add(n, 2) == n + 2",
    "def test_add():\n    for part in add(1, 2): print(part)",
    "def test_add():\n    assert add(1, 2) == 3 or True",
    "def test_add():\n    stack = Stack()\n    stack.push(1)",
]


@pytest.mark.parametrize("tests", NO_ASSERTIONS)
def test_tests_that_pass_whatever_the_solution_answers_are_refused_by_name(tests):
    lenient = "class Stack:\n    def push(self, x): pass\ndef add(a, b): return []"
    with pytest.raises(TestsError, match="assert nothing about what the solution returns"):
        score(lenient, tests)


ASSERTIONS = [
    "assert not f(1)", "assert f(1) is None", "assert f(1) is not None", "assert not isinstance(f(1), str)",
    "import math\nassert math.isnan(f(1))", "assert sorted(f(1)) == [1]", "assert len(f(1)) == 3", "assert f(1) in {1}",
    "assert ''.join(f(1)) == 'a'", "a, b, c = f(1)\nassert a", "assert f(1)[0]['x'].y == 3", "assert f(f(3)) == 3",
    "import json\nassert json.loads(f(1)) == {}", "try:\n    f(-1)\n    assert False\nexcept ValueError:\n    pass",
    "xs = [2, 1]\nf(xs)\nassert xs == [1, 2]", "s = Stack()\ns.push(1)\nassert s.pop() is not None",
    "import sys\nif f(1) != 2: sys.exit(1)", "r = f(1)\nif isinstance(r, list): assert r == [1]",
    "x = 0\nwhile f(x): x += 1\nassert x == 3", "from solution import f\nassert f(2) == 4",
    "assert abs(f(1) - 2) < 1e-6",
    "assert f'{f(1):.2f}' == '1.00'", "import copy\nassert copy.deepcopy(f([1])) == [1]",
]  # fmt: skip


def test_tests_that_some_answer_fails_are_taken_for_tests():
    with Sandbox() as sandbox:
        refused = [tests for tests in ASSERTIONS if assertion_problem(AssertTests("", [tests]), sandbox)]
    assert refused == []


def test_no_solution_has_a_say_in_whether_tests_assert_something():
    """Not by what it defines, answers, raises or says for names that the tests lack."""
    hostile = "def __getattr__(name): return 3\nclass add:\n    def __new__(cls, *a): raise NameError('asked')"
    tests = "def test_add():\n    try: add(1, 2)\n    except NameError: pass\nassert True"
    with pytest.raises(TestsError, match="assert nothing about what the solution returns"):
        score(hostile, tests)


INDIRECT = "import unittest\nclass Base(unittest.TestCase): pass\n"
METHOD = "    def test_add(self): self.assertEqual(add(1, 2), 3)\n"
INHERITED = [
    INDIRECT + "class Check(Base):\n" + METHOD + "assert True",
    "import unittest\nclass Mixin:\n" + METHOD + "class Check(Mixin, unittest.TestCase): pass\nassert True",
    INDIRECT.replace("pass", "\n" + METHOD) + "class Check(Base):\n    def test_more(self): self.assertTrue(True)\n",
    "class Shared:\n    def test_add(self): assert add(1, 2) == 3\nclass TestAdd(Shared): pass\nassert True",
    json.dumps({"test_setup_code": INDIRECT, "test_list": ["class Check(Base):\n" + METHOD]}),
]


@pytest.mark.parametrize("tests", INHERITED)
def test_inherited_tests_and_classes_that_derive_from_a_test_case_indirectly_are_run(tests):
    assert score("def add(a, b): return a + b", tests).value == 1.0
    assert score("def add(a, b): return a - b", tests).value == 0.0


@pytest.mark.parametrize("name", ["select", "array", "copy", "queue", "token"])
def test_a_function_may_be_called_like_a_standard_module(name):
    tests = json.dumps([f"assert {name}(2) == 4", f"assert list(map({name}, [1, 2])) == [2, 4]"])
    assert score(f"def {name}(x): return 2 * x", tests).value == 1.0


def test_a_solution_cannot_pass_off_a_standard_module_of_its_own():
    own = "class math:\n    isclose = staticmethod(lambda a, b: True)\ndef f(x): return 0"
    assert score(own, json.dumps(["assert math.isclose(f(1), 1.5)"])).value == 0.0


def test_a_solution_that_raises_stop_iteration_passes_nothing():
    tests = json.dumps(["assert all(map(f, [1, 2, 3]))", "assert f(1)"])
    found = score("def f(x): raise StopIteration", tests, share=True)
    assert found.parts["exception"] == 1.0


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


def test_a_solution_that_is_killed_again_has_failed(monkeypatch):
    def notice(sandbox, report):
        tries.append(report)
        sandbox.killed_from_outside = True

    tries = []
    monkeypatch.setattr(Sandbox, "_notice_kill", notice)
    assert outcomes(score("import sys\nsys.exit(3)", PLUS_ONE)) == {"exception": 0.5}
    assert len(tries) == 2
