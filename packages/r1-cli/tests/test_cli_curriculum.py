"""A curriculum by pass rate: what it refuses, what the plan says, which rows a run reads, and its metrics."""

import io
import json
from pathlib import Path

import pytest
from cli_fakes import Engine, collector, start
from rich.console import Console

from r1_cli.build.curriculum import read_rates
from r1_cli.build.prompts import build_stream
from r1_cli.build.rows import open_sources
from r1_cli.config import ConfigError, Provenance, RunConfig, load_config, without_effect
from r1_cli.config.sources import training_sources
from r1_cli.plan.announce import announce
from r1_cli.plan.batches import count, make_plan
from r1_cli.plan.check.configuration import check_settings
from r1_cli.plan.check.findings import Subject
from r1_cli.runs.track.timing import Stopwatch
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
