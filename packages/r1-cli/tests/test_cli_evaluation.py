"""Figures and comparisons of stored evaluations, on answers that are written here."""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import pytest
from cli_evaluations import write
from click.testing import CliRunner

from r1_cli.main import main
from r1_cli.runs.evaluation.compare import compare
from r1_cli.runs.evaluation.stored import (
    EvaluationError,
    by_budget,
    figures,
    majority_is_right,
    pass_at_k,
    read_evaluation,
    require_complete,
)
from r1_cli.runs.rows.choose import SampledAnswer, SampledGroup
from r1_cli.runs.rows.parts import SampleFolder


def group(*answers: tuple[str, bool], lengths: Sequence[int] = (5,) * 8) -> SampledGroup:
    found = [SampledAnswer(n, text, lengths[n], float(right), right) for n, (text, right) in enumerate(answers)]
    return SampledGroup("a:1", "s", "k", tuple(found))


@pytest.mark.parametrize(
    ("n", "correct", "k", "expected"), [(4, 0, 2, 0.0), (4, 4, 1, 1.0), (4, 1, 2, 0.5), (4, 3, 2, 1.0)]
)
def test_pass_at_k_is_the_chance_of_drawing_a_right_answer(n: int, correct: int, k: int, expected: float) -> None:
    assert pass_at_k(n, correct, k) == pytest.approx(expected)


def test_the_majority_votes_by_final_answer() -> None:
    one, two, again = (r"\boxed{1}", True), (r"\boxed{2}", False), (r"so \boxed{1}", True)
    assert majority_is_right(group(one, two, again).answers)
    assert not majority_is_right(group(one, two, two).answers)
    assert not majority_is_right(group(("", False), ("", False)).answers)


def test_a_model_is_summarised_over_prompts() -> None:
    right, wrong = (r"\boxed{1}", True), (r"\boxed{2}", False)
    found = {name: fmean(rows) for name, rows in figures([group(right, wrong), group(wrong, wrong)]).items()}
    assert found == {
        "accuracy": 0.5, "avg@2": 0.25, "pass@1": 0.25, "pass@2": 0.5, "maj@2": 0.5, "reward_score": 0.25,
    }  # fmt: skip


def test_longer_answers_than_a_budget_count_as_cut_and_wrong() -> None:
    groups = [group(("a", True), ("b", True), lengths=(10, 40)), group(("a", True), ("b", False), lengths=(20, 80))]
    found = [(one.tokens, one.right.value, one.cut) for one in by_budget(groups)]
    assert found == [(10, 0.25, 0.75), (20, 0.5, 0.5), (40, 0.75, 0.25), (80, 0.75, 0.0)]
    assert by_budget([group(("a", False))]) == []


def test_figures_are_split_by_the_values_of_columns(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", [[1.0], [0.0], [1.0], [None]])
    assert read_evaluation(folder).sets["math500/chat"].by_group() == {}
    columns = {"level": {"10": [0], "9": [1, 2], "none": [3]}, "subject": {"algebra": [0, 1, 2, 3]}}
    SampleFolder(folder).write_groups({"math500/chat": columns})
    found = read_evaluation(folder).sets["math500/chat"].by_group()
    means = {column: {value: (one.rows, one.value) for value, one in of.items()} for column, of in found.items()}
    # A row without a scored answer is in no mean, and a value of such rows alone has none.
    assert means == {"level": {"9": (2, 0.5), "10": (1, 1.0)}, "subject": {"algebra": (3, pytest.approx(2 / 3))}}
    assert [*means["level"]] == ["9", "10"]


def test_folders_are_compared_by_rows_with_all_p_values_adjusted(tmp_path: Path) -> None:
    a = write(tmp_path / "a", [[1.0], [0.0], [0.0], [0.0], [0.0], [0.0], [1.0]])
    b = write(tmp_path / "b", [[0.0], [1.0], [1.0], [1.0], [1.0], [1.0], [1.0]])
    c = write(tmp_path / "c", [[1.0, 0.0]] * 7)
    found = compare([read_evaluation(one) for one in (a, b, c)])
    assert [(one.first, one.second) for one in found] == [(0, 1), (0, 2), (1, 2)]
    first = found[0].difference
    assert (first.better, first.worse, first.p_exact, first.p) == (5, 1, 0.21875, 0.125)
    assert first.mean.value == pytest.approx(4 / 7)
    plain = [one.difference.p for one in found]
    assert [one.adjusted for one in found] == pytest.approx([2 * plain[0], plain[1], 3 * plain[2]])
    result = CliRunner().invoke(main, ["eval", "--compare", str(a), str(b), "--json", str(tmp_path / "c.json")])
    assert "B - A  +0.571" in result.output
    assert "McNemar" in result.output
    assert json.loads((tmp_path / "c.json").read_text())["comparisons"][0]["p_exact"] == 0.21875


@pytest.mark.parametrize(
    ("about", "told"),
    [
        ({"digest": "blake2b:2"}, "other rows in"),
        ({"prompt": "base 2"}, r"another prompt in .*\(base 2\).* than in .*\(chat 1\)"),
        ({"grader": "choice 3"}, "another grader in"),
    ],
)
def test_other_rows_prompts_or_graders_are_refused(tmp_path: Path, about: dict[str, str], told: str) -> None:
    a, b = write(tmp_path / "a", [[1.0], [0.0]]), write(tmp_path / "b", [[1.0], [0.0]], **about)
    with pytest.raises(EvaluationError, match=f"math500/chat has {told}"):
        compare([read_evaluation(a), read_evaluation(b)])


def test_no_figure_is_told_with_over_a_percent_missing_unless_with_its_bounds(tmp_path: Path) -> None:
    few = read_evaluation(write(tmp_path / "few", [[1.0]] * 98 + [[None], [0.0]]))
    (line,) = require_complete(few, partial=False)
    assert "1 of 100 answers of math500/chat are missing" in line
    many = read_evaluation(write(tmp_path / "many", [[1.0]] * 97, rows=100))
    with pytest.raises(EvaluationError, match=r"3 of 100 answers .* more than 1%: run the same command again"):
        require_complete(many, partial=False)
    failed = read_evaluation(write(tmp_path / "failed", [[1.0]] * 97 + [[None]] * 3))
    with pytest.raises(EvaluationError, match="correct the grader, and grade the answers of --output again by --reg"):
        require_complete(failed, partial=False)
    (line,) = require_complete(many, partial=True)
    assert "from 0.970 to 1.000" in line
    with pytest.raises(EvaluationError, match="3 of 100 answers of math500/chat are missing in"):
        compare([many, many])
    assert compare([many, many], partial=True)[0].difference.p == 1
