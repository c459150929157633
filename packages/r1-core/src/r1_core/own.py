"""Use a function or class of your own as an advantage estimator or a policy loss."""

import traceback
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from r1_core.advantages.inputs import AdvantageInputs, Estimator
from r1_core.losses.policy import AGGREGATIONS, PolicyLoss
from r1_core.needs import read_needs
from r1_core.types import LossInputs, Totals

T = TypeVar("T")

DECLARED = ("needs", "token_wise", "aggregation")  # what a function may say of itself, as an attribute of its own

WRITES = "writes into inputs.{0}; make a new tensor, as torch.where does, or write into inputs.{0}.clone()"


class OwnCodeError(RuntimeError):
    """A user's estimator or loss failed in a step; the message names its file, function and line."""


def _run(function: Callable[[Any], Any], inputs: Any, name: str) -> Any:
    """Call a user's function. Raises OwnCodeError if it fails or writes into its inputs."""
    versions = {field: tensor._version for field, tensor in _tensors(inputs).items()}
    try:
        found = function(inputs)
    except Exception as error:
        file = name.rpartition(":")[0]
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if Path(frame.filename).name == Path(file).name]
        where = f" in line {own[-1].lineno} ({own[-1].line})" if own else ""
        raise OwnCodeError(f"{name} fails{where}: {type(error).__name__}: {error}") from error
    for field, tensor in _tensors(inputs).items():
        if tensor._version != versions[field]:
            raise OwnCodeError(f"{name} {WRITES.format(field)}")
    return found


def _tensors(inputs: Any) -> dict[str, Tensor]:
    found = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def _is_table(found: Any, mask: Tensor) -> bool:
    return isinstance(found, Tensor) and found.shape == mask.shape and found.is_floating_point()


@dataclass(frozen=True)
class OwnEstimator(Estimator):
    """A function from `AdvantageInputs` to advantages [N, R]. Without `needs` it gets the old log-probs."""

    needs = ("old_logprobs",)

    function: Callable[[AdvantageInputs], Tensor]

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        found = _run(self.function, inputs, type(self).__name__)
        if not _is_table(found, inputs.mask):
            raise OwnCodeError(f"{type(self).__name__} gave {_kind(found)}, not advantages {list(inputs.mask.shape)}")
        return found


@dataclass(frozen=True)
class OwnLoss(PolicyLoss):
    """A function from `LossInputs` to losses [B, R] and metrics by name [B, R]."""

    function: Callable[[LossInputs], tuple[Tensor, dict[str, Tensor]]]

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        found = _run(self.function, inputs, type(self).__name__)
        whole = isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], dict)
        if not whole or not _is_table(found[0], inputs.loss_mask):
            shape = list(inputs.loss_mask.shape)
            raise OwnCodeError(f"{type(self).__name__} gave {_kind(found)}, not losses {shape} and metrics by name")
        return found


def as_estimator(mine: Any, name: str = "the estimator") -> Estimator:
    """Wrap a function or class. Raises ValueError on an unknown need."""
    return _as(OwnEstimator, mine, name)


def as_loss(mine: Any, name: str = "the loss") -> PolicyLoss:
    """Wrap a function or class. Raises ValueError on an unknown need."""
    return _as(OwnLoss, mine, name)


def _as(own: type[T], mine: Any, name: str) -> T:
    declared = {word: getattr(mine, word) for word in DECLARED if hasattr(mine, word)}
    if "needs" in declared:
        declared["needs"] = read_needs(declared["needs"], name)
    try:
        function = mine() if isinstance(mine, type) else mine
    except Exception as error:
        raise ValueError(f"{name} is a class and cannot be made without arguments: {error}") from error
    entry: T = type(name, (own,), declared)(function)
    return entry


# --- what a user's code must be, tried out on a made-up batch ---------------------------------------------------------

LENGTHS = (3, 1, 2, 3)  # trained tokens of the answers: two to one prompt, then two to another that earned the same
REWARDS = (1.0, 0.0, 0.5, 0.5)


def try_own_estimator(mine: Any, name: str) -> None:
    """Call a user's estimator on a made-up batch of two groups, one of equal rewards.

    It must return a floating-point tensor [N, R], finite on trained tokens. An estimator that needs `parts` is not
    tried, because only the user knows their names.

    Raises:
        ValueError: it fails or returns something else.
    """
    estimator = as_estimator(mine, name)
    if "parts" in estimator.needs:
        return
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    rewards = torch.zeros(mask.shape, dtype=torch.float64)
    rewards[torch.arange(len(LENGTHS)), torch.tensor(LENGTHS) - 1] = torch.tensor(REWARDS, dtype=torch.float64)
    drawn = torch.where(mask, 0.5, 0.0).double()
    inputs = AdvantageInputs(
        rewards,
        torch.tensor([0, 0, 1, 1]),
        mask,
        values=drawn if "values" in estimator.needs else None,
        baselines=torch.full((len(LENGTHS),), 0.25, dtype=torch.float64) if "baselines" in estimator.needs else None,
        old_logprobs=-drawn if "old_logprobs" in estimator.needs else None,
        squared_probs=drawn if "squared_probs" in estimator.needs else None,
        rollout_logprobs=-drawn if "rollout_logprobs" in estimator.needs else None,
        ref_logprobs=-drawn if "ref_logprobs" in estimator.needs else None,
        full_kl=drawn if "full_kl" in estimator.needs else None,
        turns=torch.where(mask, torch.arange(max(LENGTHS)) // 2, -1) if "turns" in estimator.needs else None,
        states=torch.zeros(mask.shape, dtype=torch.int64) if "states" in estimator.needs else None,
    )
    found = _called(estimator, inputs, name)
    wanted = f"an estimator takes AdvantageInputs and returns a tensor of advantages [N, R], here {list(mask.shape)}"
    _check_tensor(found, mask, f"{name} gave", wanted)
    row = next((i for i, good in enumerate((found.isfinite() | ~mask).all(-1).tolist()) if not good), None)
    if row is not None:
        alike = "whose answers all earned the same" if row > 1 else "whose answers earned 1 and 0"
        raise ValueError(
            f"{name} gave an advantage of {found[row][mask[row]].tolist()} to a made-up answer of a group {alike}; "
            "advantages must be finite, so give 0 where there is nothing to divide by"
        )


def try_own_loss(mine: Any, name: str) -> None:
    """Call a user's policy loss on a made-up micro-batch of two answers with advantages 1 and -1.

    It must return losses [B, R] with a finite gradient in the log-probs, and metrics by name, each [B, R].

    Raises:
        ValueError: it fails or returns something else.
    """
    loss = as_loss(mine, name)
    AGGREGATIONS.get(loss.aggregation)
    mask = torch.tensor([[True, True, True], [True, False, False]])
    old = torch.where(mask, -0.5, 0.0)
    inputs = LossInputs(
        logprobs=(old + torch.where(mask, 0.1, 0.0)).requires_grad_().clone(),  # no leaf, as in a step
        loss_mask=mask,
        advantages=torch.where(mask, torch.tensor([[1.0], [-1.0]]), 0.0),
        old_logprobs=old,
        totals=Totals(4, 2, 3),
        ref_logprobs=old,
        entropy=torch.where(mask, 0.7, 0.0),
        full_kl=torch.where(mask, 0.1, 0.0) if "full_kl" in loss.needs else None,
        rollout_logprobs=old if "rollout_logprobs" in loss.needs else None,
        selected=torch.zeros_like(mask),
    )
    wanted = f"a loss takes LossInputs and returns a pair: losses [B, R], here {list(mask.shape)}, and metrics by name"
    found = _called(loss, inputs, name)
    if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[1], dict):
        raise ValueError(f"{name} gave {_kind(found)}; {wanted}")
    losses, metrics = found
    _check_tensor(losses, mask, f"{name} gave losses that are", wanted)
    for metric, values in metrics.items():
        if not isinstance(values, Tensor) or values.shape != mask.shape:
            raise ValueError(f"{name} gave a metric {metric!r} that is {_kind(values)}; {wanted}, each [B, R] too")
    if not losses.requires_grad:
        raise ValueError(f"{name} gave losses without a gradient; compute them from inputs.logprobs, not detached")
    gradient = torch.autograd.grad(torch.where(mask, losses, 0.0).sum(), inputs.logprobs)[0]
    if not bool((gradient[mask].isfinite() & losses[mask].isfinite()).all()):
        raise ValueError(
            f"{name} gave losses {losses[mask].tolist()} with the gradient {gradient[mask].tolist()} on a made-up "
            "batch; both must be finite"
        )


def _called(entry: Any, inputs: Any, name: str) -> Any:
    before = {field: (tensor._version, tensor.detach().clone()) for field, tensor in _tensors(inputs).items()}
    try:
        found = entry.function(inputs)
    except Exception as error:
        raise ValueError(
            f"{name} fails on a made-up batch: {type(error).__name__}: {error}; what it looks at beyond rewards must "
            "stand in its `needs`"
        ) from error
    for field, tensor in _tensors(inputs).items():
        version, values = before[field]
        if tensor._version != version or not torch.equal(tensor, values):  # `.data` has a version of its own
            raise ValueError(f"{name} {WRITES.format(field)}")
    return found


def _check_tensor(found: Any, mask: Tensor, gave: str, wanted: str) -> None:
    if not _is_table(found, mask):
        raise ValueError(f"{gave} {_kind(found)}; {wanted}")


def _kind(found: Any) -> str:
    if isinstance(found, Tensor):
        return f"a tensor {list(found.shape)} of {str(found.dtype).removeprefix('torch.')}"
    return f"{type(found).__name__} {found!r:.60}"
