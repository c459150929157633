"""The options of the reference-probability reward in `worker.reward.reward_function_kwargs`."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from r1_rewards.reference.reference_probability import Settings
from r1_rewards.reference.splice import SLOTS
from r1_rewards.types import RewardSpecError, suggest

POLICY, REFERENCE = "policy", "reference"
FORK = "easyr1_rlpr"
SOURCES = ("auto", "column", "online")
FLAGS = ("use_debiasing", "clip", "one_more_token", "repetition_penalty")
WORDS = ("model", "served_name", "token_env", "aggregation", "shaping_function_name", "discrete_function_name")
KINDS: Mapping[str, Any] = {"format_weight": int | float, **dict.fromkeys(FLAGS, bool), **dict.fromkeys(WORDS, str)}


@dataclass(frozen=True, slots=True)
class Options(Settings):
    """The reward's settings, and the model whose log-probs count.

    `model` is `policy` (before the update), `reference` (the frozen model of the KL term), a folder or hub name (loaded
    beside the run), or URLs of vLLM servers, with `served_name` and `token_env`. `score_a` is the source of the base
    score: `column` of the rows, `online` from the model before its first step, or `auto`: the column if there is one.
    """

    model: str = POLICY
    served_name: str = ""  # the model's name on a server that has several
    token_env: str = "OPENAI_API_KEY"  # the environment variable of a server's bearer token
    score_a: Literal["auto", "column", "online"] = "auto"
    repetition_penalty: bool = False  # −1 for a run of ten words that stands there ten times
    strict: str | None = None  # `easyr1_rlpr`: the fork's rules, its faults included

    @property
    def served(self) -> bool:
        return self.model.startswith(("http://", "https://"))


def read_options(kwargs: Mapping[str, Any]) -> Options:
    known = {field.name: field for field in fields(Options)} | {"gt_tokens_one_more": None}
    for key in kwargs:
        if key not in known or key in ("eos", "rule"):
            raise RewardSpecError(f"the reward 'reference_probability' takes no {key!r}" + suggest(key, known))
    given = dict(kwargs)
    if "gt_tokens_one_more" in given:  # OpenBMB/RLPR's name
        given["one_more_token"] = given.pop("gt_tokens_one_more")
    given["format_mode"] = str(given.get("format_mode", "r1")).lower()
    _require(given)
    if given.get("strict") is not None:
        given = {"shaping_function_name": "identity", **given, "rule": "strict", "clip": True}
    try:
        return replace(Options(), **given)
    except ValueError as error:
        raise RewardSpecError(f"the reward 'reference_probability': {error}") from error


def _require(given: Mapping[str, Any]) -> None:
    for key, value in given.items():
        if not isinstance(value, KINDS.get(key, object)) or (isinstance(value, bool) and KINDS.get(key) is not bool):
            raise RewardSpecError(f"reference_probability: {key} is {value!r}, which is of another type")
    for key, words in (("format_mode", SLOTS), ("score_a", SOURCES), ("strict", (FORK, None))):
        if given.get(key, next(iter(words))) not in words:
            shown = ", ".join(str(word) for word in words if word)
            raise RewardSpecError(f"reference_probability: {key} is {given[key]!r}; it must be one of {shown}")
