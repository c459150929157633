"""Fixed sequences to compare an engine with the learner on, of tokens from all over the vocabulary."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import gcd
from typing import TYPE_CHECKING, Any

from r1_rollout.types import PromptLike

if TYPE_CHECKING:
    from torch import Tensor

# Tokens of each prompt. The long one fills whole blocks of a prefix cache, the short one none.
PROMPTS = (5, 136)
# Tokens of each response: the first shows what the prompt's forward pass computes, the second what a decoding step does
# with the cache. Any more would cost a step each, after every sync.
RESPONSE = 2
# Tokens of a response where the comparison is made but once: the more, the nearer its mean gap to the expected one.
OPENING = 32


@dataclass(frozen=True, slots=True)
class ProbePrompt:
    id: str
    token_ids: list[int]
    position_ids: "Tensor"  # int64 [axes, length]
    model_inputs: "Mapping[str, Tensor]" = field(default_factory=dict)
    images: tuple[Any, ...] = ()
    videos: tuple[Any, ...] = ()

    @property
    def engine_token_ids(self) -> list[int]:
        return self.token_ids


@dataclass(frozen=True, slots=True)
class Probes:
    prompts: tuple[PromptLike, ...]
    responses: tuple[list[int], ...]

    def __add__(self, other: "Probes") -> "Probes":
        return Probes(self.prompts + other.prompts, self.responses + other.responses)

    def without_media(self) -> "Probes":
        kept = [pair for pair in zip(self.prompts, self.responses, strict=True) if not pair[0].model_inputs]
        return Probes(tuple(prompt for prompt, _ in kept), tuple(response for _, response in kept))

    def reversed(self) -> "Probes":
        """Return the text prompts with tokens in reverse: no cache has them, but they embed the same rows."""
        kept = [
            (replace(prompt, id=f"{prompt.id}:reversed", token_ids=prompt.token_ids[::-1]), response)
            for prompt, response in zip(self.prompts, self.responses, strict=True)
            if isinstance(prompt, ProbePrompt) and not prompt.model_inputs
        ]
        return Probes(tuple(prompt for prompt, _ in kept), tuple(response for _, response in kept))

    @property
    def inputs(self) -> set[int]:
        """Every token that is embedded: all but the last of each response."""
        prompts = {token for prompt in self.prompts for token in prompt.token_ids}
        return prompts | {token for response in self.responses for token in response[:-1]}


def text_probes(
    allowed: Sequence[int],
    *,
    axes: int = 1,
    longest_prompt: int,
    longest_response: int,
    variant: int = 0,
    prompts: Sequence[int] = PROMPTS,
    response: int = RESPONSE,
) -> Probes:
    """Return a few sequences of different lengths, the same on every machine.

    Args:
        allowed: token ids that stand for no media.
        axes: rows of `position_ids`, four for M-RoPE.
        longest_prompt, longest_response: tokens that the engine has room for.
        variant: another number gives sequences that share no prefix with these.
        prompts, response: tokens of each prompt and of each response, at most.
    """
    import torch

    response_length = min(response, longest_response)
    found, responses, used = [], [], variant * (sum(prompts) + len(prompts) * response)
    for number, length in enumerate(prompts):
        prompt_length = min(length, longest_prompt)
        token_ids = spread_tokens(allowed, prompt_length, used)
        used += prompt_length
        responses.append(spread_tokens(allowed, response_length, used))
        used += response_length
        positions = torch.arange(prompt_length).expand(axes, -1)
        found.append(ProbePrompt(f"canary:{variant}:{number}", token_ids, positions))
    return Probes(tuple(found), tuple(responses))


def spread_tokens(allowed: Sequence[int], count: int, first: int = 0) -> list[int]:
    """Return numbers `first`, `first + 1`, … of a walk that visits every token once before any token twice.

    Its step is the golden section of the vocabulary (Weyl's sequence), so neighbours have unrelated embeddings.
    """
    size = len(allowed)
    step = max(1, round(size * 0.618))
    while gcd(step, size) != 1:
        step += 1
    return [allowed[(first + i) * step % size] for i in range(count)]
