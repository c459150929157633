"""Types of the training loop: models, data, schedule, position."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, runtime_checkable

import torch
from torch import Tensor

from r1_cli.train.groups.advantages import AdvantageComputer
from r1_cli.train.groups.group import Group
from r1_cli.train.groups.stream_position import StreamPosition, resume_stream_position
from r1_core.filtering import GroupFilter
from r1_core.kl_control import KLController
from r1_core.learner.batching import Layout, MicroLimit
from r1_core.learner.profiling import PassProfile, merge_profiles
from r1_core.learner.trainable import LearnerInfo
from r1_core.needs import Needs
from r1_core.objective import Objective
from r1_core.reward_shaping import RewardNormalizer
from r1_core.types import Sample
from r1_data.types import Prompt
from r1_rewards.types import Verifier
from r1_rollout.types import Generator, Groups, SamplingParams
from r1_rollout.weights import LocalWeights, WeightSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Item = TypeVar("Item")
Rendered = TypeVar("Rendered", covariant=True)


Samples: TypeAlias = Sequence[Sample]
Method = TypeVar("Method", bound=Callable[..., Any])
# What a model's own code may raise at a micro-batch that it was not written for: the same on all ranks, so none waits.
REFUSALS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)


class Progress(Protocol):
    def __call__(self, items: Iterable[Item], what: str, total: int) -> Iterator[Item]:
        """Yield `items` under a progress bar."""


class RenderedRows(Protocol[Rendered]):
    """Rows of data by index, rendered when asked for."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Rendered: ...
    def prefetch(self, indices: Sequence[int], /) -> None:
        """Begin to render these rows."""


Dataset: TypeAlias = RenderedRows[Prompt]


class PromptStream(Protocol):
    """The order of prompts: a pure function of the batch number, so that resuming needs no iterator state."""

    def batch(self, index: int) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Sampler:
    generator: Generator
    verifier: Verifier
    tokenizer: "PreTrainedTokenizerBase"
    per_sample: Callable[[str], bool]  # whether a source's responses may be scored one by one; see `OpenVerifier`
    skip_special_tokens: bool = True
    # (source, ground truth, columns) -> why no response can be correct; None if one can
    truth_problem: Callable[[str, str, Mapping[str, Any]], str | None] = lambda source, ground_truth, columns: None
    failures_shown: set[str] = field(default_factory=set)  # causes that were logged
    # (engine, prompts, params) -> groups: plays episodes of several turns; None: single responses
    play: Callable[[Generator, Sequence[Prompt], SamplingParams], Groups] | None = None
    # metrics of the engine while episodes were played, since the last call
    engine_use: Callable[[], Mapping[str, float]] = dict

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams) -> Groups:
        if self.play is not None:
            return self.play(self.generator, prompts, params)
        return self.generator.generate(prompts, params)


@dataclass(frozen=True, slots=True)
class Schedule:
    """When a run validates, saves and ends, in steps, and the prompts of a step."""

    total_steps: int
    rollout_batch_size: int  # prompts per step
    global_batch_size: int  # prompts per optimizer step
    ppo_epochs: int
    max_idle_steps: int  # in a row without signal, after which a run ends; below 1: no limit
    train_generations_to_log: int  # prompts of a step whose responses are logged
    val_freq: int
    val_before_train: bool
    save_freq: int
    save_model_only: bool
    critic_global_batch_size: int = 1  # prompts per optimizer step of the critic
    critic_ppo_epochs: int = 1
    critic_warmup: int = 0  # first steps, which train the critic only
    until: int | None = None  # the last step of this start, if not of the run
    max_skipped_steps: int = -1  # in a row without a finite loss or gradient; below 1: no limit

    @property
    def last_step(self) -> int:
        """The step to end after. Learning rates follow `total_steps`."""
        return self.total_steps if self.until is None else min(self.until, self.total_steps)

    @property
    def updates_per_step(self) -> int:
        return -(-self.rollout_batch_size // self.global_batch_size) * self.ppo_epochs

    @property
    def critic_updates_per_step(self) -> int:
        return -(-self.rollout_batch_size // self.critic_global_batch_size) * self.critic_ppo_epochs

    def validates(self, step: int) -> bool:
        return self.val_freq > 0 and (step % self.val_freq == 0 or step == self.total_steps)

    def saves(self, step: int) -> bool:
        return self.save_freq > 0 and (step % self.save_freq == 0 or step == self.total_steps)


@dataclass(frozen=True, slots=True)
class Position:
    """The progress of a run, and everything it has learned besides the weights."""

    step: int  # steps taken; the version of the weights
    stream: StreamPosition
    kl: KLController
    filter: GroupFilter
    normalizer: RewardNormalizer  # of rewards
    idle: int = 0  # latest steps in a row without signal
    failed: int = 0  # latest steps in a row in which all rewards failed
    skipped: int = 0  # latest steps in a row with an update that was skipped
    micro_batches: Mapping[str, int] = field(default_factory=dict)  # by key, the sizes that profiling chose

    def state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            **self.stream.state(),
            "kl_coef": self.kl.coef,
            "filter": self.filter.state(),
            "rewards": asdict(self.normalizer),
            "idle": self.idle,
            "failed": self.failed,
            "skipped": self.skipped,
            "micro_batches": dict(self.micro_batches),
        }

    def resume(self, state: Mapping[str, Any]) -> "Position":
        return Position(
            step=state["step"],
            stream=resume_stream_position(state),
            kl=self.kl.resume(state["kl_coef"]),
            filter=self.filter.resume(state.get("filter", {})),
            normalizer=RewardNormalizer(**state.get("rewards", {})),
            idle=state.get("idle", 0),
            failed=state.get("failed", 0),
            skipped=state.get("skipped", 0),
            micro_batches=state.get("micro_batches", {}),
        )


# The groups that a step trains on, the position after they were sampled (the step is not taken yet), and metrics.
Collected = tuple[list[Group], Position, dict[str, float]]


@dataclass(frozen=True, slots=True)
class Update:
    compute_advantages: AdvantageComputer
    objective: Objective
    needs: frozenset[str]  # fields known before the update, in words of `r1_core.needs`

    @property
    def kl_penalty(self) -> str | None:
        return self.objective.kl_penalty or self.compute_advantages.kl_penalty


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
    """A model that is trained: the policy or the critic, in this process (`r1_core.learner`) or on ranks.

    `r1_core.learner` documents the methods. All ranks call each method with the same arguments, `samples` are sent once
    and then only their changed fields, and rank 0's result is returned. `collective` declares exceptions.
    """

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

    @collective(catches=REFUSALS)
    def count_features(self, samples: Samples) -> list[int | None]: ...

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


class Teacher(Protocol):
    """The model that a run distils from."""

    @property
    def in_loss(self) -> bool:
        """Whether the objective compares it with the policy, so that a step without advantages has a signal."""

    def teach(self, samples: Samples, groups: Sequence[Group]) -> list[Sample]:
        """Add the teacher's term to the advantages. Raises RewardFailure if too many tokens have no log-prob."""

    def metrics(self, samples: Samples, updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Return `distillation/…`; `updates` are the metrics of the step's optimizer steps."""


@runtime_checkable
class Remote(Protocol):
    def source(self, version: int) -> WeightSource:
        """Return the weights of this version, without moving them."""


def weights_of(learner: Policy, version: int) -> WeightSource:
    """Return the source of the learner's weights for an engine; once they are loaded, the learner is offloaded."""
    if isinstance(learner, Remote):
        return learner.source(version)
    return LocalWeights(learner.weights, version, taken=learner.offload)
