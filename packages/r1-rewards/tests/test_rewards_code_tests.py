"""The code verifier: the forms of tests, and tests that are refused."""

import json

import pytest
from code_answers import ADD_LIVE, PLUS_ONE, score

from r1_rewards import code
from r1_rewards.sandbox.code_grading import assertion_problem
from r1_rewards.sandbox.code_tests import AssertTests, CallTests, StdinTests, TestsError, read_tests
from r1_rewards.sandbox.execution import Sandbox
from r1_rewards.sandbox.jail import kernel

pytestmark = pytest.mark.skipif(not kernel.SUPPORTED, reason="judged code is confined on Linux, x86_64 or aarch64")


def test_the_forms_of_tests_are_told_apart():
    assert read_tests(PLUS_ONE) == StdinTests([("4\n", "5"), ("-1", "0\n")])
    assert read_tests(json.dumps({"inputs": [["1", "2"]], "outputs": ["3"]})) == StdinTests([("1\n2", "3")])
    assert read_tests(json.dumps([{"input": "1", "output": "2"}])) == StdinTests([("1", "2")])
    assert read_tests(ADD_LIVE) == CallTests("add", [([1, 2], 3)], wrapped=False)
    assert read_tests("x = 1\nassert f(x)") == AssertTests("x = 1", ["assert f(x)"])


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
