"""What the learner is given and what a loss sees: `Sample`, `LossInputs`, `LossOutput`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from torch import Tensor

# The optional per-token tensors of a sample.
PER_TOKEN = (
    "rollout_logprobs",
    "old_logprobs",
    "entropies",
    "ref_logprobs",
    "squared_probs",
    "full_kl",
    "values",
    "advantages",
    "returns",
    "weights",
    "selected",
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt with one answer, as the learner trains on it.

    Per-token tensors have the length L of prompt plus response. Entry t belongs to token t: `old_logprobs[t]` is the
    log-prob of token t given the tokens before it, and is 0 where `loss_mask` is false. Tensors in `model_inputs` are
    shared by the samples of a prompt, never copied. They may come from elsewhere when they are first read: any mapping
    will do that knows its names; only the rank that computes a sample reads the tensors, with its micro-batch.

    Example: prompt [7, 8], answer [4, 2]: `Sample(token_ids=[7, 8, 4, 2], loss_mask=[0, 0, 1, 1],
    position_ids=[[0, 1, 2, 3]], group_id=0, reward=1.0)` with tensors in place of the lists.
    """

    token_ids: Tensor  # int64 or int32 [L]
    loss_mask: Tensor  # bool [L], true on tokens the policy chose
    position_ids: Tensor  # int64 [axes, L]
    group_id: int  # samples of one prompt share it
    reward: float
    model_inputs: Mapping[str, Tensor] = field(default_factory=dict)
    prompt_length: int = 0  # how many of its first tokens are a prompt that other samples may share; 0: not told
    rollout_logprobs: Tensor | None = None  # float32 [L], as the engine sampled
    old_logprobs: Tensor | None = None  # float32 [L], the learner's own before the first update
    entropies: Tensor | None = None  # float32 [L], nats, of the distributions that the old log-probs are of
    ref_logprobs: Tensor | None = None  # float32 [L], the frozen reference's
    squared_probs: Tensor | None = None  # float32 [L], Σ p² of the policy's distribution before the first update
    full_kl: Tensor | None = None  # float32 [L], KL of that distribution from the reference's, over the vocabulary
    values: Tensor | None = None  # float32 [L], the critic's forecast before each token, before its first update
    advantages: Tensor | None = None  # float32 [L]
    returns: Tensor | None = None  # float32 [L], what the critic should have forecast
    weights: Tensor | None = None  # float32 [L], multiply the policy loss (`losses.correction`)
    selected: Tensor | None = None  # bool [L], tokens that the policy loss treats apart (`losses.covariance`)

    def __post_init__(self) -> None:
        length = self.token_ids.shape[0]
        if not 0 <= self.prompt_length <= length:
            found = f"prompt_length is {self.prompt_length}, and it has {length} tokens"
            raise ValueError(f"sample of group {self.group_id}: {found}")
        for name in ("loss_mask", "position_ids", *PER_TOKEN):
            value = getattr(self, name)
            if value is not None and value.shape[-1] != length:
                raise ValueError(f"sample of group {self.group_id}: {name} has length {value.shape[-1]}, not {length}")

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled: a field is often a view of the whole step's tensor, and a pickle of it holds all."""
        raise TypeError(
            "a Sample is not pickled, because its fields share the tensors of a whole step, all of which would go with "
            "each; send the fields of all samples together, as r1_core.rows.tokens gives them, and make samples there"
        )

    @property
    def response_length(self) -> int:
        return int(self.loss_mask.sum())


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts over the whole optimizer step (all micro-batches, all ranks); every loss is divided by one of them.

    arXiv 2503.14476 (DAPO) divides by tokens; dividing by a micro-batch's own count instead would make the
    gradient depend on how the step was cut.
    """

    tokens: int
    sequences: int  # those that have a trained token
    length: int = 1  # what a fixed-length average divides by: the longest's tokens unless the objective says


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The trained tokens of one micro-batch, one row per sample, padded on the right to R tokens.

    Values where `loss_mask` is false are arbitrary, even NaN: mask with `torch.where` before arithmetic.
    """

    logprobs: Tensor  # [B, R], requires grad
    loss_mask: Tensor  # bool [B, R]
    advantages: Tensor  # [B, R]
    old_logprobs: Tensor  # [B, R]
    totals: Totals
    ref_logprobs: Tensor | None = None  # [B, R]
    rollout_logprobs: Tensor | None = None  # [B, R], as the engine sampled, for losses that need them
    entropy: Tensor | None = None  # [B, R], of the policy's distribution at each trained token
    full_kl: Tensor | None = None  # [B, R], KL of that distribution from the reference's, over the vocabulary
    weights: Tensor | None = None  # [B, R], multiply the policy loss
    selected: Tensor | None = None  # bool [B, R], the tokens that the policy loss treats apart


@dataclass(frozen=True, slots=True)
class LossOutput:
    """A loss and its metrics, both already divided by the step's totals, so that micro-batches simply add up."""

    loss: Tensor  # scalar
    metrics: dict[str, Tensor] = field(default_factory=dict)  # scalars, detached
