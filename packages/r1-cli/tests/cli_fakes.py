"""A run without models: an engine that counts tokens instead of computing them, and what `collect` needs around it."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from r1_cli.train.groups.advantages import Shaping
from r1_cli.train.groups.stream_position import StreamPosition
from r1_cli.train.sampling.collect import DynamicSampling
from r1_cli.train.types import Position, Sampler
from r1_core.filtering import GroupFilter, NonzeroVariance
from r1_core.kl_control import FixedKL
from r1_core.reward_shaping import RewardNormalizer
from r1_data.stream import Stream
from r1_data.types import Prompt
from r1_rewards.types import RewardInput, Score
from r1_rollout.types import Completion, SamplingParams
from r1_rollout.weights import WeightSource

Item = TypeVar("Item")
SHORT, LONG = 3, 60


def prompt(row: int) -> Prompt:
    return Prompt(
        id=f"file:{row}", text="?", token_ids=[1, row], engine_token_ids=[1, row],
        position_ids=torch.arange(2)[None], ground_truth="1",
    )  # fmt: skip


class Prompts:
    """A dataset of any length; remembers which rows were asked for."""

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, row: int) -> Prompt:
        return prompt(row)

    def prefetch(self, rows: Sequence[int]) -> None:
        pass


class Engine:
    """Samples `room` groups at a time, in the order of the prompts; a group takes as long as its answers.

    By (seed, prompt) alone, half of the groups are long, and a share of `rate` has a right and a wrong answer: for 32
    prompts `swing` less than that, for the next 32 more.
    """

    def __init__(self, room: int, rate: float, swing: float = 0.0) -> None:
        self.room, self.rate, self.swing, self.version = room, rate, swing, 0
        self.begun: list[str] = []
        self.finished: list[int] = []  # lengths of the groups, as they finished
        self.tokens = 0
        self._waiting: list[int] = []

    def generate(self, prompts: Sequence[Any], params: SamplingParams) -> Iterator[tuple[int, list[Completion]]]:
        self._waiting = list(range(len(prompts)))
        running: dict[int, list[Completion]] = {}
        clock, ends = 0, dict[int, int]()
        while self._waiting or running:
            while self._waiting and len(running) < self.room:
                index = self._waiting.pop(0)
                self.begun.append(prompts[index].id)
                running[index] = self._answers(prompts[index], params)
                ends[index] = clock + len(running[index][0].token_ids)
            index = min(running, key=lambda i: ends[i])
            clock, answers = ends[index], running.pop(index)
            self.finished.append(len(answers[0].token_ids))
            self.tokens += sum(len(answer.token_ids) for answer in answers)
            yield index, answers

    @contextmanager
    def active(self, source: WeightSource) -> Iterator[None]:
        self.version = source.version
        yield

    def _answers(self, asked: Any, params: SamplingParams) -> list[Completion]:
        noise = random.Random(f"{params.seed}:{asked.id}")
        rate = self.rate + self.swing * (1 if int(asked.id.partition(":")[2]) // 32 % 2 else -1)
        length, mixed = noise.choice([SHORT, LONG]), noise.random() < rate
        right = [mixed and sample == 0 for sample in range(params.n)]
        return [Completion([int(r)] * length, [-0.25 * r] * length, "stop", self.version) for r in right]


class DrainableEngine(Engine):
    kept_out = 0  # prompts that were not begun

    def drain(self) -> None:
        self.kept_out += len(self._waiting)
        self._waiting.clear()


class Digits:
    """Decodes an answer to its first token."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return str(token_ids[0])


@dataclass
class Equality:
    """One point for the ground truth; remembers its calls."""

    before: Callable[[Sequence[RewardInput]], None] = lambda inputs: None
    calls: list[list[RewardInput]] = field(default_factory=list)

    def __call__(self, inputs: Sequence[RewardInput]) -> list[Score]:
        self.calls.append(list(inputs))
        self.before(inputs)
        values = [float(item.response == item.ground_truth) for item in inputs]
        return [Score(value, {"overall": value}) for value in values]


def silent(items: Iterable[Item], what: str, total: int) -> Iterator[Item]:
    yield from items


def sampler(engine: Any, verifier: Any = None, per_sample: bool = True) -> Sampler:
    return Sampler(engine, verifier or Equality(), Digits(), lambda source: per_sample)


def collector(
    engine: Any, *, wanted: int = 16, batch: int | None = None, tries: int = -1, max_age: int = 1, n: int = 2,
    rows: int = 10_000, verifier: Any = None, per_sample: bool = True, dataset: Any = None,
    rates: Sequence[float] | None = None,
) -> DynamicSampling:  # fmt: skip
    return DynamicSampling(
        sampler=sampler(engine, verifier, per_sample),
        dataset=dataset or Prompts(),
        stream=Stream(rows, batch or wanted, seed=1, shuffle=False),
        sampling=SamplingParams(max_tokens=LONG, n=n, seed=1),
        baselines=False,
        shaping=Shaping(),
        filter_key="overall",
        groups=wanted,
        max_batches=tries,
        surplus_max_age=max_age,
        max_prompt_length=64,
        progress=silent,
        rates=rates,
    )


def start(group_filter: GroupFilter | None = None) -> Position:
    return Position(0, StreamPosition(), FixedKL(0.0), group_filter or NonzeroVariance(), RewardNormalizer())
