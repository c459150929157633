"""Ground truths that nothing can meet: named by the check and before a run, counted in it, and no others."""

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_fakes import Engine, prompt, sampler, silent

from r1_cli.build.rewards.ground_truths import GroundTruthReader, find_unusable_ground_truths
from r1_cli.build.rows import OpenSource, open_sources
from r1_cli.config import RunConfig, load_config
from r1_cli.config.sources import training_sources
from r1_cli.plan.data_check.examine import check_answers
from r1_cli.plan.data_check.findings import Report
from r1_cli.runs.track.timing import Stopwatch
from r1_cli.train.metrics.step import reward_metrics
from r1_cli.train.recorder import to_generations
from r1_cli.train.sampling.generate import sample_groups
from r1_data.check import Examined
from r1_rewards.sandbox.jail import kernel
from r1_rewards.types import RewardInput, Score
from r1_rollout.types import SamplingParams

TESTS = json.dumps({"inputs": ["4"], "outputs": ["5"]})
CHOICES = {"choices": ["London", "Paris"]}
ROWS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [  # reward, a row that is sound, a row that is not
    ("code", {"answer": TESTS}, {"answer": "nonsense("}),
    ("point", {"answer": "[0, 0, 10, 10]"}, {"answer": "here"}),
    ("choice", {"answer": "Paris", **CHOICES}, {"answer": "Rome", **CHOICES}),
    ("numeric", {"answer": "5 m"}, {"answer": "many"}),
    ("gsm8k_verl", {"answer": "1200"}, {"answer": "1,200"}),
]


def opened(folder: Path, reward: str, *rows: Mapping[str, Any]) -> tuple[RunConfig, list[OpenSource]]:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"problem": f"{place}?", **row}) for place, row in enumerate(rows)))
    words = [f"data.train_files={path}", "data.prompt_key=problem", "data.answer_key=answer", "data.val_files=null"]
    words += [f"worker.reward.reward_function={reward}", "worker.actor.model.model_path=owner/model"]
    config, _ = load_config(words, command="data")
    return config, open_sources(training_sources(config.data))


@pytest.mark.parametrize(("reward", "sound", "unsound"), ROWS)
def test_the_first_rows_of_no_use_are_named_before_a_run(tmp_path, reward, sound, unsound):  # type: ignore[no-untyped-def]
    config, sources = opened(tmp_path, reward, sound, unsound)
    lines = find_unusable_ground_truths(GroundTruthReader(config, [one.source for one in sources]), [*sources, None])
    assert len(lines) == 1
    assert f"rows.jsonl:2: {reward} can use no response: " in lines[0]
    assert repr(unsound["answer"]) in lines[0] or "JSON nor Python" in lines[0]


@pytest.mark.parametrize(("reward", "sound", "unsound"), ROWS[1:3])
def test_the_check_refuses_no_truth_that_can_be_met(tmp_path, reward, sound, unsound):  # type: ignore[no-untyped-def]
    config, sources = opened(tmp_path, reward, sound, unsound)
    report = Report(config, sources, 1)
    for index, row in enumerate((sound, unsound)):
        report.add_row(Examined(0, index, f"rows.jsonl:{index + 1}", 8, 0, row["answer"], str(index).encode()))
    check_answers(config, sources, report, silent)
    assert [row.id for _, row in report.findings["reward"].examples if row] == ["rows.jsonl:2"]


@pytest.mark.skipif(not kernel.SUPPORTED, reason="judged code is confined on Linux, x86_64 or aarch64")
def test_the_check_names_rows_whose_tests_assert_nothing(tmp_path: Path) -> None:
    tests = ["assert f(1) == 2", "def test_f():\n    f(1)\n", TESTS]
    config, sources = opened(tmp_path, "code", *({"answer": one} for one in tests))
    report = Report(config, sources, 1)
    for index, one in enumerate(tests):
        report.add_row(Examined(0, index, f"rows.jsonl:{index + 1}", 8, 0, one, str(index).encode()))
    check_answers(config, sources, report, silent)
    ((reason, row),) = report.findings["reward"].examples
    assert row is not None
    assert (row.id, report.findings["reward"].level) == ("rows.jsonl:2", "error")
    assert "the tests assert nothing about what the solution returns" in reason


def test_a_users_own_reward_is_not_guessed_about(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def f(reward_inputs): return [0.0] * len(reward_inputs)")
    config, sources = opened(tmp_path, f"{tmp_path / 'mine.py'}:f", {"answer": ""})
    assert find_unusable_ground_truths(GroundTruthReader(config, [one.source for one in sources]), sources) == []


def test_prompts_whose_truth_is_of_no_use_are_counted_and_one_is_named(caplog: pytest.LogCaptureFixture) -> None:
    def problem(source: str, ground_truth: str, columns: Mapping[str, Any]) -> str | None:
        return "gsm8k can use no response: no number" if ground_truth == "many" else None

    def verify(inputs: list[RewardInput]) -> list[Score]:
        return [Score(0.0, {"accuracy": 0.0}, extracted=item.response, reason="another number") for item in inputs]

    of = replace(sampler(Engine(4, 0.5), verify), truth_problem=problem)
    prompts = [replace(prompt(row), ground_truth="many" if row < 2 else "1") for row in range(3)]
    with caplog.at_level(logging.WARNING, logger="r1"):
        groups = list(sample_groups(of, prompts, SamplingParams(max_tokens=4, n=2), Stopwatch(), silent).values())
        sample_groups(of, prompts, SamplingParams(max_tokens=4, n=2), Stopwatch(), silent)
    assert reward_metrics(groups)["reward/unusable_truths"] == 2.0
    assert caplog.text.count("can be correct: gsm8k can use no response") == 1
    shown = to_generations(groups[:1], "train")[0]
    assert (shown.extracted, shown.reason) == (shown.response, "another number")
