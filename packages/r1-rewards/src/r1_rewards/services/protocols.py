"""The two JSON protocols between `remote` and a reward server.

- `openrlhf`: `{"query", "prompts", "labels"}`, lists of str, to `{"rewards": [float]}`, as in OpenRLHF's and LMM-R1's
  remote reward models. A query is the prompt with its response. Further lists of finite numbers become parts.
- `r1`: `{"inputs": [{"response", …}]}` to `{"scores": [{"parts": {…}}, {"failure": [cause, message]}]}`, with
  everything but pictures.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from r1_rewards.services.endpoint import Unusable
from r1_rewards.types import Cause, Failure, Outcome, RewardInput, Score, read_score


@dataclass(frozen=True, slots=True)
class Protocol:
    encode: Callable[[Sequence[RewardInput]], dict[str, object]]
    decode: Callable[[object, int], list[Outcome]]  # raises Unusable


def write_score(score: Score) -> dict[str, object]:
    if score.error is not None:
        return {"failure": [score.error.cause, score.error.message]}
    written: dict[str, object] = {"parts": {**score.parts, "overall": score.value}}
    if score.extracted is not None:
        written["extracted"] = printable(score.extracted)
    if score.reason:
        written["reason"] = printable(score.reason)
    return written


def printable(text: str) -> str:
    """Return `text` with lone surrogates, which JSON parsers may refuse, replaced by question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _encode_openrlhf(inputs: Sequence[RewardInput]) -> dict[str, object]:
    return {
        "query": [printable(item.prompt + item.response) for item in inputs],
        "prompts": [printable(item.prompt) for item in inputs],
        "labels": [printable(item.ground_truth) for item in inputs],
    }


def _decode_openrlhf(reply: Any, count: int) -> list[Outcome]:
    rewards = _list_of(reply, "rewards", count)
    parts = {
        key: values
        for key, values in reply.items()
        if key not in ("rewards", "overall") and _are_numbers(values) and len(values) == count
    }
    return [
        read_score({"overall": reward, **{key: values[i] for key, values in parts.items()}})
        for i, reward in enumerate(rewards)
    ]


def _encode_r1(inputs: Sequence[RewardInput]) -> dict[str, object]:
    return {
        "inputs": [
            {
                "response": printable(item.response),
                "ground_truth": printable(item.ground_truth),
                "response_length": item.response_length,
                "prompt": printable(item.prompt),
                "metadata": dict(item.metadata),
                "messages": list(item.messages),
                "step": item.step,
            }
            for item in inputs
        ]
    }


def _decode_r1(reply: object, count: int) -> list[Outcome]:
    return [_read_outcome(item) for item in _list_of(reply, "scores", count)]


def _read_outcome(item: object) -> Outcome:
    if isinstance(item, Mapping) and "parts" in item:
        outcome = read_score(item["parts"])
        if isinstance(outcome, Failure):
            return outcome
        extracted, reason = item.get("extracted"), item.get("reason")
        return replace(
            outcome,
            extracted=extracted if isinstance(extracted, str) else None,
            reason=reason if isinstance(reason, str) else "",
        )
    match item:
        case {"failure": [str(cause), str(message)]}:
            known: Cause = cause if cause in get_args(Cause) else "remote"  # type: ignore[assignment]
            return Failure(known, message)
    raise Unusable(f"a score is neither parts nor a failure: {str(item)[:80]!r}")


def _list_of(reply: object, key: str, count: int) -> list[object]:
    if not isinstance(reply, Mapping) or not isinstance(reply.get(key), list):
        raise Unusable(f"the reply has no list {key!r}: {str(reply)[:80]!r}")
    if len(reply[key]) != count:
        raise Unusable(f"{len(reply[key])} {key} for {count} responses")
    found: list[object] = reply[key]
    return found


def _are_numbers(values: object) -> bool:
    return isinstance(values, list) and all(isinstance(read_score(value), Score) for value in values)


PROTOCOLS = {
    "openrlhf": Protocol(_encode_openrlhf, _decode_openrlhf),
    "r1": Protocol(_encode_r1, _decode_r1),
}
