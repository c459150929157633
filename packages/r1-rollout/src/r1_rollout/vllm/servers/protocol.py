"""Requests to vLLM's `/inference/v1/generate`, token ids in and out, and the checks of its answers.

The servers report log-probs over the whole vocabulary at the sampling temperature, ban tokens and replay given
responses by `plain_logprobs`.
"""

import base64
import io
import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

from r1_rollout.errors import ServerError
from r1_rollout.sampling import sample_seed
from r1_rollout.types import Completion, Json, JsonObject, PromptLike, SamplingParams
from r1_rollout.vllm.client import ServerFault
from r1_rollout.vllm.limits import FORCED

if TYPE_CHECKING:
    from PIL.Image import Image

    from r1_rollout.types import Tokens

GENERATE = "/inference/v1/generate"
_NAN = -9999.0  # what vLLM writes for a log-prob that is not a number
_CHUNK = 32  # tokens of a sample per event of the stream


class Unsendable(ServerError, ValueError): ...


def generate_body(
    prompt: PromptLike, params: SamplingParams, end_token_ids: Collection[int], known: Collection[str] = ()
) -> JsonObject:
    """Return the request for a whole group. Raises Unsendable if the prompt has media that cannot be sent.

    `known`: pictures that the server has processed, by `picture_ids`. They are named instead of sent.
    """
    return _prompt(prompt, known) | {
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "sampling_params": {
            "n": params.n,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": max(params.top_k, 0),
            "min_p": params.min_p,
            "seed": sample_seed(params.seed, prompt.id, 0),
            "ignore_eos": True,  # the end tokens are those below and no others
            "stop_token_ids": sorted(ends_of(params, end_token_ids)),
            "stop": list(params.stop),
            "skip_special_tokens": False,  # stop strings may hold them
            "spaces_between_special_tokens": False,
            "logprobs": 0,
            "detokenize": bool(params.stop),
            "stream_interval": _CHUNK,
        },
    }


def ends_of(params: SamplingParams, end_token_ids: Collection[int]) -> frozenset[int]:
    return frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else end_token_ids)


def replay_body(prompt: PromptLike, response: "Tokens", temperature: float) -> JsonObject:
    """Return the request for the log-probs of a given response, computed as those of samples are."""
    return _prompt(prompt) | {
        "sampling_params": {
            "max_tokens": len(response),
            "temperature": temperature,
            "seed": 0,
            "ignore_eos": True,
            "logprobs": 0,
            "detokenize": False,
            "extra_args": {FORCED: [int(token) for token in response]},
        }
    }


def read_body(prompt: PromptLike, response: "Tokens", top: int = 0) -> JsonObject:
    """Return the request for the log-probs of a prompt and its response, which the server computes in one pass.

    And of the `top` most likely tokens in place of each.

    Any vLLM that was started with `--enable-scale-out` answers it, at temperature 1 and in `prompt_logprobs`.
    """
    body = _prompt(prompt)
    body["token_ids"] += [int(token) for token in response]
    settings = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True, "prompt_logprobs": top, "detokenize": False}
    return body | {"sampling_params": settings}


def picture_ids(prompt: PromptLike) -> list[str]:
    """Return a hash of each picture's pixels."""
    return [_pixel_hash(image) for image in getattr(prompt, "images", ())]


def _pixel_hash(image: "Image") -> str:
    digest = blake2b(f"{image.mode} {image.size} {image.getpalette()}".encode(), digest_size=16)
    digest.update(image.tobytes())
    return digest.hexdigest()


def _prompt(prompt: PromptLike, known: Collection[str] = ()) -> JsonObject:
    if getattr(prompt, "videos", ()):
        raise Unsendable(
            f"prompt {prompt.id} has a video, which cannot be sent to a server without loss: let one engine sample, or "
            "leave videos out"
        )
    images = getattr(prompt, "images", ())
    if not images:
        if prompt.model_inputs:
            raise Unsendable(f"prompt {prompt.id} has {', '.join(prompt.model_inputs)} but no images to send")
        return {"token_ids": list(prompt.token_ids)}
    parts = [
        {"type": "image_url", "uuid": name} | ({} if name in known else {"url": f"data:image/png;base64,{_png(image)}"})
        for name, image in zip(picture_ids(prompt), images, strict=True)
    ]
    return {"token_ids": list(prompt.engine_token_ids), "content_parts": parts}  # type: ignore[attr-defined]


def _png(image: "Image") -> str:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return base64.b64encode(buffer.getvalue()).decode()


@dataclass(slots=True)
class _Sample:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


def read_group(
    events: Iterable[JsonObject],
    prompt: PromptLike,
    params: SamplingParams,
    *,
    end_token_ids: Collection[int],
    banned: Collection[int],
    label: str,
    version: int,
    arrived: Callable[[int], None] = lambda tokens: None,
    finished: Callable[[int, Completion], None] = lambda sample, completion: None,
    prefilled: Callable[[int], None] = lambda tokens: None,
) -> list[Completion]:
    """Assemble a group from a server's events.

    Args:
        label: name of the weights that the server must report.
        version: of the completions.
        arrived: called with the number of tokens in each event.
        finished: called with each sample's number, when it has finished.
        prefilled: called with the tokens of the prompt that no cache had, for the first sample, if the server tells.

    Raises:
        ServerFault: anything is missing, doubled, or not what was requested.
    """
    samples, completions = [_Sample() for _ in range(params.n)], dict[int, Completion]()
    ends, prompt_seen = ends_of(params, end_token_ids), False
    try:
        for event in events:
            if (seen := event.get("prompt_token_ids")) is not None:
                counts = f"it read {len(seen)} prompt tokens, not these {len(prompt.token_ids)}"
                _require(seen == list(prompt.token_ids), f"{counts} (are pictures resized by the server?)")
                prompt_seen = True
            details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
            if (cached := details.get("cached_tokens")) is not None:
                prefilled(len(prompt.token_ids) - cached)
            for choice in event["choices"]:
                sample = samples[choice["index"]] if choice["index"] >= 0 else None
                _require(sample is not None and sample.finish_reason is None, "a sample goes on after its end")
                arrived(_extend(sample, choice, label))  # type: ignore[arg-type]
                if prompt_seen and sample.finish_reason is not None:  # type: ignore[union-attr]
                    number = choice["index"]
                    completions[number] = _completion(sample, params, ends, frozenset(banned), version)  # type: ignore[arg-type]
                    finished(number, completions[number])
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ServerFault(f"prompt {prompt.id}: an event has another form: {type(error).__name__}: {error}") from error
    _require(prompt_seen, "the prompt's tokens were not read back")
    for number, sample in enumerate(samples):
        if number not in completions:
            completions[number] = _completion(sample, params, ends, frozenset(banned), version)
    return [completions[number] for number in range(params.n)]


def _extend(sample: _Sample, choice: JsonObject, label: str) -> int:
    tokens = choice["token_ids"] or []
    content = choice["logprobs"]["content"] if tokens else []
    _require([entry["token_id"] for entry in content] == tokens, "tokens and log-probs do not belong together")
    logprobs = [float(entry["logprob"]) for entry in content]
    _require(all(math.isfinite(value) and _NAN < value < 1e-3 for value in logprobs), "a log-prob is not a number")
    _require(all(type(token) is int and token >= 0 for token in tokens), "a token is not a number")
    sample.token_ids += tokens
    sample.logprobs += logprobs
    sample.finish_reason, sample.stop_reason = choice["finish_reason"], choice.get("stop_reason")
    if sample.finish_reason is not None:
        used = {span["version"] for span in choice["weight_versions"] or ()}
        _require(used == {label}, f"it sampled from weights {sorted(used)}, not from {label}")
    return len(tokens)


def _completion(
    sample: _Sample, params: SamplingParams, ends: frozenset[int], banned: frozenset[int], version: int
) -> Completion:
    tokens, length, max_tokens = sample.token_ids, len(sample.token_ids), params.max_tokens
    stop = bool(tokens) and (tokens[-1] in ends or sample.stop_reason in params.stop)
    _require(0 < length <= max_tokens, f"a sample has {length} tokens, 1 to {max_tokens} were requested")
    _require(not ends.intersection(tokens[:-1]), "a sample goes on after an end token")
    _require(not banned.intersection(tokens), f"it sampled the banned tokens {sorted(banned.intersection(tokens))}")
    if sample.finish_reason == "stop" and stop:
        return Completion(tokens, sample.logprobs, "stop", version)
    reason = sample.finish_reason
    what = (
        f"a sample ended by {reason!r} after {length} of {max_tokens} tokens (is the server's max_model_len too small?)"
    )
    _require(reason == "length" and length == max_tokens, what)
    return Completion(tokens, sample.logprobs, "length", version)


def read_replay(answer: Json, prompt: PromptLike, response: "Tokens", label: str) -> list[float]:
    """Return the log-probs [response_length] in a server's answer to `replay_body`.

    Raises:
        ServerFault: anything is missing or not a number, or the weights were not those called `label`.
    """
    sample = _Sample()
    try:
        _extend(sample, answer["choices"][0], label)
    except (KeyError, TypeError, IndexError) as error:
        what = f"log-probs have another form: {type(error).__name__}: {error}"
        raise ServerFault(f"prompt {prompt.id}: {what}") from error
    _require(sample.token_ids == list(response), "it took other tokens; does it run without `plain_logprobs`?")
    return sample.logprobs


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ServerFault(f"the server's answer makes no sense: {what}")
