"""The reference-probability reward in whole runs: the models it calls, its metrics, and failures."""

import json
import math
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from endtoend import R1, SMALL, read_log, without_clock
from safetensors.torch import load_file

from r1_cli.train.sampling.collect import DynamicSampling
from r1_data.tables.spec import answers_per_prompt

RLPR = [
    "examples/rlpr/vision.yaml",
    *(word for word in SMALL if not word.startswith(("data.val_files", "data.train_files"))),
    "data.val_sources=null",
    "trainer.val_freq=-1",
    "trainer.val_before_train=false",
    "trainer.save_freq=-1",
]
ROWS = "data.train_files=examples/quickstart/train.parquet[:24]"
KWARGS = "worker.reward.reward_function_kwargs"


def words_of(folder: Path, *words: str, steps: int = 2, rows: str = ROWS) -> list[str]:
    return ["train", *RLPR, rows, f"trainer.max_steps={steps}", f"trainer.save_checkpoint_path={folder}", *words]


# From the second step on, groups are sampled anew whose rewards spread less than they did on average before.
FILTERED = [
    "algorithm.online_filtering=true", "algorithm.filter_mode=ema_std", "algorithm.filter_ema_start_step=1",
    "algorithm.filter_start_step=2", "algorithm.std_filter_beta=1.0", "trainer.save_freq=1",
]  # fmt: skip


@pytest.fixture(scope="module")
def whole(r1: R1, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of three steps."""
    folder = tmp_path_factory.mktemp("rlpr")
    r1(*words_of(folder, *FILTERED, steps=3))
    assert len((next((folder / "score_a").iterdir())).read_text().splitlines()) == 1 + 24
    return folder


@pytest.fixture(scope="module")
def first(whole: Path) -> list[dict[str, Any]]:
    """What it logs."""
    return read_log(whole)


def test_a_run_without_a_verifier_is_rewarded_by_its_own_log_probs(first: list[dict[str, Any]]) -> None:
    for record in first:
        assert record["reward/unscored"] == record["reward/no_score_a"] == 0.0
        assert 0.1 < record["reward/score_b"] < 1.0
        assert 0.0 < record["reward/score_a"] < 1.0
        assert record["reward/delta"] == pytest.approx(record["reward/score_b"] - record["reward/score_a"])
        overall = 0.9 * record["reward/probability"] + 0.1 * record["reward/format"]
        assert record["reward/overall"] == pytest.approx(overall)
        assert record["actor/grad_norm"] > 0
        assert {f"reward/unscored_{cause}" for cause in ("form", "reference", "length", "number")} <= set(record)


def test_base_scores_of_a_column_are_those_of_a_run_and_others_are_refused(
    r1: R1, tmp_path: Path, first: list[dict[str, Any]]
) -> None:
    scored = tmp_path / "scored.parquet"
    said = r1("score-a", *RLPR, ROWS, "--output", scored)
    assert "24 of 24 rows have a score" in said.output
    assert not list(tmp_path.glob("*.part"))
    assert {"images", "problem", "answer", "scoreA", "scoreA_terms"} == set(pq.read_schema(scored).names)
    terms = json.loads(pq.read_table(scored)["scoreA_terms"][0].as_py())
    assert (terms["temperature"], terms["aggregation"]) == (1.0, "mean_exp_log_softmax")
    rows = f"data.train_files={scored}"
    r1(*words_of(tmp_path / "run", f"{KWARGS}.score_a=column", steps=1, rows=rows))
    assert not (tmp_path / "run/score_a").exists()
    (record,) = read_log(tmp_path / "run")
    assert record["reward/score_a"] == pytest.approx(first[0]["reward/score_a"], abs=1e-5)
    other = words_of(tmp_path / "other", f"{KWARGS}.aggregation=exp_sum_log_softmax", rows=rows)
    refused = r1(*other, ok=False)
    assert "was computed with aggregation='mean_exp_log_softmax'" in " ".join(refused.output.split())


class Killed(BaseException):
    """What no clean-up of a run knows."""


def test_a_run_killed_between_steps_goes_on_to_the_bit_with_its_base_scores_and_its_filter(
    r1: R1, tmp_path: Path, whole: Path, first: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    words, collect = words_of(tmp_path, *FILTERED, steps=3), DynamicSampling.collect

    def killing(collector: Any, at: Any, watch: Any) -> Any:
        if at.step == 2:
            raise Killed
        return collect(collector, at, watch)

    monkeypatch.setattr(DynamicSampling, "collect", killing)
    with pytest.raises(Killed):
        r1(*words)
    monkeypatch.undo()
    assert [record["step"] for record in read_log(tmp_path)] == [1, 2]
    scores = next((tmp_path / "score_a").iterdir())
    found = scores.read_bytes()
    r1(*words)
    assert without_clock(read_log(tmp_path)) == without_clock(first)
    assert first[-1]["filter/ema_threshold"] > 0
    assert first[-1]["filter/rate"] > 0, "nothing was filtered"
    assert first[-1]["reward/score_a"] > 0
    assert scores.read_bytes() == found
    for name in ("model.safetensors", "optimizer.safetensors"):
        ours, theirs = (load_file(folder / "global_step_3/actor" / name) for folder in (tmp_path, whole))
        assert all(torch.equal(ours[key], theirs[key]) for key in ours.keys() | theirs.keys())
    scores.unlink()
    refused = r1(*words, "trainer.max_steps=4", ok=False)
    assert "model before its first step" in " ".join(refused.output.split())


def test_a_frozen_model_beside_the_run_is_asked_in_the_policys_place(
    r1: R1, tmp_path: Path, first: list[dict[str, Any]]
) -> None:
    r1(*words_of(tmp_path, f"{KWARGS}.model=examples/quickstart/model"))
    found = read_log(tmp_path)
    assert found[0]["reward/score_b"] == pytest.approx(first[0]["reward/score_b"], abs=1e-4)
    assert found[0]["reward/score_a"] == pytest.approx(first[0]["reward/score_a"], abs=1e-4)
    missing = r1(*words_of(tmp_path / "none", f"{KWARGS}.model=no/such/model"), ok=False)
    assert f"{KWARGS}.model=no/such/model" in " ".join(missing.output.split())


def test_no_reward_that_is_no_number_ends_a_run_that_filters_by_spread(r1: R1, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "ODD = ['nan', 'inf', '0.5']\n"
        "def odd(reward_inputs):\n"
        "    return [{'overall': float(ODD[sum(map(ord, one['response'])) % 3])} for one in reward_inputs]\n"
    )
    words = ["examples/quickstart/config.yaml", *words_of(tmp_path / "run", steps=3)[2:]]
    parts = f"odd: {{reward: '{own}:odd', weight: 0.5}}, "
    parts += "rlpr: {reward: reference_probability, weight: 1.0, format_mode: think_box, repetition_penalty: true}"
    r1(
        "train",
        *words,
        "data.val_files=null",
        "worker.reward.reward_function=combine",
        f"{KWARGS}={{parts: {{{parts}}}}}",
        "algorithm.online_filtering=true",
        "algorithm.filter_mode=ema_std",
        "algorithm.filter_ema_start_step=1",
        "algorithm.filter_start_step=2",
    )
    records = read_log(tmp_path / "run")
    assert len(records) == 3
    assert sum(record["reward/failures"] for record in records) > 0
    assert all(math.isfinite(record["reward/overall"]) for record in records)
    assert "filter/ema_threshold" in records[-1]


@pytest.mark.parametrize(
    ("name", "answers"),
    [
        ("MMLUPro-1000_Avg2", 2),
        ("Math-500_Avg2", 2),
        ("gpqa_diamond_Avg4", 4),
        ("AIME2024_Avg16", 16),
        ("WebInstruct-verified-val_Avg2", 2),
        ("Minerva_Avg4", 4),
        ("TheoremQA_Avg2", 2),
    ],
)
def test_each_evaluation_set_is_sampled_as_often_as_its_files_name_says(name: str, answers: int) -> None:
    assert answers_per_prompt(f"openbmb/{name}.parquet") == answers
