"""Requests to vLLM in this process, one for each sample, and their results."""

from typing import TYPE_CHECKING, Literal

import numpy as np
from vllm import SamplingParams as Settings
from vllm.sampling_params import RequestOutputKind

from r1_rollout.errors import EngineError, NonFiniteLogits
from r1_rollout.sampling import sample_seed
from r1_rollout.types import Completion, SamplingParams
from r1_rollout.vllm.limits import FORCED

if TYPE_CHECKING:
    from vllm import RequestOutput

    from r1_rollout.types import Tokens


def sample_settings(params: SamplingParams, end_token_ids: frozenset[int], prompt_id: str, sample: int) -> Settings:
    """Return vLLM's parameters for one sample, whose seed depends on (seed, prompt id, sample index) alone."""
    ends = frozenset() if params.ignore_eos else end_token_ids
    return Settings(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=0 if params.top_k == -1 else params.top_k,
        min_p=params.min_p,
        seed=sample_seed(params.seed, prompt_id, sample),
        ignore_eos=True,  # the model's own; r1 names the end tokens
        stop_token_ids=sorted(ends | {*params.stop_token_ids}),
        stop=list(params.stop),
        detokenize=bool(params.stop),
        skip_special_tokens=False,  # they are part of the text that stop strings are sought in
        spaces_between_special_tokens=False,
        logprobs=0,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def forced_settings(response: "Tokens", temperature: float) -> Settings:
    return Settings(
        max_tokens=len(response),
        temperature=temperature,
        seed=0,
        ignore_eos=True,
        detokenize=False,
        logprobs=0,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={FORCED: [int(token) for token in response]},
    )


def to_completion(output: "RequestOutput", prompt_id: str, version: int) -> Completion:
    """Read a finished request. Raises EngineError if vLLM ended it itself, NonFiniteLogits on such log-probs."""
    answer = output.outputs[0]
    tokens, reason = list(answer.token_ids), answer.finish_reason
    if reason not in ("stop", "length") or not tokens or len(answer.logprobs or ()) != len(tokens):
        raise EngineError(
            f"prompt {prompt_id}: vLLM ended an answer by {reason!r}, with {len(tokens)} tokens and "
            f"{len(answer.logprobs or ())} log-probs"
        )
    logprobs = np.array(
        [steps[token].logprob for steps, token in zip(answer.logprobs, tokens, strict=True)], np.float32
    )
    if not np.isfinite(logprobs).all():
        raise NonFiniteLogits(f"prompt {prompt_id}: the model's logits are not finite; look at the weights")
    finish: Literal["stop", "length"] = "stop" if reason == "stop" else "length"
    return Completion(tokens, logprobs, finish, version)
