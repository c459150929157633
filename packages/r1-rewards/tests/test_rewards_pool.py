"""The pool: shapes of user functions, failures as data, deadlines, order, threads."""

import json
import math
import os
import random
import subprocess
import sys
import threading
from functools import partial

import pytest
from faults_table import note_fault
from loopback import answering
from patience import ended, eventually, growing

import r1_rewards
from r1_rewards import RewardInput, RewardSpecError
from r1_rewards.workers import batch
from r1_rewards.workers.process import RUN_SECRETS

load = partial(r1_rewards.load, timeout=120.0)  # where a test means no other
BATCH = "def f(reward_inputs):\n    return [one(r['response']) for r in reward_inputs]\n"


@pytest.fixture
def write(tmp_path):
    def write_file(source, name="reward.py"):
        path = tmp_path / name
        path.write_text(source)
        return f"{path}:f"

    return write_file


def inputs(*responses, truth="5"):
    return [RewardInput(response, truth, response_length=len(response)) for response in responses]


def causes(scores):
    return [score.error.cause if score.error else None for score in scores]


def test_a_batch_function_gets_the_whole_batch_once(write):
    spec = write("def f(rs):\n    return [{'overall': len(rs), 'ok': r['ground_truth'] == '5'} for r in rs]\n")
    with load(spec, workers=2) as verifier:
        scores = verifier(inputs("a", "b", "c"))
    assert [score.value for score in scores] == [3.0] * 3
    assert scores[0].parts == {"overall": 3.0, "ok": 1.0}
    assert causes(scores) == [None] * 3


def test_a_sequential_function_keeps_order_over_workers(write):
    spec = write(
        "REWARD_TYPE = 'sequential'\nREWARD_NAME = 'number'\ndef f(r, plus):\n    return float(r['response']) + plus\n"
    )
    with load(spec, {"plus": 1}, workers=3) as verifier:
        assert verifier.reward.name == "number"
        assert [s.value for s in verifier(inputs(*map(str, range(50))))] == [i + 1.0 for i in range(50)]


def test_a_function_of_columns_is_known_by_its_signature(write):
    spec = write(
        "def f(prompts, responses, answers):\n"
        "    return [float(p + r == a) for p, r, a in zip(prompts, responses, answers)]\n"
    )
    with load(spec) as verifier:
        scores = verifier([RewardInput("b", "ab", prompt="a"), RewardInput("c", "ab", prompt="a")])
    assert [score.value for score in scores] == [1.0, 0.0]


def test_metadata_columns_are_keys_that_never_hide_the_response(write):
    spec = write("def f(rs):\n    return [float(r['level'] == 2 and r['response'] == 'a') for r in rs]\n")
    with load(spec) as verifier:
        assert verifier([RewardInput("a", "", metadata={"level": 2, "response": "x"})])[0].value == 1.0
        with pytest.raises(TypeError, match="metadata of response 0: 'image' is bytes"):
            verifier([RewardInput("a", "", metadata={"image": b"x"})])


@pytest.mark.parametrize(
    ("bad", "cause"),
    [
        ("raise ValueError('ugh')", "exception"),
        ("__import__('sys').exit(0)", "exception"),
        ("__import__('os')._exit(3)", "crash"),
        ("__import__('os').kill(__import__('os').getpid(), 11)", "crash"),
        ("return float('nan')", "non_finite"),
        ("return {'overall': 1, 'extra': float('inf')}", "non_finite"),
        ("return 10**400", "non_finite"),
        ("return {'accuracy': 1}", "wrong_shape"),
        ("return 'right'", "wrong_shape"),
        ("return None", "wrong_shape"),
    ],
)
def test_one_bad_answer_fails_alone_under_the_stated_policy(write, bad, cause):
    spec = write(f"def one(text):\n    if text == 'bad':\n        {bad}\n    return 1.0\n" + BATCH)
    with load(spec, failure_score=-0.5) as verifier:
        scores = verifier(inputs("a", "bad", "b"))
        assert causes(scores) == [None, cause, None]
        assert [score.value for score in scores] == [1.0, -0.5, 1.0]
        assert scores[1].parts == {"overall": -0.5}
        assert causes(verifier(inputs("a"))) == [None]
    if cause in ("crash", "exception"):
        fault = {"crash": "a reward that ends its process", "exception": "a reward that raises"}[cause]
        note_fault(fault, outcome="goes on")


def test_an_exception_names_type_text_and_line(write):
    with load(write("def f(rs):\n    x = 1\n    raise ValueError('ugh')\n")) as verifier:
        message = verifier(inputs("a"))[0].error.message
    assert message == "ValueError: ugh (line 3 of reward.py)"


def test_a_crash_says_how_the_worker_ended(write):
    with load(write("import os\ndef f(rs):\n    os._exit(3)\n")) as verifier:
        assert "exited with code 3" in verifier(inputs("a"))[0].error.message


def test_a_hang_costs_its_own_sample_only(write):
    spec = write(
        "import time\nREWARD_TYPE = 'sequential'\n"
        "def f(r):\n    time.sleep(60 * (r['response'] == 'hang'))\n    return 1\n"
    )

    def score(seconds):
        with load(spec, timeout=seconds, workers=2) as verifier:
            return causes(verifier(inputs("a", "hang", "b", "c")))

    wanted = [None, "timeout", None, None]
    assert growing(score, wanted.__eq__, (1.0, 10.0, 60.0)) == wanted


def test_a_hang_that_holds_the_interpreter_lock_is_killed(write):
    with load(
        write("REWARD_TYPE = 'sequential'\ndef f(r):\n    return 7 ** 999_999_999 > 1\n"), timeout=0.5
    ) as verifier:
        assert causes(verifier(inputs("a"))) == ["timeout"]
    note_fault("a reward that hangs", outcome="goes on")


def test_a_batch_call_that_hangs_is_scored_again_alone(write):
    spec = write("import time\ndef f(rs):\n    time.sleep(60 * (len(rs) > 1))\n    return [1.0 for r in rs]\n")

    def score(seconds):
        with load(spec, timeout=seconds) as verifier:
            return causes(verifier(inputs("a", "b")))

    assert growing(score, [None, None].__eq__, (0.5, 5.0, 60.0)) == [None, None]


def test_a_function_that_never_returns_does_not_cost_a_timeout_per_sample(write, monkeypatch):
    monkeypatch.setattr(batch, "MAX_SLOW_AFTER_TIMEOUTS", 4)
    spec = write("import time\nREWARD_TYPE = 'sequential'\ndef f(r):\n    time.sleep(600)\n")
    with load(spec, timeout=0.2) as verifier:
        scores = verifier(inputs(*"abcdefghijklmnopqrst"))
    assert causes(scores) == ["timeout"] * 20
    assert sum("not tried" in score.error.message for score in scores) >= 8


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_no_sample_fails_untried_while_half_of_the_batch_hangs(write, workers):
    spec = write(
        "import time\nREWARD_TYPE = 'sequential'\n"
        "def f(r):\n    time.sleep(600 * (r['response'] == 'hang'))\n    return 1\n"
    )
    shuffled = list(range(24))
    random.Random(0).shuffle(shuffled)  # as a batch is: the first ten that are tried hang
    responses = ["hang" if shuffled.index(index) < 10 or index % 4 == 0 else "good" for index in range(24)]

    def score(seconds):
        with load(spec, timeout=seconds, workers=workers) as verifier:
            return causes(verifier(inputs(*responses)))

    wanted = ["timeout" if response == "hang" else None for response in responses]
    assert growing(score, wanted.__eq__, (1.0, 10.0, 60.0)) == wanted


def test_a_process_of_another_session_dies_with_the_sample_that_started_it(write, tmp_path):
    spec = write(
        "import pathlib, subprocess, time\nREWARD_TYPE = 'sequential'\n"
        "def f(r):\n    shell = 'sleep 600 & echo $! > ' + r['response'] + '; sleep 600'\n"
        "    subprocess.Popen(['sh', '-c', shell], start_new_session=True)\n    time.sleep(600)\n"
    )
    hang_in(spec, tmp_path / "pid")
    assert eventually(lambda: ended((tmp_path / "pid").read_text().strip()))


@pytest.mark.parametrize("end", ["os._exit(3)", "return 1.0"])
def test_what_a_worker_leaves_behind_dies_with_it_at_the_latest(write, tmp_path, end):
    spec = write(
        "import os, pathlib, subprocess, time\nREWARD_TYPE = 'sequential'\n"
        "def f(r):\n    shell = 'sleep 600 & echo $! > ' + r['response']\n"
        f"    subprocess.run(['setsid', 'sh', '-c', shell])\n    {end}\n"
    )
    with load(spec) as verifier:
        verifier(inputs(str(tmp_path / "pid")))
    assert eventually(lambda: ended((tmp_path / "pid").read_text().strip()))


def test_a_reward_that_forks_and_comes_back_twice_shifts_no_score(write):
    spec = write("import os\nREWARD_TYPE = 'sequential'\ndef f(r):\n    os.fork()\n    return float(r['response'])\n")
    with load(spec) as verifier:
        assert [score.value for score in verifier(inputs(*map(str, range(20))))] == [float(i) for i in range(20)]


@pytest.mark.parametrize("returned", ["[1.0]", "[1.0] * 9", "1.0", "{'overall': 1.0}", "None"])
def test_a_wrong_number_of_scores_falls_back_to_one_by_one(write, returned, caplog):
    spec = write(f"def f(rs):\n    return [float(rs[0]['response'])] if len(rs) == 1 else {returned}\n")
    with load(spec) as verifier:
        scores = verifier(inputs("1", "2", "3"))
    assert [score.value for score in scores] == [1.0, 2.0, 3.0]
    assert "wrong_shape" in caplog.text


def test_a_function_that_always_returns_too_few_scores_fails_every_sample(write):
    with load(write("def f(rs):\n    return []\n")) as verifier:
        assert causes(verifier(inputs("a", "b"))) == ["wrong_shape"] * 2


def test_printing_and_closing_stdout_do_not_disturb_the_scores(write):
    spec = write("import os\ndef f(rs):\n    print('{}' * 100_000)\n    os.close(1)\n    return [1.0 for r in rs]\n")
    with load(spec) as verifier:
        assert [score.value for score in verifier(inputs("a", "b"))] == [1.0, 1.0]


def test_any_text_reaches_the_function_unchanged(write):
    texts = ["", "é😀\u202e\x00", "\ud800 lone", "x" * 1_000_000, '"}\n{']
    spec = write(
        "REWARD_TYPE = 'sequential'\ndef f(r):\n    text = r['response']\n"
        "    return {'overall': len(text), 'sum': sum(map(ord, text[:9]))}\n"
    )
    with load(spec) as verifier:
        scores = verifier(inputs(*texts))
    assert [score.value for score in scores] == [len(text) for text in texts]
    assert [score.parts["sum"] for score in scores] == [sum(map(ord, text[:9])) for text in texts]


def test_threads_share_a_verifier(write):
    results = {}
    with load("gsm8k", workers=2) as verifier:

        def score(number):
            results[number] = [s.value for s in verifier(inputs(*["#### 5", "#### 6"] * 10))]

        threads = [threading.Thread(target=score, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == dict.fromkeys(range(4), [1.0, 0.0] * 10)


def test_builtin_math_scores_in_workers():
    with load("math") as verifier:
        scores = verifier(inputs(r"\boxed{2^{1}+3}", r"\boxed{9**9**9}", ""))
    assert [score.value for score in scores] == [1.0, 0.0, 0.0]
    assert causes(scores) == [None] * 3


def test_user_code_runs_in_another_process_without_a_gpu(write):
    spec = write(
        "import os\nREWARD_TYPE = 'sequential'\n"
        "def f(r):\n    return {'overall': os.getpid(), 'gpu': len(os.environ['CUDA_VISIBLE_DEVICES'])}\n"
    )
    with load(spec) as verifier:
        score = verifier(inputs("a"))[0]
    assert score.value != os.getpid()
    assert score.parts["gpu"] == 0


def test_user_code_sees_its_own_keys_and_none_of_the_runs_secrets(write, monkeypatch):
    for name in RUN_SECRETS:
        monkeypatch.setenv(name, "planted")
    monkeypatch.setenv("SEARCH_API_KEY", "mine")
    monkeypatch.setenv("R1_WORKER_SECRETS", "HF_TOKEN,WANDB_API_KEY")
    spec = write(
        "import os, subprocess\nREWARD_TYPE = 'sequential'\n"
        "def f(r):\n    shown = subprocess.run(['env'], capture_output=True, text=True).stdout\n"
        "    return {'overall': shown.count('planted'), 'own': 'SEARCH_API_KEY=mine' in shown}\n"
    )
    with load(spec) as verifier:
        assert verifier(inputs("a"))[0].parts == {"overall": 2.0, "own": 1.0}
    monkeypatch.delenv("R1_WORKER_SECRETS")
    with load(spec) as verifier:
        assert verifier(inputs("a"))[0].parts == {"overall": 0.0, "own": 1.0}


def test_children_of_a_killed_function_die_with_it(write, tmp_path):
    spec = write(
        "import subprocess, pathlib, time\nREWARD_TYPE = 'sequential'\n"
        "def f(r):\n    child = subprocess.Popen(['sleep', '600'])\n"
        "    pathlib.Path(r['response']).write_text(str(child.pid))\n    time.sleep(600)\n"
    )
    hang_in(spec, tmp_path / "pid")
    assert eventually(lambda: ended((tmp_path / "pid").read_text()))


def test_close_stops_scoring_and_is_final(write, tmp_path):
    spec = write(
        "import pathlib, time\nREWARD_TYPE = 'sequential'\n"
        "def f(r):\n    pathlib.Path(r['response']).touch()\n    time.sleep(600)\n"
    )
    verifier, begun = load(spec, timeout=600), tmp_path / "begun"
    closer = threading.Thread(target=lambda: (eventually(begun.exists), verifier.close()))
    closer.start()
    with pytest.raises(RuntimeError, match="closed while scoring"):
        verifier(inputs(str(begun), str(begun)))
    closer.join()
    with pytest.raises(RuntimeError, match="is closed"):
        verifier(inputs("a"))
    verifier.close()


def test_an_empty_batch_is_an_empty_list():
    with load("gsm8k") as verifier:
        assert verifier([]) == []


def test_a_worker_dies_with_its_parent(write, tmp_path):
    spec = write(
        "import os, pathlib, time\nREWARD_TYPE = 'sequential'\n"
        "def f(r):\n    pathlib.Path(r['response']).write_text(str(os.getpid()))\n    time.sleep(600)\n"
    )
    code = (
        "import sys; from r1_rewards import load, RewardInput; "
        "load(sys.argv[1], timeout=600)([RewardInput(sys.argv[2], '')])"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, spec, str(tmp_path / "pid")])
    assert eventually(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    parent.kill()
    parent.wait()
    assert eventually(lambda: ended((tmp_path / "pid").read_text()))


def hang_in(spec, pid):
    """Let a reward hang until it is cut off, and long enough for it to have written the number of what it started."""

    def score(seconds):
        pid.unlink(missing_ok=True)
        with load(spec, timeout=seconds) as verifier:
            assert causes(verifier(inputs(str(pid)))) == ["timeout"]

    growing(score, lambda _: pid.exists() and pid.read_text().strip(), (1.0, 10.0, 60.0))


@pytest.mark.parametrize(
    ("source", "kwargs", "message"),
    [
        ("import no_such_module\ndef f(rs): ...\n", {}, r"cannot be imported: ModuleNotFoundError: .* \(line 1 of"),
        ("import sys\nsys.exit(1)\n", {}, "cannot be imported: SystemExit: 1"),
        ("def f(rs:\n", {}, "line 1"),
        ("import json\nfrom textwrap import dedent\ndef g(rs): ...\n", {}, r"has no function 'f' \(there are: g\)"),
        ("f = 3\n", {}, "has no function 'f'"),
        ("REWARD_TYPE = 'both'\ndef f(rs): ...\n", {}, "REWARD_TYPE is 'both'"),
        (
            "def f(rs, weight=1): ...\n",
            {"wieght": 2},
            r"does not accept reward_function_kwargs.wieght; did you mean 'weight'",
        ),
        ("def f(items, weight, /): ...\n", {}, "missing a required .*'weight'"),
        ("def f(): ...\n", {}, "too many positional arguments"),
        ("import os\nos._exit(4)\n", {}, "exited with code 4"),
    ],
)
def test_a_reward_that_cannot_work_is_refused_when_it_is_loaded(write, source, kwargs, message):
    with pytest.raises(RewardSpecError, match=message):
        load(write(source), kwargs)


def test_a_function_with_open_keywords_takes_any(write):
    with load(write("def f(rs, **kw):\n    return [kw['x'] for r in rs]\n"), {"x": 2.5}) as verifier:
        assert verifier(inputs("a"))[0].value == 2.5


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gsmk8", "did you mean 'gsm8k'"),
        ("nothing_like_it", "neither a built-in verifier nor file.py:function"),
        ("reward.py", "name the function after a colon"),
        ("rewards.py:f", r"no file .*rewards.py; did you mean 'reward.py'"),
        ("no/such/folder.py:f", "there are none"),
    ],
)
def test_a_spec_that_names_nothing_says_what_there_is(write, tmp_path, monkeypatch, spec, message):
    write("def f(rs): ...\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RewardSpecError, match=message):
        load(spec)


def test_builtins_take_their_own_kwargs_and_numbers_are_checked():
    with pytest.raises(RewardSpecError, match="'gsm8k' takes no 'x'"):
        load("gsm8k", {"x": 1})
    with pytest.raises(RewardSpecError, match="takes no 'digit'; did you mean 'digits'"):
        load("math", {"digit": 1})
    with pytest.raises(RewardSpecError, match="missing a required argument: 'max_length'"):
        load("length")
    with pytest.raises(TypeError, match="reward_function_kwargs: 'x'"):
        load("gsm8k", {"x": object()})
    with pytest.raises(ValueError, match="timeout positive"):
        load("gsm8k", timeout=0)


def test_a_neighbour_called_math_does_not_replace_the_standard_module(write, tmp_path, monkeypatch):
    (tmp_path / "math.py").write_text("raise RuntimeError('shadowed')\n")
    (tmp_path / "helper.py").write_text("VALUE = 2.0\n")
    monkeypatch.chdir(tmp_path)
    spec = write("import math, helper\ndef f(rs):\n    return [math.sqrt(4) * helper.VALUE for r in rs]\n")
    with load(spec) as verifier:
        assert math.isclose(verifier(inputs("a"))[0].value, 4.0)


def test_a_builtin_reads_its_options_the_token_count_and_the_columns_it_asks_for():
    with load("length", {"max_length": 100, "buffer": 20}) as verifier:
        assert verifier([RewardInput("a b", "", response_length=90)])[0].value == -0.5
    with load("choice") as verifier:
        [score] = verifier([RewardInput("<answer>Paris</answer>", "B", metadata={"choices": ["London", "Paris"]})])
        assert score.value == 1.0


def test_a_sum_of_verifiers_and_users_functions_keeps_every_part(write):
    spec = write("def f(rs):\n    return [{'overall': 2.0, 'extra': 3.0} for r in rs]\n")
    parts = {"gsm8k": 0.5, "mine": {"reward": spec, "weight": 0.25}, "tags": {"reward": "format", "mode": "box"}}
    with load("combine", {"parts": parts}) as verifier:
        [score] = verifier([RewardInput(r"\boxed{5}", "5")])
    assert score.parts == {
        "overall": 2.0, "gsm8k": 1.0, "gsm8k/accuracy": 1.0, "mine": 2.0, "mine/extra": 3.0, "tags": 1.0,
        "tags/format": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize("token", [{}, {"token_env": "VLLM_API_KEY"}])
def test_a_service_may_be_a_part_of_a_sum_and_has_its_token(token, monkeypatch):
    monkeypatch.setenv("R1_REWARDS_TOKEN", "of the default")
    monkeypatch.setenv("VLLM_API_KEY", "of an option")

    def respond(body, path, headers):
        if headers.get("authorization") != f"Bearer of {'an option' if token else 'the default'}":
            return 401, {}
        return 200, {"rewards": [0.5] * len(json.loads(body)["query"])}

    with answering(respond) as url:
        parts = {"gsm8k": 1.0, "far": {"reward": "remote", "weight": 2.0, "urls": url, **token}}
        with load("combine", {"parts": parts}) as verifier:
            scores = verifier([RewardInput("#### 5", "5"), RewardInput("#### 6", "5")])
    assert [score.value for score in scores] == [2.0, 1.0]
    assert scores[0].parts["far"] == 0.5


def test_a_part_that_fails_fails_its_sample_by_name(write):
    spec = write("def f(rs):\n    return [1.0 if r['response'] == 'good' else 1 / 0 for r in rs]\n")
    with load("combine", {"parts": {"mine": {"reward": spec}}}, failure_score=-1.0) as verifier:
        good, bad = verifier([RewardInput("good", ""), RewardInput("bad", "")])
    assert good.value == 1.0
    assert bad.value == -1.0
    assert bad.error.cause == "exception"
    assert "mine: exception: ZeroDivisionError" in bad.error.message
