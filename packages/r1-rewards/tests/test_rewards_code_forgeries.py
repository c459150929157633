"""The code verifier: no reward hacker gets a point."""

import json

import pytest
from code_answers import ADD, ADD_ASSERTS, ADD_CHECK, ADD_SOURCE, PLUS_ONE, score

from r1_rewards.sandbox.code_tests import TestsError
from r1_rewards.sandbox.jail import kernel, values

pytestmark = pytest.mark.skipif(not kernel.SUPPORTED, reason="judged code is confined on Linux, x86_64 or aarch64")


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


# All but calls are read as asserts, which run in the process of the answer.
@pytest.mark.parametrize(
    "tests",
    [
        pytest.param(ADD, id="calls"),
        pytest.param(ADD_ASSERTS, id="asserts", marks=pytest.mark.slow),
        pytest.param(ADD_CHECK, id="check"),
        pytest.param(ADD_SOURCE, id="source", marks=pytest.mark.slow),
    ],
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


def test_values_with_one_hash_are_never_hashed_by_the_caller():
    numbers = [{"int": hex(((1 << 61) - 1) * i)} for i in range(3)]
    with pytest.raises(ValueError, match="a set"):
        values.decode({"set": numbers}, dict, text_keys=True)
    found = values.decode({"dict": [[number, 1] for number in numbers]}, dict, text_keys=True)
    assert list(found) == [str(((1 << 61) - 1) * i) for i in range(3)]


def test_no_solution_has_a_say_in_whether_tests_assert_something():
    """Not by what it defines, answers, raises or says for names that the tests lack."""
    hostile = "def __getattr__(name): return 3\nclass add:\n    def __new__(cls, *a): raise NameError('asked')"
    tests = "def test_add():\n    try: add(1, 2)\n    except NameError: pass\nassert True"
    with pytest.raises(TestsError, match="assert nothing about what the solution returns"):
        score(hostile, tests)


def test_a_solution_cannot_pass_off_a_standard_module_of_its_own():
    own = "class math:\n    isclose = staticmethod(lambda a, b: True)\ndef f(x): return 0"
    assert score(own, json.dumps(["assert math.isclose(f(1), 1.5)"])).value == 0.0


def test_a_solution_that_raises_stop_iteration_passes_nothing():
    tests = json.dumps(["assert all(map(f, [1, 2, 3]))", "assert f(1)"])
    found = score("def f(x): raise StopIteration", tests, share=True)
    assert found.parts["exception"] == 1.0
