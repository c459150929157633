"""The published GSM8K rows train a text model."""

import subprocess
import sys
from pathlib import Path

import pytest
from endtoend import R1, ROOT, read_log

CONFIG = "examples/gsm8k/config.yaml"
SAMPLE = ROOT / "examples/gsm8k/sample.jsonl"
WHOLE = ROOT.parent / "shared/data/gsm8k/train.jsonl"
TINY = [
    "data.val_files=null", "data.max_response_length=48", "data.rollout_batch_size=8", "worker.rollout.n=4",
    "worker.actor.global_batch_size=4", "worker.actor.optim.lr=1e-3", "trainer.max_steps=3", "trainer.save_freq=-1",
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    subprocess.run([sys.executable, ROOT / "examples/gsm8k/make_model.py", folder], check=True, capture_output=True)
    return folder


# The whole file once, where it lies beside the repository; the sample in its place elsewhere.
@pytest.mark.slow
@pytest.mark.parametrize(("rows", "padding_free"), [(SAMPLE, False), (WHOLE if WHOLE.exists() else SAMPLE, True)])
def test_three_steps_run_from_published_rows(
    r1: R1, tmp_path: Path, model: Path, rows: Path, padding_free: bool
) -> None:
    r1(
        "train", CONFIG, *TINY, f"data.train_files={rows}", f"worker.actor.model.model_path={model}",
        f"worker.actor.padding_free={padding_free}", f"trainer.save_checkpoint_path={tmp_path}",
    )  # fmt: skip
    records = read_log(tmp_path)
    assert [record["step"] for record in records] == [1, 2, 3]
    for record in records:
        assert record["rollout/logprob_gap_max"] < 1e-4
        assert record["reward/failures"] == 0
        assert record["actor/kl_loss"] >= 0


def test_published_answers_score_themselves_right_and_others_wrong(tmp_path: Path) -> None:
    import json

    from r1_rewards import gsm8k

    rows = [json.loads(line) for line in SAMPLE.read_text().splitlines()]
    answers = [row["answer"] for row in rows]
    assert all(gsm8k.score(answer, answer).value == 1 for answer in answers)
    assert gsm8k.score("18 eggs. #### 17", answers[0]).value == 0
