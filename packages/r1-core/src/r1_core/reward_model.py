"""Train a reward model with `RewardLearner`: Bradley–Terry on the values of the last tokens (arXiv 2203.02155).

The gradient of a loss of whole samples' values is, as in `preference`, a weighted sum of values' gradients, so both
answers of a pair need not be in one micro-batch and may share their prompt.

    learner = RewardLearner(use_score_head(model), optimizer, rate)
    samples = learner.add_values([at_end(sample) for sample in samples])
    samples, metrics = weigh_values(samples)
    learner.forward_backward(samples)

`model` is a Hugging Face token classifier with one label, for example `AutoModelForTokenClassification` of a language
model with `num_labels=1`. Its weights have the names of `AutoModelForSequenceClassification`, so what `learner.save`
writes is a reward model as soon as configuration and tokenizer are beside it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from torch import nn
from torch.nn.functional import logsigmoid

from r1_core.preference import check_pairs, warn_if_not_finite
from r1_core.settings import NonNegative, check_settings
from r1_core.types import Sample, rows, with_tokens

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class BradleyTerry:
    """The loss of pairs of rewards that `weigh_values` computes, as a counterpart of `preference.PreferenceLoss`."""

    center: NonNegative = 0.0
    needs: ClassVar[tuple[str, ...]] = ("values",)

    def __post_init__(self) -> None:
        check_settings(self)


def use_score_head(model: Model) -> Model:
    """Let `RewardLearner` find the head `score` of a token classifier; remove its bias and dropout.

    The sequence classifier has neither, and pairs do not train a bias. Raises ValueError if the model has no linear
    `score`, or one with several outputs.
    """
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear) or head.out_features != 1:
        raise ValueError(
            f"{type(model).__name__} has no linear head `score` with one output; load the model with "
            "AutoModelForTokenClassification and num_labels=1"
        )
    head.register_parameter("bias", None)
    model.dropout = nn.Identity()
    model.get_output_embeddings = lambda: head  # type: ignore[assignment]
    return model


def at_end(sample: Sample) -> Sample:
    """Return the sample with one more token, the only trained one: the value before it is that of the last token.

    A causal model does not read the added token at any other position. Log-probs and other fields are dropped.
    """
    length = len(sample.token_ids)
    return Sample(
        token_ids=torch.cat([sample.token_ids, sample.token_ids[-1:]]),
        loss_mask=torch.arange(length + 1) == length,
        position_ids=torch.cat([sample.position_ids, sample.position_ids[:, -1:] + 1], dim=-1),
        group_id=sample.group_id,
        reward=sample.reward,
        model_inputs=sample.model_inputs,
        later_inputs=sample.later_inputs,
        prompt_length=sample.prompt_length,
    )


def weigh_values(samples: Sequence[Sample], *, center: float = 0.0) -> tuple[list[Sample], dict[str, float]]:
    """Return pairs with `returns` for `WeightedValue`, whose gradient is that of the mean over pairs of

        −log sigmoid(chosen − rejected) + center · (chosen + rejected)²

    Samples 2k and 2k + 1 are the chosen and the rejected answer of a pair, with equal `group_id`, and have `values`.
    `center` keeps rewards around 0 (arXiv 2312.09244). A value that is not finite is named in a warning, and makes
    returns and metrics NaN, so that `optim_step` skips the step.

    Metrics, but for the first with TRL's names: `reward_loss`, `accuracy`, `margin`, `min_reward`, `mean_reward`,
    `max_reward`.

    Raises:
        ValueError: the samples are no pairs, lack values, or train more than one token.
    """
    check_pairs(samples, "Bradley-Terry")
    several = next((i for i, sample in enumerate(samples) if sample.response_length != 1), None)
    if several is not None:
        raise ValueError(
            f"sample {several} (group {samples[several].group_id}) trains {samples[several].response_length} tokens; "
            "make it with reward_model.at_end"
        )
    values = rows(samples, "values").double()[:, 0].requires_grad_()
    margins = values[0::2] - values[1::2]
    total = (-logsigmoid(margins) + center * (values[0::2] + values[1::2]).square()).mean()
    (slopes,) = torch.autograd.grad(total, values)
    found = values.detach()
    metrics = {
        "reward_loss": total.item(),
        "accuracy": (margins > 0).double().mean().item(),
        "margin": margins.mean().item(),
        "min_reward": found.min().item(),
        "mean_reward": found.mean().item(),
        "max_reward": found.max().item(),
    }
    if warn_if_not_finite(samples, "values"):
        slopes, metrics = torch.full_like(slopes, torch.nan), dict.fromkeys(metrics, torch.nan)
    returns = (-slopes * len(samples)).to(rows(samples, "values").dtype)  # the aggregation divides by the sequences
    return with_tokens(samples, returns=returns), metrics
