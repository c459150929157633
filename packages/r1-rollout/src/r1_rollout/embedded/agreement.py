"""A check that the embedded engine computes what the model does by itself, when it takes over a model."""

import sys
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from r1_rollout.embedded.architecture import Reach
from r1_rollout.embedded.attention import ATTENTION
from r1_rollout.embedded.decoding import Decoding
from r1_rollout.embedded.prefill import rotary_axes, without_lone_axis
from r1_rollout.embedded.prefix_cache import PrefixCache
from r1_rollout.embedded.rows import SamplingRequest, forced_strategy
from r1_rollout.embedded.stack import Stack, stack_of
from r1_rollout.embedded.windows import narrowed
from r1_rollout.errors import NonFiniteLogits, RolloutError
from r1_rollout.probes import ProbePrompt, spread_tokens
from r1_rollout.tokens import setting
from r1_rollout.types import Completion
from r1_rollout.weight_checks import TOLERANCE, widest_gap

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LENGTHS = (48, 5)  # tokens of the two prompts; over the long one rotary embeddings that are off add up
_RESPONSE = 2
_WINDOW = 16  # tokens that layers with a window see meanwhile, so that the long prompt goes beyond it


def require_agreement(model: "PreTrainedModel", reach: Reach, allowed: Sequence[int], filler: int) -> Stack | None:
    """Compare the log-probs of two short sequences, batched in the engine, with the model's own of each alone.

    The model's own forward attends by `eager`, which implements every kind of attention. One sequence is at the last
    known positions, where rotary embeddings that depend on the batch show.

    Returns:
        The model's stack, if it has one whose log-probs agree, too.

    Raises:
        ValueError: they differ by more than rounding, or one of the two forwards fails.
    """
    name = type(model).__name__
    prompts = _prompts(model, reach, allowed)
    responses = [spread_tokens(allowed, _RESPONSE, sum(_LENGTHS) + number) for number in range(len(prompts))]
    if any(parameter.is_meta for parameter in model.parameters()):
        return None
    try:
        model.set_attn_implementation("eager")
        with narrowed(model, _WINDOW):
            expected = [_own_logprobs(model, *pair) for pair in zip(prompts, responses, strict=True)]
        model.set_attn_implementation(ATTENTION)
        if not all(torch.tensor(one).isfinite().all() for one in expected):
            return None
        found = _engine_logprobs(model, prompts, responses, filler)
    except RolloutError:
        raise
    except Exception as error:  # whatever it is, the model is not one that the engine can decode with
        raise ValueError(f"the embedded engine cannot sample from {name} ({_reason(error)}), vLLM may") from error
    gap, tolerance = widest_gap(found, expected), TOLERANCE.get(model.dtype, TOLERANCE[torch.float32])
    if not gap <= tolerance:
        raise ValueError(
            f"the embedded engine would sample wrongly from {name} (its log-probs differ from those of the model's own "
            f"forward by {gap:.3g} of their size, {tolerance:g} allowed: some kind of attention or position is unknown "
            "to it), vLLM may know it"
        )
    stack = stack_of(model)
    if stack is None:
        return None
    try:
        found = _engine_logprobs(model, prompts, responses, filler, stack)
    except Exception:  # of something that the family's name does not promise
        return None
    return stack if widest_gap(found, expected) <= tolerance else None


def _reason(error: Exception) -> str:
    """Return what failed in one line; errors of other kinds are those of the model's own code."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return line if type(error) in (RuntimeError, ValueError) else f"its code fails with {type(error).__name__}: {line}"


def agree_behind_prefixes(model: "PreTrainedModel", reach: Reach, allowed: Sequence[int], filler: int) -> bool | None:
    """Whether prompts that go on from kept keys and values get the log-probs of the model's own forward.

    None if log-probs are not finite, which shows nothing.
    """
    prompts = _prompts(model, reach, allowed, 3 * _RESPONSE)
    first, between, last = (
        [spread_tokens(allowed, _RESPONSE, turn + 3 * number) for number in range(len(prompts))] for turn in range(3)
    )
    later = [
        ProbePrompt(
            prompt.id, [*prompt.token_ids, *turn, *answer], _extended(prompt.position_ids, len(turn) + len(answer))
        )
        for prompt, turn, answer in zip(prompts, first, between, strict=True)
    ]
    prefixes = PrefixCache(sys.maxsize)
    try:
        _engine_logprobs(model, prompts, first, filler, prefixes=prefixes)
        kept = len(prefixes)
        found = _engine_logprobs(model, later, last, filler, prefixes=prefixes)
        if kept < len(prompts) or len(prefixes) > kept:  # the later ones have taken the place of the first
            return False
        model.set_attn_implementation("eager")
        with narrowed(model, _WINDOW):
            expected = [_own_logprobs(model, *pair) for pair in zip(later, last, strict=True)]
    except NonFiniteLogits:
        return None
    except RolloutError:
        raise
    except Exception:  # of something that the model's forward needs, and which is not known behind a prefix
        return False
    finally:
        model.set_attn_implementation(ATTENTION)
    return widest_gap(found, expected) <= TOLERANCE.get(model.dtype, TOLERANCE[torch.float32])


def _prompts(
    model: "PreTrainedModel", reach: Reach, allowed: Sequence[int], behind: int = _RESPONSE
) -> list[ProbePrompt]:
    """Return probes with room for `behind` tokens after each."""
    text = model.config.get_text_config()
    rope = setting(text, "rope_parameters") or {}
    known = reach.positions or 2 * (setting(text, "max_position_embeddings") or 1024)
    prompts = []
    for number, longest in enumerate(_LENGTHS):
        length = max(1, min(longest, known - behind))
        first = 0 if number == 0 else max(0, known - length - behind)
        positions = torch.arange(first, first + length).expand(4 if "mrope_section" in rope else 1, -1)
        prompts.append(ProbePrompt(f"agreement:{number}", spread_tokens(allowed, length, number), positions))
    return prompts


@torch.inference_mode()
def _own_logprobs(model: "PreTrainedModel", prompt: ProbePrompt, response: list[int]) -> list[float]:
    whole = _extended(prompt.position_ids, len(response))
    given = {}
    if whole[0, 0] > 0:  # else the model counts by itself, which shows whether it counts otherwise
        given["position_ids"] = without_lone_axis(rotary_axes(whole)[:, None]).to(model.device)
    token_ids = torch.tensor([[*prompt.token_ids, *response]], device=model.device)
    logits = model(input_ids=token_ids, use_cache=False, **given).logits[0, len(prompt.token_ids) - 1 : -1]
    chosen = torch.tensor(response, device=logits.device)[:, None]
    logprobs: list[float] = logits.float().log_softmax(-1).gather(1, chosen)[:, 0].tolist()
    return logprobs


def _extended(position_ids: Tensor, count: int) -> Tensor:
    """Append the positions of tokens: [axes, length] -> [axes, length + count]."""
    behind = int(position_ids.max()) + 1 + torch.arange(count)
    return torch.cat([position_ids, behind.expand(len(position_ids), -1)], dim=1)


def _engine_logprobs(
    model: "PreTrainedModel",
    prompts: Sequence[ProbePrompt],
    responses: Sequence[list[int]],
    filler: int,
    stack: Stack | None = None,
    prefixes: PrefixCache | None = None,
) -> list[list[float]]:
    with narrowed(model, _WINDOW):
        return _decode(model, prompts, responses, filler, stack, prefixes)


def _decode(
    model: "PreTrainedModel",
    prompts: Sequence[ProbePrompt],
    responses: Sequence[list[int]],
    filler: int,
    stack: Stack | None,
    prefixes: PrefixCache | None,
) -> list[list[float]]:
    decoding = Decoding(
        model,
        forced_strategy(responses, 1.0, model.device),
        filler=filler,
        max_sequences=len(prompts),
        longest=max(map(len, responses)),
        version=0,
        stack=stack,
        prefixes=prefixes,
    )
    for index, prompt in enumerate(prompts):
        decoding.submit(SamplingRequest(index, prompt, [index], len(responses[index])))
    groups: dict[Hashable, list[Completion]] = {}
    while decoding.pending:
        groups.update(decoding.step())
    return [groups[index][0].logprobs.tolist() for index in range(len(prompts))]
