"""The parts of a run as the loop sees them: protocols and settings, so that ranks and actors fit behind them later."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from r1_cli.runs.track.stopwatch import Stopwatch
from r1_cli.train.groups.estimate import Estimate
from r1_cli.train.groups.group import Decoder, Group
from r1_cli.train.groups.supply import Supply, resume_supply
from r1_core.filtering import GroupFilter
from r1_core.kl_control import KLController
from r1_core.learner.batching import Layout, MicroLimit
from r1_core.learner.profiling import PassProfile
from r1_core.learner.trainable import LearnerInfo
from r1_core.needs import Needs
from r1_core.objective import Objective
from r1_core.reward_normalization import RewardNormalizer
from r1_core.types import Sample
from r1_data.types import Prompt
from r1_rewards.types import Verifier
from r1_rollout.handover import LocalWeights, WeightSource
from r1_rollout.types import Generator

Item = TypeVar("Item")

# What a model's own code may raise at a micro-batch that it was not written for: the same on all ranks, so none waits.
REFUSALS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)


class Snapshot(Protocol):
    """A learner or a critic as it was at one moment."""

    def write(self, folder: Path) -> None:
        """Write what `save` would have written then; from any thread, whatever the learner does meanwhile."""


class Learner(Protocol):
    """The policy that is being trained; one process or many ranks."""

    def add_logprobs(self, samples: Sequence[Sample], needs: Needs) -> list[Sample]:
        """Add what `needs` asks for and a forward pass finds: of the policy before the step, and of the reference."""

    def compute_logprobs_together(self, samples: Sequence[Sample], *, padding_free: bool) -> list[list[float]]:
        """Return the policy's log-probs of each sample's trained tokens, all samples in one micro-batch.

        Packed, the micro-batch shares the prompts that samples tell of.
        """

    def compute_eager_logprobs(self, samples: Sequence[Sample], noise: torch.dtype | None = None) -> list[list[float]]:
        """Return what `compute_logprobs_together` should: by the policy's own eager forward of each sample alone.

        With `noise` every layer's output is disturbed by a unit in the last place of that precision.
        """

    def set_layout(self, layout: Layout, *, own_attention: bool = False) -> None:
        """Lay micro-batches out so, whatever the configuration says; see `r1_core.learner.passes`."""

    def set_micro_batch_limits(self, train: MicroLimit, inference: MicroLimit) -> None:
        """Hold so much in a micro-batch from now on, with a gradient and without."""

    def profile_pass(self, samples: Sequence[Sample], objective: Objective | None, limit: MicroLimit) -> PassProfile:
        """Compute the samples, with a gradient if there is an objective, and forget it; return what it took."""

    def forward_backward(self, samples: Sequence[Sample], objective: Objective) -> dict[str, float]:
        """Add the gradient of the samples, normalised over all of them; return the loss's metrics."""

    def forward_backward_on_policy(
        self, samples: Sequence[Sample], objective: Objective
    ) -> tuple[list[Sample], dict[str, float]]:
        """Do what `add_logprobs` and `forward_backward` do, in one forward pass; see `r1_core.learner`."""

    def optim_step(self) -> dict[str, float]:
        """Clip, update, forget the gradient; return grad_norm and lr."""

    def zero_weights(self, rows: Mapping[str, Sequence[int] | None]) -> None:
        """Set rows of the weights (None: all of a tensor) to zero until `restore_weights`."""

    def restore_weights(self) -> None:
        """Give the weights that `zero_weights` has set to zero their values back; without any, do nothing."""

    def describe(self) -> LearnerInfo:
        """Return what is asked about model and device, and the memory that was taken so far."""

    def offload(self) -> None:
        """Let all that is offloaded leave the device, until the verb that needs it."""

    def snapshot(self, *, model_only: bool = False, max_bytes: int | None = None) -> "Snapshot | None":
        """Copy what `save` would write, for a thread to write; None if a process would copy more than `max_bytes`."""

    def weights(self) -> Iterator[tuple[str, Tensor]]: ...
    def save(self, folder: Path, *, model_only: bool = False) -> None: ...
    def load(self, folder: Path, *, model_only: bool = False) -> None: ...


class Critic(Protocol):
    """What forecasts returns and learns to, beside the policy; on the learner's process or its ranks."""

    def add_values(self, samples: Sequence[Sample]) -> list[Sample]:
        """Add the forecast before each trained token."""

    def set_layout(self, layout: Layout, *, own_attention: bool = False) -> None:
        """Lay micro-batches out so, whatever the configuration says; see `r1_core.learner.passes`."""

    def set_micro_batch_limits(self, train: MicroLimit, inference: MicroLimit) -> None:
        """Hold so much in a micro-batch from now on, with a gradient and without."""

    def profile_pass(self, samples: Sequence[Sample], limit: MicroLimit, *, gradient: bool) -> PassProfile:
        """Compute the samples and forget it; return what it took."""

    def forward_backward(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Add the gradient of the samples, normalised over all of them; return the loss's metrics."""

    def optim_step(self) -> dict[str, float]:
        """Clip, update, forget the gradient; return grad_norm and lr."""

    def offload(self) -> None:
        """Let all that is offloaded leave the device, until the verb that needs it."""

    def snapshot(self, *, model_only: bool = False, max_bytes: int | None = None) -> "Snapshot | None":
        """Copy what `save` would write, as the learner does."""

    def save(self, folder: Path, *, model_only: bool = False) -> None: ...
    def load(self, folder: Path, *, model_only: bool = False) -> None: ...


@runtime_checkable
class Remote(Protocol):
    """A learner whose weights are in other processes."""

    def source(self, version: int) -> WeightSource:
        """Return them where they are, to be called by this version."""


def weights_of(learner: Learner, version: int) -> WeightSource:
    """Return what an engine takes up, wherever the learner's weights are; once it has them, the learner rests."""
    if isinstance(learner, Remote):
        return learner.source(version)
    return LocalWeights(learner.weights, version, taken=learner.offload)


class Progress(Protocol):
    """Shows how far a long piece of work is."""

    def __call__(self, items: Iterable[Item], what: str, total: int) -> Iterator[Item]:
        """Yield `items` unchanged."""


class Dataset(Protocol):
    """Prompts by index, rendered when asked for."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Prompt: ...
    def prefetch(self, indices: Sequence[int]) -> None:
        """Begin to render these, which will be asked for next."""


class Stream(Protocol):
    """Which prompts come when; a pure function of the batch's number, so that a resume needs no iterator."""

    def batch(self, index: int) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Scorer:
    """An engine, a verifier and the tokenizer between them: all that it takes to turn prompts into scored groups."""

    generator: Generator
    verifier: Verifier
    tokenizer: Decoder
    per_sample: Callable[[str], bool]  # whether a source's responses may be scored one by one: see `OpenVerifier`
    skip_special_tokens: bool = True
    # why no response to a prompt of a source, with this ground truth and these columns, can be right; None if one can
    truth_problem: Callable[[str, str, Mapping[str, Any]], str | None] = lambda source, ground_truth, columns: None
    failures_shown: set[str] = field(default_factory=set)  # causes of failed rewards that the user has seen


@dataclass(frozen=True, slots=True)
class Schedule:
    """When things happen, in steps; and how many prompts make one."""

    total_steps: int
    rollout_batch_size: int  # prompts per step
    global_batch_size: int  # prompts per optimizer step
    ppo_epochs: int
    max_idle_steps: int  # in a row, with nothing to learn from, after which a run ends; below 1: no limit
    train_generations_to_log: int  # prompts of a step whose responses are written down
    val_freq: int
    val_before_train: bool
    save_freq: int
    save_model_only: bool
    critic_global_batch_size: int = 1  # prompts per optimizer step of the critic, where there is one
    critic_ppo_epochs: int = 1
    critic_warmup: int = 0  # first steps, in which the critic alone learns
    until: int | None = None  # the last step that is taken now, where that is not the last of all

    @property
    def last_step(self) -> int:
        """The step to end after; rates of learning are those of `total_steps`."""
        return self.total_steps if self.until is None else min(self.until, self.total_steps)

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps in a step that is full."""
        return -(-self.rollout_batch_size // self.global_batch_size) * self.ppo_epochs

    @property
    def critic_updates_per_step(self) -> int:
        """The same of the critic."""
        return -(-self.rollout_batch_size // self.critic_global_batch_size) * self.critic_ppo_epochs

    def validates(self, step: int) -> bool:
        return self.val_freq > 0 and (step % self.val_freq == 0 or step == self.total_steps)

    def saves(self, step: int) -> bool:
        return self.save_freq > 0 and (step % self.save_freq == 0 or step == self.total_steps)


@dataclass(frozen=True, slots=True)
class Position:
    """How far a run is, with all that it has learned beside the weights."""

    step: int  # steps taken; the version of the weights
    supply: Supply
    kl: KLController
    filter: GroupFilter
    normalizer: RewardNormalizer  # of rewards
    idle: int = 0  # the latest steps, all in a row, that had nothing to learn from
    failed: int = 0  # the latest steps, all in a row, all of whose rewards failed
    micro_batches: Mapping[str, int] = field(default_factory=dict)  # by key, the sizes that a rehearsal has chosen

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold, as JSON can; the surplus has files of its own."""
        return {
            "step": self.step,
            **self.supply.state(),
            "kl_coef": self.kl.coef,
            "filter": self.filter.state(),
            "rewards": asdict(self.normalizer),
            "idle": self.idle,
            "failed": self.failed,
            "micro_batches": dict(self.micro_batches),
        }

    def resume(self, state: Mapping[str, Any]) -> "Position":
        """Return the position of a checkpoint's state, under this one's settings."""
        return Position(
            step=state["step"],
            supply=resume_supply(state),
            kl=self.kl.resume(state["kl_coef"]),
            filter=self.filter.resume(state.get("filter", {})),
            normalizer=RewardNormalizer(**state.get("rewards", {})),
            idle=state.get("idle", 0),
            failed=state.get("failed", 0),
            micro_batches=state.get("micro_batches", {}),
        )


# The groups that a step trains on, the position after they were sampled (the step is not taken yet), and metrics.
Collected = tuple[list[Group], Position, dict[str, float]]


class Collector(Protocol):
    """Gives a step its groups; now, or by then, as one that samples ahead of the learner would."""

    def collect(self, at: Position, watch: Stopwatch) -> Collected:
        """Return the scored groups of the step that begins at `at`; the engine is active."""


@dataclass(frozen=True, slots=True)
class Update:
    """How groups become a step of the policy: advantages, objective, and what the two ask for."""

    estimate: Estimate
    objective: Objective
    needs: frozenset[str]  # what must be known before the update: words of `r1_core.needs`

    @property
    def kl_penalty(self) -> str | None:
        """The estimate of the KL from the reference, in the loss or in the reward; None without one."""
        return self.objective.kl_penalty or self.estimate.kl_penalty
