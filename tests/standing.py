"""Steps with many settings of the algorithm on the answers that one run has sampled, with its learner as it began."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from endtoend import QUICKSTART, R1, SMALL

from r1_cli.build.algorithm import build_start, build_update, try_algorithm
from r1_cli.config import load_config
from r1_cli.runs.track.timing import Stopwatch
from r1_cli.train import loop
from r1_cli.train.types import Collected, Position, weights_of
from r1_rollout.weights import WeightSource

STEP = [*SMALL, "trainer.max_steps=1", "trainer.val_before_train=false", "trainer.val_freq=-1", "trainer.save_freq=-1"]
BEGUN = [*STEP, "algorithm.disable_kl=false", "worker.actor.optim.lr_warmup_steps=0"]
BEGUN += ["worker.actor.optim.lr_scheduler_type=constant"]

# All 16 answers of a step differ in reward, so that what an estimator makes of them does not hang on the draw.
DISTINCT = """
def compute_score(reward_inputs):
    graded = [(7 * place % 16 / 15, place % 2) for place in range(len(reward_inputs))]
    return [{"overall": value, "graded": value, "even": even} for value, even in graded]
"""


@dataclass(frozen=True)
class Given:
    """The engine of a run and the collector of its groups, all of which have been sampled."""

    collected: Collected

    def active(self, source: WeightSource) -> AbstractContextManager[None]:
        return nullcontext()

    def collect(self, at: Position, watch: Stopwatch) -> Collected:
        return self.collected

    def rows_of(self, at: Position) -> list[int]:
        return [group.row for group in self.collected.groups]


@dataclass(frozen=True)
class Standing:
    """A run that has sampled its first step and not learned from it."""

    run: loop.Run
    checkpoint: Path
    words: tuple[str, ...]  # its settings beside `BEGUN`

    def steps(self, count: int, *overrides: str) -> list[dict[str, Any]]:
        """Take the steps, on the same answers, that a run with other settings of its algorithm would take."""
        config, _ = load_config([QUICKSTART, *BEGUN, *self.words, *overrides])
        try_algorithm(config)
        self.run.learner.load(self.checkpoint)
        actor = config.worker.actor
        sizes = {"ppo_epochs": actor.ppo_epochs, "global_batch_size": actor.global_batch_size}
        schedule = replace(self.run.schedule, **sizes)
        update = build_update(config, updates_per_step=schedule.updates_per_step)
        run, at, records = replace(self.run, update=update, schedule=schedule), build_start(config), []
        for _ in range(count):
            taken = loop.take_step(run, at)
            at = taken.at
            records.append(taken.metrics)
        return records

    def step(self, *overrides: str) -> dict[str, Any]:
        return self.steps(1, *overrides)[0]


def stand(r1: R1, folder: Path, *words: str) -> Standing:
    """Begin a run with these settings, sample its first step and stop."""
    found = list[Standing]()

    def sample(run: loop.Run, at: Position) -> Position:
        run.learner.save(folder / "begin")
        with run.engine.active(weights_of(run.learner, at.step)):
            given = Given(run.collector.collect(at, Stopwatch()))
        found.append(Standing(replace(run, engine=given, collector=given), folder / "begin", words))
        return at

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train", sample)
        reward = folder / "reward.py"
        reward.write_text(DISTINCT)
        given = f"trainer.save_checkpoint_path={folder}", f"worker.reward.reward_function={reward}:compute_score"
        r1("train", QUICKSTART, *BEGUN, *given, *words)
    return found[0]
