"""The reference-probability reward in whole runs: whom it asks, what it reports, what it survives."""

from pathlib import Path

import pytest
from endtoend import R1, SMALL, read_log

RLPR = [
    "examples/rlpr/vision.yaml",
    *(word for word in SMALL if not word.startswith("data.val_files")),
    "data.val_sources=null",
    "trainer.val_freq=-1",
    "trainer.val_before_train=false",
    "trainer.save_freq=-1",
]


def words_of(folder: Path, *words: str, steps: int = 2) -> list[str]:
    return ["train", *RLPR, f"trainer.max_steps={steps}", f"trainer.save_checkpoint_path={folder}", *words]


def test_a_run_without_a_verifier_is_rewarded_by_its_own_log_probs(r1: R1, tmp_path: Path) -> None:
    r1(*words_of(tmp_path))
    for record in read_log(tmp_path):
        assert record["reward/unscored"] == 0.0
        assert 0.1 < record["reward/score_b"] < 1.0
        assert record["reward/delta"] == pytest.approx(record["reward/score_b"] - record["reward/score_a"])
        overall = 0.9 * record["reward/probability"] + 0.1 * record["reward/format"]
        assert record["reward/overall"] == pytest.approx(overall)
        assert record["actor/grad_norm"] > 0
