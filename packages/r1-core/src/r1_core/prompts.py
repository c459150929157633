"""Find samples that share a prompt, and count the tokens to compute if each prompt is computed once."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from r1_core.types import Sample


@dataclass(frozen=True, slots=True)
class SharedPrompts:
    """The tokens that a forward pass computes: each prompt once, and each sample's own tokens after it.

    Example: answers of 3 and 2 tokens to a prompt of 5, and a sample of 4 without a prompt to share: `own` [3, 2, 4],
    `prompt` [0, 0, 1] and `lengths` [5, 0]. All three together are 14 tokens.
    """

    own: list[int]  # [N], tokens after the prompt
    prompt: list[int]  # [N], index of the sample's prompt
    lengths: list[int]  # [prompts], tokens of each; 0 for a sample without one to share

    @classmethod
    def find(cls, samples: Sequence[Sample], share: bool = True) -> "SharedPrompts":
        """Find samples whose prompts are equal in tokens, positions and model inputs; without `share`, none are."""
        own, prompt, lengths = list[int](), list[int](), list[int]()
        seen: dict[tuple[object, ...], int] = {}
        for i, sample in enumerate(samples):
            whole, start = sample.token_ids.shape[0], sample.prompt_length
            shared = start if share and 0 < start < whole else 0
            place = seen.setdefault(_key(sample) if shared else (i,), len(lengths))
            if place == len(lengths):
                lengths.append(shared)
            own.append(whole - shared)
            prompt.append(place)
        return cls(own, prompt, lengths)

    @property
    def shared(self) -> bool:
        return len(self.lengths) < len(self.own)

    def tokens(self, indices: Sequence[int]) -> int:
        """Count the tokens that these samples compute together."""
        prompts = {self.prompt[i] for i in indices}
        return sum(self.own[i] for i in indices) + sum(self.lengths[prompt] for prompt in prompts)

    def in_order(self) -> list[int]:
        """Return the tokens that each sample adds to those before it, [N]: its own, and its prompt if that is new."""
        seen: set[int] = set()
        added = []
        for own, prompt in zip(self.own, self.prompt, strict=True):
            added.append(own if prompt in seen else own + self.lengths[prompt])
            seen.add(prompt)
        return added

    def groups(self, indices: Iterable[int]) -> list[list[int]]:
        found: dict[int, list[int]] = {}
        for i in indices:
            found.setdefault(self.prompt[i], []).append(i)
        return list(found.values())


def _key(sample: Sample) -> tuple[object, ...]:
    """Identify a sample's prompt. The first axis of positions only counts tokens, so it is left out."""
    start = sample.prompt_length
    tokens, positions = sample.token_ids[:start].cpu(), sample.position_ids[1:, :start].cpu().contiguous()
    inputs = id(sample.model_inputs) if sample.model_inputs else None
    return start, tokens.numpy().tobytes(), positions.numpy().tobytes(), inputs
