"""Answers with code, tests for them, and how they are scored, for the tests of the code verifier."""

import json

from r1_rewards import code

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
