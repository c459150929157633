"""The models of a run as the loop calls them: in this process (`r1_core.learner`), or on ranks (`r1_cli.cluster`).

All ranks call each method with the same arguments, `samples` are sent once and then only their changed fields, and rank
0's result is returned. `collective` declares exceptions.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

import torch
from torch import Tensor

from r1_core.learner.batching import Layout, MicroLimit
from r1_core.learner.profiling import PassProfile, merge_profiles
from r1_core.learner.trainable import LearnerInfo
from r1_core.needs import Needs
from r1_core.objective import Objective
from r1_core.types import Sample
from r1_rollout.weight_source import LocalWeights, WeightSource

Samples: TypeAlias = Sequence[Sample]
Method = TypeVar("Method", bound=Callable[..., Any])

# What a model's own code may raise at a micro-batch that it was not written for: the same on all ranks, so none waits.
REFUSALS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)


@dataclass(frozen=True, slots=True)
class Collective:
    """How ranks run a method together."""

    reduce: Callable[[list[Any]], Any] | None = None  # merges the results of all ranks; None: rank 0's result
    catches: tuple[type[Exception], ...] = ()  # errors after which the ranks go on
    trains: bool = False  # its tokens count in the balance of the ranks


def collective(
    reduce: Callable[[list[Any]], Any] | None = None, catches: tuple[type[Exception], ...] = (), trains: bool = False
) -> Callable[[Method], Method]:
    """Declare how ranks run the method below."""

    def declare(method: Method) -> Method:
        DECLARED[method] = Collective(reduce, catches, trains)
        return method

    return declare


DECLARED: dict[Callable[..., Any], Collective] = {}


def merge_info(info: list[LearnerInfo]) -> LearnerInfo:
    """Merge all ranks' info: the memory is the maximum."""
    return replace(
        info[0],
        devices=len(info),
        peak_allocated=max((one.peak_allocated for one in info if one.peak_allocated is not None), default=None),
        peak_reserved=max((one.peak_reserved for one in info if one.peak_reserved is not None), default=None),
    )


class ModelSnapshot(Protocol):
    """A learner or a critic as it was at one moment."""

    def write(self, folder: Path) -> None:
        """Write what `save` would have written then, from any thread, while the learner continues."""


class Trainable(Protocol):
    """A model that is trained: the policy or the critic. `r1_core.learner` documents the methods."""

    def set_layout(self, layout: Layout, *, own_attention: bool = False) -> None: ...
    def set_micro_batch_limits(self, train: MicroLimit, inference: MicroLimit) -> None: ...
    def optim_step(self) -> dict[str, float]: ...
    def offload(self) -> None: ...
    def save(self, folder: Path, *, model_only: bool = False) -> None: ...
    def load(self, folder: Path, *, model_only: bool = False) -> None: ...

    def snapshot(self, *, model_only: bool = False, max_bytes: int | None = None) -> ModelSnapshot | None:
        """Copy what `save` would write, for a thread to write. None if a machine would need more than `max_bytes`."""


class Policy(Trainable, Protocol):
    """The model that samples and is trained by an objective, perhaps with a reference model."""

    def add_logprobs(self, samples: Samples, needs: Needs) -> list[Sample]: ...

    @collective(catches=REFUSALS)
    def compute_logprobs_together(self, samples: Samples, *, padding_free: bool) -> list[list[float]]: ...

    @collective(catches=REFUSALS)
    def compute_eager_logprobs(self, samples: Samples, noise: torch.dtype | None = None) -> list[list[float]]: ...

    @collective(reduce=merge_profiles)
    def profile_pass(self, samples: Samples, objective: Objective | None, limit: MicroLimit) -> PassProfile: ...

    @collective(trains=True)
    def forward_backward(self, samples: Samples, objective: Objective) -> dict[str, float]: ...

    @collective(trains=True)
    def forward_backward_on_policy(
        self, samples: Samples, objective: Objective
    ) -> tuple[list[Sample], dict[str, float]]: ...

    def zero_weights(self, rows: Mapping[str, Sequence[int] | None]) -> None: ...
    def restore_weights(self) -> None: ...

    @collective(reduce=merge_info)
    def describe(self) -> LearnerInfo: ...

    def weights(self) -> Iterator[tuple[str, Tensor]]: ...


class ValueModel(Trainable, Protocol):
    """The critic: forecasts the return before each token."""

    def add_values(self, samples: Samples) -> list[Sample]: ...
    def forward_backward(self, samples: Samples) -> dict[str, float]: ...

    @collective(reduce=merge_profiles)
    def profile_pass(self, samples: Samples, limit: MicroLimit, *, gradient: bool) -> PassProfile: ...


@runtime_checkable
class Remote(Protocol):
    def source(self, version: int) -> WeightSource:
        """Return the weights of this version, without moving them."""


def weights_of(learner: Policy, version: int) -> WeightSource:
    """Return the source of the learner's weights for an engine; once they are loaded, the learner is offloaded."""
    if isinstance(learner, Remote):
        return learner.source(version)
    return LocalWeights(learner.weights, version, taken=learner.offload)
