"""The pool under stress: failure policies, streaming, memory, hanging samples, and where it is called from."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap

import pytest
from faults_table import note_fault
from module_reward import module_level_reward

from r1_rewards import RewardFailure, RewardInput, RewardSpecError, load
from r1_rewards.workers import batch, pool

SEQUENTIAL = "import os, time\nREWARD_TYPE = 'sequential'\ndef f(r):\n    text = r['response']\n"
MIXED = SEQUENTIAL + "    if text == 'bad':\n        raise ValueError('ugh')\n    return float(text)\n"


@pytest.fixture
def write(tmp_path):
    def write_file(source):
        path = tmp_path / "reward.py"
        path.write_text(source)
        return f"{path}:f"

    return write_file


def inputs(*responses):
    return [RewardInput(str(response), "5") for response in responses]


def causes(scores):
    return [score.error.cause if score.error else None for score in scores]


def test_the_policy_score_gives_failures_their_value(write):
    with load(write(MIXED), failure_score=-2.0) as verifier:
        scores = verifier(inputs(1, "bad", 2))
    assert [score.value for score in scores] == [1.0, -2.0, 2.0]
    assert [score.keep for score in scores] == [True, True, True]
    assert verifier.failures == {"exception": 1}


def test_the_policy_drop_marks_failures_and_keeps_them_out_of_the_parts(write):
    with load(write(MIXED), failure_policy="drop") as verifier:
        scores = verifier(inputs(1, "bad", "bad"))
    assert [score.keep for score in scores] == [True, False, False]
    assert scores[1].parts == {}
    assert causes(scores) == [None, "exception", "exception"]
    assert verifier.failures == {"exception": 2}


def test_the_policy_stop_raises_and_names_the_sample_and_the_cause(write):
    with load(write(MIXED), failure_policy="stop") as verifier:
        with pytest.raises(RewardFailure, match=r"response 1 \(exception\): ValueError: ugh"):
            verifier(inputs(1, "bad", 2))
        assert [score.value for score in verifier(inputs(1, 2))] == [1.0, 2.0]


def test_an_unknown_policy_and_a_wrong_limit_are_refused(write):
    with pytest.raises(ValueError, match="'score', 'drop' or 'stop', got 'skip'"):
        load("gsm8k", failure_policy="skip")
    with pytest.raises(ValueError, match="memory_mib"):
        load("gsm8k", memory_mib=0)


def test_progress_is_told_of_every_sample(write):
    told = []
    with load(write(MIXED), workers=2) as verifier:
        verifier(inputs(*range(20)), progress=lambda done, total: told.append((done, total)))
    assert told == [(done, 20) for done in range(1, 21)]


def test_scores_stream_as_they_come_and_a_stream_may_be_left(write):
    source = SEQUENTIAL + "    time.sleep(600 * (text == 'hang'))\n    return float(text)\n"
    with load(write(source), timeout=600) as verifier:
        stream = verifier.stream(inputs(1, "hang", 3))
        assert {index: score.value for index, score in (next(stream), next(stream))} == {0: 1.0, 2: 3.0}
        stream.close()
        assert [score.value for score in verifier(inputs(7))] == [7.0]


def test_a_sample_that_wants_too_much_memory_fails_alone(write):
    source = SEQUENTIAL + "    return len(bytearray((1 << 33) * (text == 'big'))) * 0.0\n"
    with load(write(source), memory_mib=256) as verifier:
        scores = verifier(inputs("a", "big", "b"))
    assert causes(scores) == [None, "out_of_memory", None]


def test_a_response_that_is_too_long_is_sent_to_nobody(monkeypatch):
    monkeypatch.setattr(pool, "MAX_CHARACTERS", 10)
    with load("gsm8k") as verifier:
        scores = verifier(inputs("#### 5", "#### 5" + " " * 10))
    assert causes(scores) == [None, "too_long"]
    assert "16 characters, more than 10" in scores[1].error.message


@pytest.mark.parametrize("kind", ["time.sleep(3600)", "while True: pass"])
def test_hanging_samples_do_not_hold_up_the_others(write, kind):
    from patience import growing  # a worker, which imports this file for the function below, does not find it

    source = SEQUENTIAL + f"    if text == 'hang':\n        {kind}\n    return float(text)\n"
    responses = ["hang" if number % 20 == 10 else number for number in range(80)]

    def come(seconds):
        with load(write(source), timeout=seconds) as verifier:
            return [score.error and score.error.cause for _, score in verifier.stream(inputs(*responses))]

    wanted = [None] * 76 + ["timeout"] * 4  # the four that hang end together, after all others
    assert growing(come, wanted.__eq__, (2.0, 20.0, 60.0)) == wanted


def test_a_slow_sample_is_set_aside_but_its_score_counts(write, tmp_path):
    others = tmp_path / "the others are there"
    wait = f"    while text == '7' and not os.path.exists({str(others)!r}):\n        time.sleep(0.02)\n"
    came = []
    with load(write(SEQUENTIAL + wait + "    return float(text)\n"), timeout=600.0) as verifier:
        for index, score in verifier.stream(inputs(*range(200))):
            came.append((index, score.value))
            if len(came) == 199:
                others.touch()
    assert sorted(came) == [(i, float(i)) for i in range(200)]
    assert came[-1][0] == 7


def test_workers_retire_after_many_samples(write, monkeypatch):
    monkeypatch.setattr(batch, "MAX_SAMPLES_PER_WORKER", 10)
    with load(write(SEQUENTIAL + "    return os.getpid()\n")) as verifier:
        used = {score.value for score in verifier(inputs(*range(60)))}
        assert len(used) > 1
        assert len(verifier.pids()) <= 2  # the one that forks, and one worker


def test_a_reward_that_changes_how_its_worker_speaks_is_refused_when_loading(write):
    with pytest.raises(RewardSpecError, match="garbled: does the reward's file change json or sys"):
        load(write("import json\njson.dumps = lambda *a, **k: '{}'\ndef f(r): return 1.0"))


def test_a_reward_that_starts_threads_when_imported_is_not_forked(write):
    source = (
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n" + SEQUENTIAL
        + "    if text == 'die': os._exit(3)\n    return threading.active_count()\n"
    )  # fmt: skip
    with load(write(source), workers=2) as verifier:
        scores = verifier(inputs("a", "die", "b", "c"))
    assert causes(scores) == [None, "crash", None, None]
    assert all(score.value >= 2 for score in scores if not score.error)


def test_the_pool_recovers_when_its_forking_process_is_killed(write):
    with load(write(MIXED)) as verifier:
        assert verifier(inputs(1))[0].value == 1.0
        for pid in verifier.pids():
            os.kill(pid, signal.SIGKILL)
        assert causes(verifier(inputs(1, 2, 3))) == [None] * 3


KILL_ONCE = "flag = __file__ + '.done'\nimport signal\ndef kill(pid):\n    if not os.path.exists(flag):\n"
KILL_ONCE += "        open(flag, 'w').close()\n        os.kill(pid, signal.SIGKILL)\n        time.sleep(60)\n"


@pytest.mark.parametrize("who", ["os.getpid()", "os.getppid()"], ids=["worker", "server"])
def test_no_sample_is_lost_to_one_kill_from_outside(write, who):
    source = (
        SEQUENTIAL + f"    if text == '20': kill({who})\n    time.sleep(0.002)\n    return float(text)\n" + KILL_ONCE
    )
    with load(write(source), workers=3) as verifier:
        scores = verifier(inputs(*range(60)))
    assert causes(scores) == [None] * 60
    assert [score.value for score in scores] == [float(number) for number in range(60)]
    server = "SIGKILL of the process that reward workers are forked from"
    note_fault(server if "ppid" in who else "SIGKILL of a reward worker", outcome="goes on")


def test_no_sample_is_lost_if_the_server_is_killed_again_while_it_loads_the_reward_again(write):
    source = SEQUENTIAL + "    if text == '5': kill(os.getppid())\n    return float(text)\n" + KILL_ONCE
    source += "if os.path.exists(flag) and not os.path.exists(flag + '2'):\n"
    source += "    open(flag + '2', 'w').close()\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    with load(write(source), workers=2) as verifier:
        assert causes(verifier(inputs(*range(12)))) == [None] * 12


def test_a_reward_is_loaded_again_if_its_process_is_killed_while_it_loads(write):
    with load(write(SEQUENTIAL + "    return float(text)\n" + KILL_ONCE + "kill(os.getpid())\n")) as verifier:
        assert [score.value for score in verifier(inputs(1, 2))] == [1.0, 2.0]
    note_fault("SIGKILL of a process that loads a reward or an environment", outcome="goes on")


def test_a_reward_that_kills_its_process_whenever_it_is_loaded_is_refused(write):
    with pytest.raises(RewardSpecError, match="killed by SIGKILL"):
        load(write(SEQUENTIAL + "    return float(text)\nos.kill(os.getpid(), 9)\n"))


def test_a_batch_call_is_made_again_as_a_whole_if_its_worker_is_killed_from_outside(write):
    source = "import os, time\ndef f(rs):\n    kill(os.getpid())\n    return [float(len(rs)) for r in rs]\n" + KILL_ONCE
    with load(write(source)) as verifier:
        assert [score.value for score in verifier(inputs(1, 2, 3))] == [3.0] * 3


def test_samples_that_kill_their_worker_again_fail_and_few_are_tried_twice(write, tmp_path):
    source = (
        SEQUENTIAL + "    open(os.path.dirname(__file__) + '/calls', 'a').write('x')\n    os.kill(os.getpid(), 9)\n"
    )
    with load(write(source), workers=2) as verifier:
        scores = verifier(inputs(*range(20)))
    assert causes(scores) == ["crash"] * 20
    assert len((tmp_path / "calls").read_text()) == 20 + batch.MAX_FAILED_RETRIES


def test_a_reward_that_ignores_the_end_of_children_loses_the_sample_that_crashes_only(write):
    source = "import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\n" + SEQUENTIAL
    with load(write(source + "    if text == '2': os._exit(3)\n    return 1.0\n"), workers=2) as verifier:
        scores = verifier(inputs(*range(6)))
    assert causes(scores) == [None, None, "crash", None, None, None]
    assert scores[2].error.message == "the worker ended, and its exit code is unknown"


def test_scoring_works_beside_a_running_event_loop(write):
    async def score_and_count(verifier):
        ticks = 0
        scoring = asyncio.create_task(asyncio.to_thread(verifier, inputs(*range(30))))
        while not scoring.done():
            ticks += 1
            await asyncio.sleep(0.001)
        return await scoring, ticks

    with load(write(MIXED)) as verifier:
        scores, ticks = asyncio.run(score_and_count(verifier))
    assert [score.value for score in scores] == [float(number) for number in range(30)]
    assert ticks > 0


IN_AN_ACTOR = """
import sys, ray
from r1_rewards import RewardInput, load

class Judge:
    def __init__(self, spec):
        self.verifier = load(spec, workers=2)

    def score(self, responses):
        return [score.value for score in self.verifier([RewardInput(text, "5") for text in responses])]

ray.init(address="local", num_cpus=1, include_dashboard=False, logging_level="error")
judge = ray.remote(Judge).remote(sys.argv[1])
print(ray.get(judge.score.remote(["1", "2", "3"])))
"""


@pytest.mark.slow
def test_a_ray_actor_can_hold_a_verifier(write, tmp_path):
    pytest.importorskip("ray", reason="ray is not installed")
    # In a process of its own, as a driver is: Ray remembers in its process what another test has told it.
    script = tmp_path / "driver.py"
    script.write_text(IN_AN_ACTOR)
    env = {**os.environ, "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}  # or each worker is started as `uv run pytest` was
    ran = subprocess.run([sys.executable, script, write(MIXED)], capture_output=True, text=True, env=env)
    assert ran.stdout.splitlines()[-1:] == ["[1.0, 2.0, 3.0]"], ran.stderr


SCRIPT = """
    import math as m
    from fractions import Fraction
    from r1_rewards import RewardInput, load

    SCALE = {"by": [2, 3]}
    REWARD_TYPE = "sequential"

    class Half:
        value = Fraction(1, 2)

    def helper(text):
        return m.sqrt(float(text)) * SCALE["by"][0]

    def reward(reward_input, plus):
        return helper(reward_input["response"]) + plus + float(Half.value)

    verifier = load(reward, {"plus": 1})  # without a guard: a second run of this script would load without end
    print([score.value for score in verifier([RewardInput("9", ""), RewardInput("x", "")])])
    verifier.close()
"""


def test_a_function_of_a_script_without_a_main_guard_is_scored(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env={**os.environ})
    assert ran.stdout == "[7.5, 0.0]\n", ran.stderr


def test_a_function_of_a_notebook_cell_is_scored():
    cell = (
        textwrap.dedent(SCRIPT)
        .replace("class Half:\n    value = Fraction(1, 2)", "HALF = 0.5")
        .replace("Half.value", "HALF")
    )  # Python before 3.13 finds no source of a class in a cell
    # As IPython does it: the source is known to linecache only, and an event loop is running.
    code = (
        "import asyncio, linecache\n"
        f"cell = {cell!r}\n"
        "linecache.cache['<cell 1>'] = (len(cell), None, cell.splitlines(True), '<cell 1>')\n"
        "async def run():\n    exec(compile(cell, '<cell 1>', 'exec'), globals())\n"
        "asyncio.run(run())\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.stdout == "[7.5, 0.0]\n", ran.stderr


OTHER_LINES = """
import inspect
from r1_rewards import load

def lines(value):
    return "def other():\\n    pass\\n"  # as Python finds for code that `exec` has run in a program of a package

def reward(response, ground_truth):
    return 1.0

inspect.getsource = lines
load(reward)
"""


def test_a_function_whose_source_python_does_not_know_is_refused(tmp_path):
    (tmp_path / "script.py").write_text(OTHER_LINES)
    ran = subprocess.run([sys.executable, str(tmp_path / "script.py")], capture_output=True, text=True)
    assert "reward 'reward': the source of 'reward' cannot be found; write it to a file" in ran.stderr


def test_completions_of_a_script_are_told_how_they_come(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from r1_rewards import RewardInput, load\nCOMPLETIONS = 'messages'\n"
        "def reward(completions):\n    return [float(isinstance(c, list)) for c in completions]\n"
        "with load(reward) as verifier:\n    print(verifier([RewardInput('9', '')])[0].value)\n"
    )
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env={**os.environ})
    assert ran.stdout == "1.0\n", ran.stderr


def test_a_function_of_a_module_is_loaded_from_its_file():
    with load(module_level_reward) as verifier:
        assert [score.value for score in verifier(inputs("a", "bcd"))] == [1.0, 3.0]


def test_what_has_no_source_is_refused_by_name():
    offset = 3
    for function in (lambda r: 1, lambda r: offset, len):
        with pytest.raises(RewardSpecError, match="written with `def`"):
            load(function)
