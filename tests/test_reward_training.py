"""`r1 sft` with `sft.loss=reward` trains a reward model, which scores in r1-rewards as it did in training."""

import json
import shutil
from pathlib import Path
from typing import Any

import families
import pytest
import ranked_runs
import ranks
import yaml
from endtoend import R1, ROOT, read_log
from safetensors.torch import load_file

from r1_cli.runs.reader import RunReader
from r1_rewards import RewardInput, load

ANSWERS = "There are 3 shapes.", "There is 1 shape."


def write_settings(folder: Path, rows: int = 12) -> Path:
    """Write pairs of which the first answer is better, a text model and the configuration; return its file."""
    pairs = [
        {
            "prompt": [{"role": "user", "content": f"How many shapes? {number}"}],
            "chosen": [{"role": "assistant", "content": ANSWERS[0]}],
            "rejected": [{"role": "assistant", "content": ANSWERS[1]}],
        }
        for number in range(rows)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    settings = {
        "data": {
            "train_files": str(folder / "rows.jsonl"), "val_files": f"{folder / 'rows.jsonl'}[:4]", "max_length": 128,
            "filter_overlong_prompts_workers": 1,
        },
        "sft": {"loss": "reward", "epochs": 2},
        "worker": {
            "actor": {
                "global_batch_size": 4,
                "micro_batch_size_per_device_for_update": 4,
                "micro_batch_size_per_device_for_experience": 4,
                "model": {
                    "model_path": families.save_model("qwen3", folder / "model", families.make_model("qwen3", 1.0)),
                    "enable_gradient_checkpointing": False,
                },
                "optim": {"lr": 1e-3},
                "fsdp": {"mp_param_dtype": "fp32"},
            }
        },
        "trainer": {
            "logger": ["file"], "n_gpus_per_node": 1, "save_freq": 3, "val_freq": 3,
            "save_checkpoint_path": str(folder / "run"),
        },
    }  # fmt: skip
    path = folder / "reward.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def weights(folder: Path) -> dict[str, Any]:
    return {**load_file(folder / "model.safetensors"), **load_file(folder / "optimizer.safetensors")}


def score_row(folder: Path, row: int) -> list[float]:
    inputs = [RewardInput(answer, "", prompt=f"How many shapes? {row}") for answer in ANSWERS]
    with load("reward_model", {"path": str(folder), "device": "cpu"}) as verifier:
        return [score.value for score in verifier(inputs)]


def test_a_reward_model_is_trained_resumed_to_the_bit_and_served(r1: R1, tmp_path: Path) -> None:
    settings, run = write_settings(tmp_path), tmp_path / "run"
    said = r1("sft", settings).output
    assert (
        f"reward_function=reward_model 'worker.reward.reward_function_kwargs={{path: {run}/global_step_6/actor" in said
    )
    first, *steps = read_log(run)
    assert steps[0]["sft/samples"] == 8
    assert steps[-1]["reward_loss"] < 0.5 * steps[0]["reward_loss"]
    assert steps[-1]["val/accuracy"] == 1
    assert steps[-1]["val/margin"] > first["val/margin"] + 1
    assert not any("nll" in name or "logps" in name for record in steps for name in record)
    for row in RunReader(run).samples(4, "sft"):  # read with the weights of step 3
        number = int(row["prompt"].split("?")[1].split("<")[0])
        assert row["score"] == pytest.approx(score_row(run / "global_step_3/actor", number)[row["sample"]], abs=1e-4)
        assert row["old_logprobs"] is None
    one, other = score_row(run / "global_step_6/actor", 99)
    assert one > other + 1
    ours = weights(run / "global_step_6/actor")
    shutil.rmtree(run / "global_step_6")
    r1("sft", settings)  # from step 3
    theirs = weights(run / "global_step_6/actor")
    assert all(tensor.equal(theirs[name]) for name, tensor in ours.items())
    assert "score.weight" in ours


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["worker.actor.model.lora.rank=4"], "cannot be used with sft.loss=reward, because what serves"),
        (["sft.val_generations=true"], "a reward model samples no answers"),
        (["worker.actor.model.model_path=examples/quickstart/model"], "sft.loss=reward trains text models"),
    ],
)
def test_what_no_reward_model_can_be_is_refused(r1: R1, tmp_path: Path, words: list[str], message: str) -> None:
    refused = r1("sft", write_settings(tmp_path), *words, ok=False).output
    assert message in " ".join(refused.split())


@pytest.mark.slow
def test_rl_and_selection_are_scored_by_the_model_that_was_trained(r1: R1, tmp_path: Path) -> None:
    settings, run = write_settings(tmp_path), tmp_path / "run"
    r1("sft", settings, "trainer.val_freq=-1")
    folder = run / "global_step_6/actor"
    rows = [{"problem": f"How many shapes? {number}", "answer": "3"} for number in range(8)]
    (tmp_path / "task.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = yaml.safe_load((ROOT / "examples/sums/config.yaml").read_text())
    task["data"] |= {"train_files": str(tmp_path / "task.jsonl"), "val_files": None, "rollout_batch_size": 4}
    task["data"] |= {"max_response_length": 8, "max_prompt_length": 64}
    task["worker"]["actor"]["model"]["model_path"] = str(tmp_path / "model")
    task["worker"]["actor"]["global_batch_size"] = 4
    task["worker"]["rollout"] |= {"multi_turn": {"enable": False}, "n": 2}
    task["worker"]["reward"] = {"reward_function": "reward_model", "reward_function_kwargs": {"path": str(folder)}}
    task["trainer"] |= {"max_steps": 1, "save_checkpoint_path": str(tmp_path / "rl"), "val_freq": -1}
    (tmp_path / "task.yaml").write_text(yaml.safe_dump(task))
    r1("train", tmp_path / "task.yaml", "trainer.val_before_train=false")
    for row in RunReader(tmp_path / "rl").samples(1, "train"):
        question = row["prompt"].partition("user\n")[2].partition("<")[0]
        with load("reward_model", {"path": str(folder), "device": "cpu"}) as verifier:
            [score] = verifier([RewardInput(row["answer"], "", prompt=question)])
        assert row["score"] == pytest.approx(score.value, abs=1e-4)
    r1("sample", tmp_path / "model", tmp_path / "task.yaml", "--n", "2", "--output", tmp_path / "samples")
    words = "--rescore", "reward_model", "--reward-option", f"path={folder}", "--min-score", "-99", "--keep-cut"
    r1("rows", tmp_path / "samples", "--as", "sft", *words, "--output", tmp_path / "best.jsonl")
    assert (tmp_path / "best.jsonl").read_text().count("\n") == 8


@pytest.mark.slow
def test_two_ranks_train_a_reward_model_as_one_process_does(r1: R1, tmp_path: Path) -> None:
    settings = write_settings(tmp_path)
    r1("sft", settings, f"trainer.save_checkpoint_path={tmp_path / 'one'}")
    expected = [record["margin"] for record in read_log(tmp_path / "one") if "margin" in record]
    for found in ranks.run(ranked_runs.train, tmp_path / "two", "sft", str(settings)):
        assert [record["margin"] for record in found if "margin" in record] == pytest.approx(expected, rel=1e-3)
