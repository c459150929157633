"""300 pairs of a response and a truth, written before the code was read: what numeric, choice, gsm8k and text say."""

import importlib
import json
from pathlib import Path

import pytest

PAIRS = [json.loads(line) for line in (Path(__file__).parent / "answer_pairs.jsonl").read_text("utf-8").splitlines()]
MOST_MISSED = {"numeric": 9, "choice": 4, "gsm8k": 2, "text": 0}  # right answers that may be refused


@pytest.mark.parametrize("name", MOST_MISSED)
def test_no_wrong_answer_is_taken_and_hardly_a_right_one_missed(name):
    verifier = importlib.import_module(f"r1_rewards.verifiers.{name}")
    pairs = [pair for pair in PAIRS if pair["verifier"] == name]
    taken = [verifier.score(pair["response"], pair["ground_truth"]).value == 1.0 for pair in pairs]
    assert len(pairs) > 60
    assert [pair for pair, right in zip(pairs, taken, strict=True) if right and not pair["correct"]] == []
    missed = [pair for pair, right in zip(pairs, taken, strict=True) if pair["correct"] and not right]
    assert len(missed) <= MOST_MISSED[name], missed


@pytest.mark.parametrize("name", MOST_MISSED)
@pytest.mark.parametrize(
    "text", ["1" * 1_000_000, "x" * 1_000_000, "\\boxed{" * 100_000, "<answer>" * 100_000, "1e400"]
)
def test_a_megabyte_is_a_wrong_answer_and_no_failure(name, text):
    verifier = importlib.import_module(f"r1_rewards.verifiers.{name}")
    assert verifier.score(text, "B" if name == "choice" else "5").value == 0.0
