"""The comparison of `.ci/same_numbers.py` notices a difference of one bit, a missing value, and a missing history."""

from pathlib import Path

import pytest
import same_numbers
import torch

RUN = {
    "step 1 experiment_log.jsonl actor/pg_loss": [0.1],
    "step 1 samples/000000001-train.parquet tokens": [[1, 2], [3]],
    "step 2 global_step_2/actor/model.safetensors weight": torch.tensor([[1.0, 2.0], [3.0, float("nan")]]),
}


def differences(capsys: pytest.CaptureFixture[str], **changed: object) -> list[str]:
    name = next(name for name in RUN for word in changed if name.endswith(word))
    count = same_numbers.report("a training", RUN, {**RUN, name: next(iter(changed.values()))})
    lines = capsys.readouterr().out.splitlines()[1:]
    assert count == len(lines)
    return lines


def test_equal_runs_have_no_differences(capsys: pytest.CaptureFixture[str]) -> None:
    assert same_numbers.report("a training", RUN, dict(RUN)) == 0
    assert capsys.readouterr().out == "a training: 8 values equal, 0 of 3 names differ\n"


def test_a_difference_of_one_bit_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    next_float = torch.nextafter(torch.tensor(2.0), torch.tensor(3.0))
    weight = RUN["step 2 global_step_2/actor/model.safetensors weight"].clone()
    weight[0, 1] = next_float
    assert "1 of 4 values" in differences(capsys, weight=weight)[0]
    assert "1 of 1 values, first 0.1 -> 0.10000000000000002" in differences(capsys, pg_loss=[0.10000000000000002])[0]


def test_another_shape_or_type_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert "[2, 1] became lists of [1, 2]" in differences(capsys, tokens=[[1], [2, 3]])[0]
    weight = RUN["step 2 global_step_2/actor/model.safetensors weight"]
    assert "float32 (2, 2) became torch.float64 (2, 2)" in differences(capsys, weight=weight.double())[0]


def test_a_value_that_only_one_run_has_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert same_numbers.report("a training", RUN, {**RUN, "step 1 x": [1]}) == 1
    assert "step 1 x: only in this tree" in capsys.readouterr().out


def test_a_new_column_is_reported_unless_it_is_empty(capsys: pytest.CaptureFixture[str]) -> None:
    assert same_numbers.report("a training", {"a": [1]}, {"a": [1], "b": [None, None]}) == 0
    assert same_numbers.report("a training", {"a": [1]}, {"a": [1], "b": [0]}) == 0
    assert same_numbers.report("a training", {"a": [1]}, {"a": [1], "b": [None, 2]}) == 1
    assert same_numbers.report("a training", {"a": [1], "b": [None]}, {"a": [1]}) == 1


def test_wall_times_are_ignored_and_counts_are_not() -> None:
    record = {
        "checksums": {"a": 1},
        "perf/throughput": 1.0,
        "timing_s/gen": 1.0,
        "perf/total_num_tokens": 7,
        "reward": {"perf/x": 1, "a": 2},
    }
    assert dict(same_numbers.flatten(record)) == {"perf/total_num_tokens": 7, "reward.a": 2}


def test_a_clone_without_history_is_not_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit, reason = same_numbers.find_commit("0" * 40)
    assert commit is None
    assert "git fetch --unshallow" in reason
    monkeypatch.setattr(same_numbers, "ROOT", tmp_path)
    assert same_numbers.find_commit(None) == (None, f"{tmp_path} is not a clone of the repository.")
