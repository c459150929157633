"""A function that only this process can call is scored in a thread of it, as one in a worker is."""

import asyncio
import threading
import time
from contextvars import ContextVar

import pytest

from r1_rewards import RewardFailure, RewardInput, RewardSpecError, load

INPUTS = [RewardInput("4", "4"), RewardInput("0", "4"), RewardInput("nan", "4"), RewardInput("x", "4")]


def closure(scale):
    return lambda response, ground_truth: scale * float(ground_truth) / float(response)


def causes(scores):
    return [score.error.cause if score.error else None for score in scores]


def test_scores_and_failures_are_those_of_a_worker(tmp_path):
    (tmp_path / "same.py").write_text(
        "def reward(response, ground_truth):\n    return 2 * float(ground_truth) / float(response)\n"
    )
    with load(closure(2), in_process=True) as here, load(f"{tmp_path}/same.py:reward") as worker:
        mine, theirs = here(INPUTS), worker(INPUTS)
        assert (here.per_sample, here([])) == (True, [])
    assert [score.value for score in mine] == [score.value for score in theirs] == [2.0, 0.0, 0.0, 0.0]
    assert causes(mine) == causes(theirs) == [None, "exception", "non_finite", "exception"]


@pytest.mark.parametrize("policy", ["drop", "stop"])
def test_the_failure_policy_holds(policy):
    with load(closure(2), in_process=True, failure_policy=policy) as verifier:
        if policy == "drop":
            assert [score.keep for score in verifier(INPUTS)] == [True, False, False, False]
        else:
            with pytest.raises(RewardFailure, match="could not score response 1"):
                verifier(INPUTS)


def test_a_batch_that_fails_as_a_whole_is_scored_one_by_one():
    sizes = []

    def reward(reward_inputs):
        sizes.append(len(reward_inputs))
        return [float(item["response"]) for item in reward_inputs]

    with load(reward, in_process=True) as verifier:
        assert not verifier.per_sample
        assert causes(verifier(INPUTS)) == [None, None, "non_finite", "exception"]
        assert causes(verifier(INPUTS[:2])) == [None, None]
    assert sizes == [4, 1, 1, 1, 1, 2]


def test_an_answer_over_its_time_fails_and_the_next_is_scored():
    release = threading.Event()

    def reward(response, ground_truth):
        return float(release.wait(60) if response == "0" else 1)

    with load(reward, in_process=True, timeout=0.2) as verifier:
        scores = verifier(INPUTS[:3])
    release.set()
    assert causes(scores) == [None, "timeout", None]
    assert scores[1].error.message == "no result after 0.2 s"


def test_an_exit_costs_one_sample_and_no_event_loop_runs_in_its_thread():
    main = threading.current_thread()

    async def reward(response, ground_truth, weight):
        await asyncio.sleep(0)
        if response == "x":
            raise SystemExit(1)
        return weight * (threading.current_thread() is not main)

    async def score():
        with load(reward, {"weight": 0.5}, in_process=True) as verifier:
            return verifier([INPUTS[0], INPUTS[3]])

    scores = asyncio.run(score())
    assert (scores[0].value, causes(scores)) == (0.5, [None, "exception"])


class Judge:
    def __call__(self, response, ground_truth):
        return 1.0

    def method(self, response, ground_truth):
        return 0.5


def test_objects_and_methods_are_taken_and_what_cannot_be_called_is_refused():
    for function, value in ((Judge(), 1.0), (Judge().method, 0.5)):
        with load(function, in_process=True) as verifier:
            assert [score.value for score in verifier(INPUTS[:1])] == [value]
    with pytest.raises(RewardSpecError, match="reward function <lambda>: the signature"):
        load(lambda one, two: 1.0, in_process=True)
    with pytest.raises(RewardSpecError, match=r"does not accept reward_function_kwargs\.scale"):
        load(closure(1), {"scale": 2}, in_process=True)


def test_a_function_sees_the_callers_context_variables():
    variable = ContextVar("weight", default=0.0)
    variable.set(0.5)
    with load(lambda response, ground_truth: variable.get(), in_process=True) as verifier:
        assert verifier(INPUTS[:1])[0].value == 0.5


def test_calls_of_threads_are_serialized():
    running, most = [], []

    def reward(response, ground_truth):
        running.append(1)
        most.append(len(running))
        time.sleep(0.01)
        running.pop()
        return 1.0

    with load(reward, in_process=True) as verifier:
        threads = [threading.Thread(target=verifier, args=(INPUTS,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (len(most), max(most)) == (12, 1)
