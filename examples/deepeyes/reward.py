"""DeepEyes' reward: 0.8 for the right answer, 1.2 more if a look into the picture led to it, -0.2 for broken tags."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from r1_rewards import RewardInput, Verifier, load, text

REWARD_NAME = "deepeyes"
REWARD_TYPE = "batch"

RIGHT = 0.5  # share of a judge's full mark from which on an answer is right
MAX_CHARACTERS = 1000  # of an answer; a longer one tries to persuade the judge


def compute_score(
    reward_inputs: list[dict[str, Any]], judge_url: str | None = None, judge_model: str = "judge"
) -> list[dict[str, float]]:
    """Score each episode by its last turn; `messages` are the conversation before it.

    judge_url: an OpenAI-compatible server with the model `judge_model`; None: the answer must be the ground truth as
    normalised text.
    """
    answers = [read_answer(str(item["response"])) for item in reward_inputs]
    right = (
        [
            text.score(answer, str(item["ground_truth"])).value
            for answer, item in zip(answers, reward_inputs, strict=True)
        ]
        if judge_url is None
        else ask_judge(judge_url, judge_model, answers, reward_inputs)
    )
    return [
        combine(str(item["response"]), answer, float(mark >= RIGHT), looked(item.get("messages") or ()))
        for item, answer, mark in zip(reward_inputs, answers, right, strict=True)
    ]


def read_answer(response: str) -> str:
    return response.rpartition("<answer>")[2].partition("</answer>")[0].strip()


def looked(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a tool returned a picture: one that stands behind the policy's first turn."""
    turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    later = messages[turns[0] :] if turns else ()
    return any(
        part["type"] == "image"
        for message in later
        if not isinstance(message["content"], str)
        for part in message["content"]
    )


def combine(response: str, answer: str, accuracy: float, used: bool) -> dict[str, float]:
    rest = response.rpartition("</think>")[2]
    broken = response.count("<think>") != response.count("</think>") or rest.count("<answer>") != rest.count(
        "</answer>"
    )
    if len(answer) >= MAX_CHARACTERS:
        accuracy, broken = 0.0, True
    overall = 0.8 * accuracy - 0.2 * broken + 1.2 * accuracy * used
    return {"overall": overall, "accuracy": accuracy, "format": 1.0 - broken, "zoomed": float(used)}


def ask_judge(url: str, model: str, answers: Sequence[str], inputs: Sequence[Mapping[str, Any]]) -> list[float]:
    asked = [
        RewardInput(answer, str(item["ground_truth"]), messages=item.get("messages") or ())
        for answer, item in zip(answers, inputs, strict=True)
    ]
    return [outcome.value for outcome in open_judge(url, model)(asked)]


@lru_cache(maxsize=1)
def open_judge(url: str, model: str) -> Verifier:
    return load("judge", {"url": url, "model": model})
