"""A run says when there is nothing to learn from, ends where that goes on, and writes down what the model says."""

import json
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_fakes import Engine, Equality, collector, start
from faults_table import note_fault

from r1_cli.checkpoint import memory
from r1_cli.checkpoint.folders import CheckpointError, CheckpointStore
from r1_cli.checkpoint.saving import Saver
from r1_cli.checkpoint.stop import StopRequest
from r1_cli.runs.reader import SAMPLES, RunReader, sample_file
from r1_cli.runs.track import RunInfo, Tracker
from r1_cli.train import loop
from r1_cli.train.groups.advantages import AdvantageComputer, AdvantageError
from r1_cli.train.metrics.step import NothingToLearn, divergence
from r1_cli.train.recorder import Recorder
from r1_cli.train.types import Schedule, Update
from r1_core.advantages import GAE, GRPO
from r1_core.filtering import KeepAll
from r1_core.learner.trainable import LearnerInfo
from r1_core.objective import Objective
from r1_core.own import OwnCodeError
from r1_core.types import Sample, tokens
from r1_rewards.types import Failure, RewardFailure, RewardInput, Score


class Snapshot:
    """Of no weights."""

    def write(self, folder: Path) -> None:
        folder.mkdir()


@dataclass
class Learner:
    """A policy of no weights; remembers how many optimizer steps it took."""

    steps: int = field(default=0)

    def add_logprobs(self, samples: Sequence[Sample], needs: Any) -> list[Sample]:
        return list(samples)

    def forward_backward(self, samples: Sequence[Sample], objective: Objective) -> dict[str, float]:
        return {}

    def forward_backward_on_policy(
        self, samples: Sequence[Sample], objective: Objective
    ) -> tuple[list[Sample], dict[str, float]]:
        return [replace(sample, old_logprobs=sample.rollout_logprobs) for sample in samples], {}

    def optim_step(self) -> dict[str, float]:
        self.steps += 1
        return {"grad_norm": 0.0}

    def describe(self) -> LearnerInfo:
        return LearnerInfo(1, 6.0, "cpu", None, None)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from ()

    def snapshot(self, *, model_only: bool = False, max_bytes: int | None = None) -> Snapshot:
        return Snapshot()

    def save(self, folder: Path, *, model_only: bool = False) -> None: ...
    def load(self, folder: Path, *, model_only: bool = False) -> None: ...
    def zero_weights(self, rows: Mapping[str, Sequence[int] | None]) -> None: ...
    def restore_weights(self) -> None: ...
    def offload(self) -> None: ...


class Console:
    def show_processes(self, line: str) -> None: ...

    def log(self, step: int, record: dict[str, float]) -> None: ...
    def log_generations(self, step: int, rows: list[dict[str, Any]]) -> None: ...
    def close(self) -> None: ...
    def stage(self, name: str) -> None: ...
    def show(self, generations: Any) -> None: ...


class Failing(Equality):
    """Scores the first `sound` calls, and fails on all responses after that."""

    sound = 0

    def __call__(self, inputs: Sequence[RewardInput]) -> list[Score]:
        scores = super().__call__(inputs)
        if len(self.calls) <= self.sound:
            return scores
        return [Score(0.0, {}, Failure("exception", "KeyError: 'x'")) for _ in inputs]


def run(folder: Path, *, rate: float = 1.0, verifier: Any = None, limit: int = 3, steps: int = 6) -> loop.Run:
    engine = Engine(room=8, rate=rate)
    schedule = Schedule(
        total_steps=steps, rollout_batch_size=4, global_batch_size=4, ppo_epochs=1, max_idle_steps=limit,
        train_generations_to_log=1, val_freq=-1, val_before_train=False, save_freq=-1, save_model_only=False,
    )  # fmt: skip
    return loop.Run(
        learner=Learner(),
        engine=engine,
        collector=collector(engine, wanted=4, verifier=verifier, per_sample=False),
        update=Update(AdvantageComputer(GRPO()), Objective(), frozenset()),
        schedule=schedule,
        validation=None,
        store=(store := CheckpointStore(folder)),
        saver=Saver(store),
        tracker=Tracker([], RunInfo("project", "name", folder, {}, resumed_from=0), Console()),
        recorder=Recorder(folder, most=10**9),
        stop=StopRequest(),
        assets=dict,
    )


def records(folder: Path, name: str = "experiment_log.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_a_run_whose_rewards_all_fail_says_so_at_once_and_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    of = run(tmp_path, verifier=Failing())
    with caplog.at_level(logging.WARNING, logger="r1"), pytest.raises(NothingToLearn, match="3 steps in a row"):
        loop.train(of, start(KeepAll()))
    assert "1 step(s) in a row: the reward failed on all 8 responses, on the first by exception: KeyErr" in caplog.text
    assert [record["reward/failures"] for record in records(tmp_path)] == [8, 8, 8]
    assert of.store.steps() == [3], "what was there when the run ended must go on from there"
    # The same command, typed again, counts on; a limit of -1 goes on to the end.
    state = json.loads((of.store.path(3) / "trainer.json").read_text())
    assert (start(KeepAll()).resume(state).idle, start(KeepAll()).resume(state).failed) == (3, 3)
    assert loop.train(run(tmp_path / "other", verifier=Failing(), limit=-1), start(KeepAll())).step == 6
    note_fault("a reward that fails for all responses", outcome="ends")


def test_a_run_of_failed_rewards_fails_also_if_it_is_shorter_than_the_limit_and_says_why_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    of = run(tmp_path, verifier=Failing(), limit=10, steps=2)
    with caplog.at_level(logging.WARNING, logger="r1"), pytest.raises(NothingToLearn) as failure:
        loop.train(of, start(KeepAll()))
    assert "no step learned anything: the reward failed on every response of all 2 steps" in str(failure.value)
    assert str(failure.value) not in caplog.text, "the command prints it"
    assert "stopping after step 2, which is saved in" in caplog.text
    sound = Failing()
    sound.sound = 1
    assert loop.train(run(tmp_path / "one", verifier=sound, limit=10, steps=2), start(KeepAll())).failed == 1
    assert loop.train(run(tmp_path / "equal", rate=0.0, limit=10, steps=2), start(KeepAll())).idle == 2


def test_rewards_that_never_differ_end_a_run_and_one_such_step_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="r1"), pytest.raises(NothingToLearn):
        loop.train(run(tmp_path, rate=0.0, limit=4), start(KeepAll()))
    assert "1 step(s) in a row" not in caplog.text
    assert "4 step(s) in a row: all 8 rewards are 0, so that every advantage is 0" in caplog.text
    verifier = Failing()
    verifier.sound = 2
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="r1"), pytest.raises(NothingToLearn):
        loop.train(run(tmp_path / "later", verifier=verifier, limit=3), start(KeepAll()))
    assert len(records(tmp_path / "later")) == 5
    assert loop.train(run(tmp_path / "sound"), start(KeepAll())).idle == 0


@dataclass
class Diverging(Learner):
    """Its gradient is not finite in these updates."""

    broken: Sequence[int] = ()

    def optim_step(self) -> dict[str, float]:
        self.steps += 1
        return {"grad_norm": math.nan if self.steps in self.broken else 0.0}


def test_steps_without_a_finite_gradient_are_said_once_kept_for_replay_and_end_the_run_if_they_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    of = run(tmp_path)
    schedule = replace(of.schedule, max_skipped_steps=3)
    of = replace(of, learner=Diverging(broken=(2, 3, 5)), schedule=schedule, recorder=Recorder(tmp_path, most=1))
    assert loop.train(of, start(KeepAll())).skipped == 0, "two in a row, then one: fewer than three in a row"
    of.recorder.flush()
    assert caplog.text.count("an update was skipped") == 2, "once for each row of such steps"
    assert f"r1 replay {tmp_path} --step 2" in caplog.text
    kept = sorted(path.name for path in (tmp_path / SAMPLES).glob("*.parquet"))
    assert kept == [sample_file(step, "train") for step in (2, 3, 5, 6)], "beside the newest, those stay"
    ended = replace(run(tmp_path / "other"), learner=Diverging(broken=(2, 3, 4, 5)), schedule=schedule)
    with pytest.raises(NothingToLearn, match=r"3 steps in a row was not finite.*max_skipped_steps=-1"):
        loop.train(ended, start(KeepAll()))
    assert ended.store.steps() == [4], "what was there when the run ended must go on from there"
    state = json.loads((ended.store.path(4) / "trainer.json").read_text())
    assert start(KeepAll()).resume(state).skipped == 3
    note_fault("a gradient that is not finite", outcome="skipped")


@pytest.mark.parametrize("fault", ["stopping reward", "dropped", "estimator", "loss", "broken step"])
def test_the_responses_of_a_step_that_fails_are_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    of = run(tmp_path)
    if fault == "stopping reward":
        of = run(tmp_path, verifier=Stopping())
    elif fault == "dropped":
        of = run(tmp_path, verifier=Dropping())
    elif fault == "estimator":
        of = replace(of, update=replace(of.update, compute_advantages=AdvantageComputer(Raising())))
    else:
        schedule = replace(of.schedule, global_batch_size=2)
        update = replace(of.update, needs=frozenset({"old_logprobs"}))
        of = replace(of, learner=WithOwnLoss(until=fault == "broken step"), schedule=schedule, update=update)
    with pytest.raises((RewardFailure, AdvantageError, OwnCodeError, loop.BrokenStepError)):
        loop.train(of, start(KeepAll()))
    of.recorder.flush()
    rows = RunReader(tmp_path).samples(1)
    assert len(rows) == 8, "the answers of the step"
    assert all("no score" in (row["failure"] or "") for row in rows) == (fault in ("stopping reward", "dropped"))
    key = {"estimator": "algorithm.adv_estimator", "loss": "worker.actor.loss_type"}
    if fault != "broken step":
        assert f"correct {key.get(fault, 'worker.reward.reward_function')}, then run the same" in caplog.text
    note_fault("a reward, estimator or loss that raises in a step", outcome="ends")


class Stopping(Equality):
    def __call__(self, inputs: Sequence[RewardInput]) -> list[Score]:
        raise RewardFailure("no score: the server is gone")


class Dropping(Equality):
    def __call__(self, inputs: Sequence[RewardInput]) -> list[Score]:
        return [Score(0.0, {}, Failure("exception", "no score"), keep=False) for _ in inputs]


class Raising(GRPO):
    def __call__(self, inputs: Any) -> Any:
        raise ZeroDivisionError("division by zero")


@dataclass
class WithOwnLoss(Learner):
    """Its loss, a user's own, fails when this many updates are taken."""

    until: int = 0

    def forward_backward(self, samples: Sequence[Sample], objective: Objective) -> dict[str, float]:
        if self.steps == self.until:
            raise OwnCodeError("mine.py:loss fails in line 7 (1 / 0): ZeroDivisionError: division by zero")
        return {}


@pytest.mark.parametrize(("until", "kept", "kind"), [(4, [2], OwnCodeError), (5, [], loop.BrokenStepError)])
def test_an_own_loss_that_fails_ends_the_run_and_a_whole_step_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, until: int, kept: list[int], kind: type[Exception]
) -> None:
    of = run(tmp_path)
    of = replace(
        of,
        learner=WithOwnLoss(until=until),
        schedule=replace(of.schedule, global_batch_size=2),  # two updates a step
        update=replace(of.update, needs=frozenset({"old_logprobs"})),
    )
    with pytest.raises(kind, match=r"mine.py:loss fails in line 7"):
        loop.train(of, start(KeepAll()))
    assert of.store.steps() == kept, "in the middle of a step there is no state to go on from"
    assert ("stopping after step 2, which is saved in" in caplog.text) == bool(kept)


@dataclass
class Noting(Learner):
    """Writes down what it does."""

    events: list[str] = field(default_factory=list)

    def add_logprobs(self, samples: Sequence[Sample], needs: Any) -> list[Sample]:
        self.events.append("actor's log-probs")
        return list(samples)

    def forward_backward_on_policy(
        self, samples: Sequence[Sample], objective: Objective
    ) -> tuple[list[Sample], dict[str, float]]:
        self.events.append("actor learns")
        return super().forward_backward_on_policy(samples, objective)

    def offload(self) -> None:
        self.events.append("actor rests")


@dataclass
class Critic:
    """Forecasts 0; writes down what it does."""

    events: list[str]

    def add_values(self, samples: Sequence[Sample]) -> list[Sample]:
        self.events.append("values")
        return [replace(sample, values=torch.zeros(len(sample.token_ids))) for sample in samples]

    def forward_backward(self, samples: Sequence[Sample]) -> dict[str, float]:
        assert all(sample.values is not None and sample.returns is not None for sample in samples)
        self.events.append(f"critic learns from {len({sample.group_id for sample in samples})}")
        return {"vf_loss": 1.0}

    def optim_step(self) -> dict[str, float]:
        return {"grad_norm": 0.5}

    def offload(self) -> None:
        self.events.append("critic rests")

    def snapshot(self, *, model_only: bool = False, max_bytes: int | None = None) -> Snapshot:
        return Snapshot()

    def save(self, folder: Path, *, model_only: bool = False) -> None: ...
    def load(self, folder: Path, *, model_only: bool = False) -> None: ...
    def pad(self) -> None: ...


def test_a_critic_learns_before_the_actor_on_batches_of_its_own_and_alone_while_it_warms_up(tmp_path: Path) -> None:
    events: list[str] = []
    of = run(tmp_path, steps=2)
    own = replace(of.schedule, critic_global_batch_size=2, critic_ppo_epochs=2, critic_warmup=1, save_freq=2)
    update = Update(AdvantageComputer(GAE()), Objective(), frozenset())
    of = replace(of, learner=Noting(events=events), critic=Critic(events), schedule=own, update=update)
    loop.train(of, start(KeepAll()))
    warm = ["actor's log-probs", "actor's log-probs", "actor rests", "values"]
    warm += ["critic learns from 2"] * 4 + ["critic rests"]
    saved = ["actor rests", "critic rests"]  # each after it was written, so that never both are on the device
    assert events == [*warm, *warm, "actor learns", *saved]
    assert sorted(path.name for path in of.store.path(2).iterdir() if path.is_dir()) == ["actor", "critic"]
    first, second = records(tmp_path)
    assert (first["critic/vf_loss"], first["critic/grad_norm"]) == (1.0, 0.5)
    assert "actor/grad_norm" not in first
    assert second["actor/grad_norm"] == 0.0


@dataclass
class Copied(Learner):
    """Its copy of step `until` cannot be written; if it has none, it writes itself."""

    until: int = 0
    has_room: bool = True

    def snapshot(self, *, model_only: bool = False, max_bytes: int | None = None) -> Any:
        assert max_bytes is not None
        until, step = self.until, self.steps

        class Taken(Snapshot):
            def write(self, folder: Path) -> None:
                if step == until:
                    raise OSError(28, "No space left on device")
                super().write(folder)

        return Taken() if self.has_room else None

    def save(self, folder: Path, *, model_only: bool = False) -> None:
        folder.mkdir()
        (folder / "by itself").touch()


@pytest.mark.parametrize("until", [2, 6])
def test_a_checkpoint_that_could_not_be_written_ends_the_run_by_its_name(tmp_path: Path, until: int) -> None:
    of = run(tmp_path)
    of = replace(of, learner=Copied(until=until), schedule=replace(of.schedule, save_freq=1))
    with pytest.raises(CheckpointError, match=f"step {until} could not be written .*No space left"):
        loop.train(of, start(KeepAll()))
    assert of.store.steps() == list(range(1, until))


def test_a_checkpoint_is_written_while_the_step_waits_where_there_is_no_room_for_a_copy(tmp_path: Path) -> None:
    of = run(tmp_path, steps=2)
    of = replace(of, learner=Copied(has_room=False), schedule=replace(of.schedule, save_freq=2))
    loop.train(of, start(KeepAll()))
    assert (of.store.path(2) / "actor" / "by itself").exists()


def test_training_responses_are_written_down_with_their_parts(tmp_path: Path) -> None:
    loop.train(run(tmp_path, steps=2), start(KeepAll()))
    rows = records(tmp_path, "generations.jsonl")
    assert [(row["step"], row["split"], row["sample"]) for row in rows] == [
        (1, "train", 0), (1, "train", 1), (2, "train", 0), (2, "train", 1)
    ]  # fmt: skip
    assert rows[0]["id"] == "file:0"
    assert [row["parts"] for row in rows[:2]] == [{"overall": 1.0}, {"overall": 0.0}]
    assert {row["finish_reason"] for row in rows} == {"stop"}


def test_metrics_have_the_names_and_meanings_of_easyr1(tmp_path: Path) -> None:
    loop.train(run(tmp_path, steps=1), start(KeepAll()))
    (record,) = records(tmp_path)
    total = record["perf/total_num_tokens"]
    assert record["global_seqlen/mean"] == total
    assert record["prompt_length/clip_ratio"] == 0.0
    assert record["timing_per_token_ms/update_actor"] == pytest.approx(1000 * record["timing_s/update_actor"] / total)
    sampled = 8 * record["response_length/mean"]
    assert record["timing_per_token_ms/gen"] == pytest.approx(1000 * record["timing_s/gen"] / sampled)


def test_a_controller_sees_the_penalty_that_it_steers() -> None:
    sample = Sample(
        token_ids=torch.arange(5),
        loss_mask=torch.tensor([False, True, True, True, True]),
        position_ids=torch.arange(5)[None],
        group_id=0,
        reward=0.0,
        old_logprobs=torch.tensor([0.0, -1.0, -1.0, -1.0, -1.0]),
        ref_logprobs=torch.tensor([0.0, -1.2, -0.8, -1.2, -0.8]),
        full_kl=torch.tensor([0.0, 0.1, 0.1, 0.1, 0.5]),
    )
    found = {name: divergence([sample], name) for name in ("kl", "abs", "mse", "full")}
    assert found == pytest.approx({"kl": 0.0, "abs": 0.2, "mse": 0.02, "full": 0.2}, abs=1e-6)
    assert divergence([sample], None) == divergence([replace(sample, ref_logprobs=None)], "abs") == 0.0
    assert tokens([sample], "ref_logprobs").shape == (4,)


def test_a_run_that_fails_leaves_its_last_step_in_memory_and_one_that_ends_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shm, folder = tmp_path / "shm", tmp_path / "run"
    shm.mkdir()
    monkeypatch.setattr(memory, "RAM_DISK", shm)
    abandoned = memory.make_copies(tmp_path)
    (tmp_path / memory.POINTER).unlink()

    class Dying(Copied):
        def forward_backward_on_policy(self, samples: Any, objective: Any) -> Any:
            if self.steps == 5:
                raise RuntimeError("rank 1 is gone")
            return super().forward_backward_on_policy(samples, objective)

    of = run(folder)
    of = replace(of, learner=Dying(), schedule=replace(of.schedule, save_freq=4), copies=memory_saver(folder))
    with pytest.raises(RuntimeError, match="rank 1 is gone"):
        loop.train(of, start(KeepAll()))
    assert of.copies is not None
    of.copies.close()
    copies, copy = memory.find_copies(folder), memory.newest_copy(folder)
    assert not abandoned.exists(), "its run's folder does not know it"
    assert copies is not None
    assert (copies.parent, copies.stat().st_mode & 0o777) == (shm, 0o700)
    assert (of.store.steps(), copy) == ([4], copies / "global_step_5")
    assert "global_step_5 stays in memory: the same command resumes from it" in caplog.text
    assert sorted(path.name for path in copies.glob("global_step_*")) == ["global_step_3", "global_step_5"]
    copies.chmod(0o750)
    assert memory.newest_copy(folder) is None, "others could have written it"
    copies.chmod(0o700)
    (copies / "global_step_5/trainer.json").write_text("{")
    assert memory.newest_copy(folder) == copies / "global_step_3"
    again = replace(run(folder), schedule=of.schedule, learner=Copied(), copies=memory_saver(folder))
    loop.train(again, start(KeepAll()))
    assert not list(shm.iterdir())
    assert not (folder / memory.POINTER).exists()


def memory_saver(folder: Path, free: int = 10**9) -> memory.MemorySaver:
    folder.mkdir(exist_ok=True)
    return memory.MemorySaver(memory.MachineCopies(folder, lambda: free), 1, lambda name, begin, end: None)


def test_copies_that_cannot_be_written_are_off_with_one_line_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory, "RAM_DISK", tmp_path)
    of = run(tmp_path / "run")
    of = replace(of, learner=Copied(until=2), copies=memory_saver(tmp_path / "run"))
    assert loop.train(of, start(KeepAll())).step == 6
    assert caplog.text.count("copies in memory are off") == 1
    small = replace(run(tmp_path / "small"), learner=Copied(has_room=False), copies=memory_saver(tmp_path / "small"))
    assert loop.train(small, start(KeepAll())).step == 6, "without memory for a copy there is none"
    note_fault("no memory for a copy of the state", outcome="goes on")


def test_a_clock_that_goes_back_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop.train(run(tmp_path / "calm", steps=3), start(KeepAll()))
    now = iter(range(10**9, 0, -3600))
    monkeypatch.setattr(time, "time", lambda: float(next(now)))
    of = run(tmp_path / "back", steps=3)
    loop.train(replace(of, schedule=replace(of.schedule, save_freq=1)), start(KeepAll()))
    calm, back = records(tmp_path / "calm"), records(tmp_path / "back")
    assert all(value >= 0 for row in back for name, value in row.items() if name.startswith("timing_s/"))
    clocked = ("timing_", "perf/")
    kept = [[{k: v for k, v in row.items() if not k.startswith(clocked)} for row in rows] for rows in (calm, back)]
    assert kept[0] == kept[1]
    assert of.store.steps() == [1, 2, 3]
    note_fault("a clock that goes back", outcome="goes on")
