"""The parts of a run as the loop sees them: protocols and settings, so that ranks and actors fit behind them later."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, TypeVar

from r1_cli.runs.track.stopwatch import Stopwatch
from r1_cli.train.groups.advantages import AdvantageComputer
from r1_cli.train.groups.group import Decoder, Group
from r1_cli.train.groups.stream_position import StreamPosition, resume_stream_position
from r1_core.filtering import GroupFilter
from r1_core.kl_control import KLController
from r1_core.objective import Objective
from r1_core.reward_normalization import RewardNormalizer
from r1_data.types import Prompt
from r1_rewards.types import Verifier
from r1_rollout.types import Generator

Item = TypeVar("Item")


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
class Sampler:
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
    stream: StreamPosition
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
            **self.stream.state(),
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
            stream=resume_stream_position(state),
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

    compute_advantages: AdvantageComputer
    objective: Objective
    needs: frozenset[str]  # what must be known before the update: words of `r1_core.needs`

    @property
    def kl_penalty(self) -> str | None:
        """The estimate of the KL from the reference, in the loss or in the reward; None without one."""
        return self.objective.kl_penalty or self.compute_advantages.kl_penalty
