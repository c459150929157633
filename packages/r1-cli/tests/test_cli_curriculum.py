"""Curricula by recorded and by measured pass rates: what is refused, what the plan says, which rows a run reads."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_fakes import DrainableEngine, Engine, Prompts, collector, start
from rich.console import Console

from r1_cli.build.prompts import build_stream, build_training_stream, read_rates
from r1_cli.build.rows import open_sources
from r1_cli.config import ConfigError, Provenance, RunConfig, load_config, without_effect
from r1_cli.config.sources import training_sources
from r1_cli.plan.announce import announce, find_oddities
from r1_cli.plan.batches import count, make_plan
from r1_cli.plan.check.configuration import check_settings
from r1_cli.plan.check.findings import Subject
from r1_cli.runs.track.timing import Stopwatch
from r1_cli.train.groups.stream_position import load_stream, save_stream
from r1_cli.train.sampling.collect import DynamicSampling
from r1_cli.train.types import Position
from r1_core.filtering import KeepAll
from r1_data.curriculum import OnlineStream, RowCounts
from r1_data.stream import Stream
from r1_data.types import DataError

RATES = [place % 5 / 4 for place in range(20)]
BY_RATE = "data.curriculum.by=pass_rate"


def write_rows(path: Path, rates: list[float | None]) -> Path:
    rows = [{"prompt": f"{place} + 1?", "answer": "1", "pass_rate": rate} for place, rate in enumerate(rates)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def words_of(file: Path, *words: str) -> list[str]:
    given = ["worker.actor.model.model_path=owner/model", "worker.reward.reward_function=math"]
    sizes = ["data.rollout_batch_size=4", "worker.actor.global_batch_size=4", "trainer.n_gpus_per_node=1"]
    return [*given, *sizes, f"data.train_files={file}", *words]


def config_of(file: Path, *words: str) -> RunConfig:
    return load_config(words_of(file, *words))[0]


class Kept:
    """Rows of a source, of which the first is left out for its length."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows - 1

    def job(self, index: int) -> "Kept":
        self.row = index + 1
        return self


class Rows:
    def __init__(self, *sizes: int) -> None:
        self.parts = [Kept(size) for size in sizes]

    def __len__(self) -> int:
        return sum(map(len, self.parts))


def test_the_stream_of_a_run_has_the_rows_of_the_band_of_those_that_are_kept(tmp_path: Path) -> None:
    config = config_of(write_rows(tmp_path / "rows.jsonl", RATES), BY_RATE, "data.curriculum.order=easy_first")
    sources = training_sources(config.data)
    rows = Rows(20)
    rates = read_rates(config, open_sources(sources), rows)
    assert rates is not None
    assert rates.of_rows == RATES[1:]
    stream = build_stream(config, rows, sources, rates, 4)
    epoch = [row for index in range(stream.batches_per_epoch) for row in stream.batch(index)]
    assert [RATES[1:][row] for row in epoch] == 4 * [0.75] + 4 * [0.5] + 4 * [0.25]
    assert read_rates(config_of(tmp_path / "rows.jsonl"), open_sources(sources), rows) is None


def test_the_plan_and_the_check_count_the_rows_outside_the_band(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", RATES)
    config = config_of(file, BY_RATE)
    assert count(config) == ([12], None, 8)
    plan = make_plan(config, *count(config))
    assert (plan.rows, plan.steps_per_epoch) == (12, 3)
    out = io.StringIO()
    announce(Console(file=out, width=100), config, Provenance(), plan)
    assert "rows outside the band" in out.getvalue()
    words = words_of(file, BY_RATE)
    found = [one for one in check_settings(Subject(words, *load_config(words))) if one.key == "data.curriculum"]
    assert [one.message for one in found] == ["12 of 20 rows have a pass rate in data.curriculum.band=[0.1, 0.9]"]


def test_a_row_without_a_pass_rate_and_a_band_without_rows_are_named(tmp_path: Path) -> None:
    config = config_of(write_rows(tmp_path / "rows.jsonl", [0.5, None]), BY_RATE)
    with pytest.raises(ConfigError, match=r"data.curriculum.by=pass_rate: .*rows.jsonl:2: has no pass_rate.*r1 rows"):
        count(config)
    with pytest.raises(DataError, match=r"rows.jsonl.*: data.curriculum: .*rows.jsonl:2: has no pass_rate"):
        read_rates(config, open_sources(training_sources(config.data)), Rows(2))
    config = config_of(write_rows(tmp_path / "hard.jsonl", [0.0] * 8), BY_RATE)
    with pytest.raises(ConfigError, match=r"none of the 8 rows has a pass rate in the band \[0.1, 0.9\]"):
        count(config)


def test_a_reversed_band_is_refused_and_keys_that_nothing_reads_are_named(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", RATES)
    with pytest.raises(ConfigError, match=r"data.curriculum.band=.*must begin with the lower pass rate"):
        config_of(file, BY_RATE, "data.curriculum.band=[0.9,0.1]")
    config, provenance = load_config(words_of(file, "data.curriculum.order=easy_first"))
    assert [limit.key for limit in without_effect(config, provenance)] == ["data.curriculum.order"]
    assert config_of(file, "data.curriculum.order=none").data.curriculum.order is None


def test_a_step_says_what_was_expected_of_its_rows_and_what_they_showed() -> None:
    run = collector(Engine(room=8, rate=1.0), n=2)
    assert not [name for name in run.collect(start(), Stopwatch())[2] if name.startswith("curriculum/")]
    run = collector(Engine(room=8, rate=1.0), n=2, rates=[0.25] * 10 + [0.75] * 9_990)
    _, _, metrics = run.collect(start(), Stopwatch())
    assert metrics["curriculum/expected"] == pytest.approx((10 * 0.25 + 6 * 0.75) / 16)
    assert metrics["curriculum/measured"] == 0.5  # one of two answers


# --- online -----------------------------------------------------------------------------------------------------------


def online(engine: Engine, rows: int = 200, explored: int = 2, **settings: Any) -> DynamicSampling:
    """A collector of 16 groups a step on an online curriculum."""
    nearest = Stream(rows, 16 - explored, seed=1, shuffle=True)
    explorer = Stream(rows, explored, seed=1, shuffle=True, drop_last=False) if explored else None
    stream = OnlineStream(nearest, explorer, target=0.5, prior=(1.0, 1.0), seed=1)
    return replace(collector(engine, **settings), stream=stream)


def take(run: DynamicSampling, at: Position, steps: int) -> tuple[list[list[int]], Position, dict[str, float]]:
    taken, metrics = [], dict[str, float]()
    for _ in range(steps):
        groups, after, metrics = run.collect(at, Stopwatch())
        taken.append([group.row for group in groups])
        at = replace(after, step=at.step + 1)
    return taken, at, metrics


@pytest.mark.parametrize("settings", [{}, {"batch": 4}, {"max_age": 0}])
def test_a_resumed_run_draws_the_rows_of_the_whole_one(settings: dict[str, Any], tmp_path: Path) -> None:
    def fresh() -> DynamicSampling:
        return online(DrainableEngine(room=3, rate=0.5, swing=0.4), **settings)

    whole, end, _ = take(fresh(), start(), 12)
    assert end.stream.counts is not None
    assert end.stream.counts.asked.sum() >= 12 * 16 * 2  # carried-over and discarded groups are counted once
    for cut in (1, 5, 9):
        _, at, _ = take(fresh(), start(), cut)
        (folder := tmp_path / str(cut)).mkdir()
        save_stream(at.stream, folder)
        resumed = start().resume(json.loads(json.dumps(at.state())))
        resumed = replace(resumed, stream=load_stream(resumed.stream, folder, Prompts().__getitem__))
        rest, last, _ = take(fresh(), resumed, 12 - cut)
        assert rest == whole[cut:]
        assert last.stream.counts is not None
        assert last.stream.counts.right.tolist() == end.stream.counts.right.tolist()
    forgotten = replace(resumed, stream=replace(resumed.stream, counts=None))
    assert take(fresh(), forgotten, 3)[0] != whole[9:]


def test_a_step_counts_the_answers_of_all_its_groups_and_draws_no_row_twice() -> None:
    run = online(Engine(room=8, rate=0.3), max_age=0)
    groups, after, metrics = run.collect(start(), Stopwatch())
    assert metrics["rollout/groups_sampled"] > 32  # several batches
    counts = after.stream.counts
    assert counts is not None
    assert counts.asked.max() == 2  # one group of two answers
    assert (counts.asked > 0).sum() == metrics["rollout/groups_sampled"]
    assert counts.right.sum() == len(groups) + metrics["rollout/groups_discarded"]  # of which one answer is right
    assert metrics["curriculum/rows_seen"] == pytest.approx(metrics["rollout/groups_sampled"] / 200)
    assert metrics["curriculum/expected"] == 0.5  # the prior
    assert metrics["curriculum/measured"] == counts.right.sum() / counts.asked.sum()


def test_rows_without_an_answer_after_ten_epochs_are_told(caplog: pytest.LogCaptureFixture) -> None:
    every = KeepAll()
    run = online(Engine(room=8, rate=1.0), rows=32, explored=0)
    bad = OnlineStream(Stream(32, 16, seed=1, shuffle=True), None, target=0.5, prior=(1000.0, 1000.0), seed=1)
    run = replace(run, stream=bad)
    counts = RowCounts(np.array([0] * 3 + [10**6] * 29, np.int32), np.array([0] * 3 + [10**6 // 2] * 29, np.int32))
    position = start(every)
    at = replace(position, stream=replace(position.stream, counts=counts, cursor=18))
    _, at, metrics = take(run, at, 1)
    assert not caplog.records
    _, at, metrics = take(run, at, 1)
    assert "3 of 32 rows have no answer after 10 epochs, such as row 0, 1, 2 of those kept" in caplog.text
    assert metrics["curriculum/rows_seen"] == 29 / 32
    caplog.clear()
    take(run, at, 3)
    assert not caplog.records


def test_the_configuration_builds_an_online_curriculum_and_says_that_it_does_not_pay_alone(tmp_path: Path) -> None:
    words = ["data.curriculum.by=online", "data.curriculum.explore=0.2", "data.curriculum.target=0.25"]
    config = config_of(write_rows(tmp_path / "rows.jsonl", RATES), *words, "data.rollout_batch_size=8")
    stream = build_training_stream(config, Rows(21), training_sources(config.data), None)
    assert isinstance(stream, OnlineStream)
    assert (stream.batch_size, stream.target, stream.prior) == (8, 0.25, (1.0, 1.0))
    notes = find_oddities(config, make_plan(config, *count(config)))
    assert any("nearest to 0.25, 20% by lot; in a controlled comparison this paid only with" in note for note in notes)
    plain = config_of(tmp_path / "rows.jsonl")
    assert type(build_training_stream(plain, Rows(21), training_sources(plain.data), None)) is Stream


def test_fine_tuning_refuses_an_online_curriculum(tmp_path: Path) -> None:
    words = words_of(write_rows(tmp_path / "rows.jsonl", RATES), "data.curriculum.by=online")
    with pytest.raises(ConfigError, match=r"data.curriculum.by=online .*reads the answers that r1 train samples"):
        load_config(words, command="sft")
