"""`r1 sft` trains on the answers of conversations, exactly as many epochs as set, and resumes to the bit."""

import json
import os
import random
import re
import signal
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import families
import pytest
import ranked_runs
import ranks
import torch
import yaml
from endtoend import R1, read_log, without_clock
from forked import Forked
from patience import eventually
from PIL import Image
from safetensors.torch import load_file
from two_nodes import HERE, NODES, two_nodes

import r1_cli
from r1_cli.checkpoint.folders import CheckpointStore
from r1_cli.config import ConfigError
from r1_cli.runs.reader import RunReader
from r1_cli.train import run as run_loop

NUMBERS = ("one", "two", "three", "four")


def conversation(number: int, turns: int = 1) -> list[dict[str, str]]:
    draw = random.Random(number)
    messages = []
    for _ in range(turns):
        count = draw.randrange(4)
        messages.append({"role": "user", "content": f"How many shapes are there? {draw.randrange(10)}"})
        messages.append({"role": "assistant", "content": f"There are {count + 1} shapes."})
    return messages


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_settings(folder: Path, rows: int = 20, turns: int = 1) -> Path:
    """Write rows and the configuration of a short run on them; return its file."""
    file = write_rows(folder / "rows.jsonl", [{"messages": conversation(n, turns)} for n in range(rows)])
    settings = {
        "data": {"train_files": str(file), "max_length": 128, "filter_overlong_prompts_workers": 1},
        "sft": {"epochs": 2},
        "worker": {
            "actor": {
                "global_batch_size": 8,
                "micro_batch_size_per_device_for_update": 4,
                "micro_batch_size_per_device_for_experience": 4,
                "model": {"model_path": "examples/quickstart/model", "enable_gradient_checkpointing": False},
                "optim": {"lr": 1e-3, "lr_scheduler_type": "linear"},
                "fsdp": {"mp_param_dtype": "fp32"},
            }
        },
        "trainer": {
            "logger": ["file"], "n_gpus_per_node": 1, "save_freq": 2, "val_freq": 3,
            "save_checkpoint_path": str(folder / "run"),
        },
    }  # fmt: skip
    path = folder / "sft.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def weights(run: Path) -> dict[str, Any]:
    latest = CheckpointStore(run).latest()
    assert latest is not None
    files = [load_file(file) for file in sorted((latest / "actor").glob("*.safetensors"))]
    return {name: tensor for one in files for name, tensor in one.items()}


def steps_of(run: Path) -> int:
    return len(read_log(run)) if (run / "experiment_log.jsonl").is_file() else 0


def assert_same_weights(one: Path, other: Path) -> None:
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    assert all(tensor.equal(theirs[name]) for name, tensor in ours.items())


def test_a_run_takes_exact_epochs_and_records_them(r1: R1, tmp_path: Path) -> None:
    run = tmp_path / "run"
    said = r1("sft", write_settings(tmp_path), "trainer.save_freq=-1").output
    assert "the last of 4 rows" in said
    assert "sft.loss=nll needs none" in said
    assert "step 6/6: the run is complete" in said
    steps = read_log(run)
    assert [step["sft/samples"] for step in steps] == [8, 8, 4, 8, 8, 4]
    assert steps[-1]["sft/epoch"] == 2
    assert steps[-1]["sft/nll"] < 0.7 * steps[0]["sft/nll"]
    reader = RunReader(run)
    ids = [[row["prompt_id"] for row in reader.samples(step, "sft")] for step in reader.recorded_steps("sft")]
    one, other = ([name for step in steps for name in step] for steps in (ids[:3], ids[3:]))
    assert len(set(one)) == 20
    assert sorted(one) == sorted(other)
    assert ids[:3] != ids[3:], "epochs are shuffled anew"
    row = reader.samples(1, "sft")[0]
    assert row["answer"].startswith("There are")
    assert row["prompt"].endswith("assistant\n")
    assert len(row["old_logprobs"]) == len(row["tokens"])
    assert max(row["old_logprobs"]) <= 0


@pytest.mark.slow
def test_a_finished_run_is_validated_and_read_by_the_other_commands(r1: R1, tmp_path: Path) -> None:
    run, words = tmp_path / "run", ["sft", write_settings(tmp_path), f"data.val_files={tmp_path / 'rows.jsonl'}[:6]"]
    r1(*words)
    first, *_, last = read_log(run)
    assert last["val/nll"] < 0.7 * first["val/nll"]
    assert "step 6/6: the run is complete" in r1(*words).output
    assert len(read_log(run)) == 7
    for command in ("report", "diagnose"):
        r1(command, run)
    page = (run / "report.html").read_text()
    assert all(words in page for words in ("There are", "sft.loss", "val/nll", "loss "))
    assert not any(words in page for words in ("adv_estimator", "worker.rollout.n", "truth"))
    assert "identical" in r1("diff", run, run).output
    r1("merge", run / "global_step_6", "--output", tmp_path / "merged")
    in_python = [*map(str, words[2:]), f"trainer.save_checkpoint_path={tmp_path / 'python'}"]
    for last_step in (2, 6):  # stopped, and opened again
        with r1_cli.open_run(words[1], *in_python, quiet=True) as tuning:
            for step in tuning:
                assert step.metrics["sft/nll"] > 0
                assert not step.groups
                if step.number == last_step:
                    tuning.stop()
    assert without_clock(read_log(tmp_path / "python")) == without_clock(read_log(run))
    assert_same_weights(tmp_path / "python", run)
    assert RunReader(tmp_path / "python").starts()[-1]["end"] == "complete"
    with pytest.raises(ConfigError, match=r"worker\.actor\.loss_type: is for r1 train, and"):
        r1_cli.open_run(words[1], loss=lambda inputs: inputs.logprobs)


def wait_for_growth(log: Path, process: Forked) -> None:
    before = log.stat().st_size if log.is_file() else 0
    eventually(lambda: process.poll() is not None or (log.is_file() and log.stat().st_size > before))


@pytest.mark.slow
def test_a_run_that_is_killed_anywhere_ends_as_one_that_is_not(tmp_path: Path) -> None:
    moments = random.Random(os.environ.get("R1_KILL_SEED", "3"))
    runs = []
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        runs.append(["sft", str(write_settings(tmp_path / name, 200)), "sft.epochs=1"])
    whole, killed = (Forked(*words) for words in runs)
    log = tmp_path / "killed/run/experiment_log.jsonl"
    for _ in range(int(os.environ.get("R1_KILLS", "3"))):
        wait_for_growth(log, killed)
        time.sleep(moments.uniform(0, 0.2))
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        killed = Forked(*runs[1])
    assert [killed.wait(), whole.wait()] == [0, 0]
    one, other = (without_clock(read_log(tmp_path / name / "run")) for name in ("whole", "killed"))
    assert one == other
    assert len(one) == 25
    assert_same_weights(tmp_path / "whole/run", tmp_path / "killed/run")
    starts = RunReader(tmp_path / "killed/run").starts()
    assert len(starts) > 1, "every start was killed before its first step"


@pytest.mark.slow
def test_turns_apart_are_trained_as_rows_of_their_own(r1: R1, tmp_path: Path) -> None:
    apart, rows = tmp_path / "apart", tmp_path / "rows"
    for folder in (apart, rows):
        folder.mkdir()
    words = ["data.shuffle=false", "trainer.max_steps=1", "trainer.save_freq=1"]
    r1("sft", write_settings(apart, 4, turns=2), *words, "sft.turns=each", "worker.actor.global_batch_size=4")
    settings = write_settings(rows)
    whole = [conversation(number, 2) for number in range(4)]
    write_rows(rows / "rows.jsonl", [{"messages": part} for one in whole for part in (one[:2], one)])
    r1("sft", settings, *words, "sft.turns=last", "worker.actor.global_batch_size=8")
    ours, theirs = weights(apart / "run"), weights(rows / "run")
    assert all(tensor.allclose(theirs[name], atol=1e-5) for name, tensor in ours.items())
    assert read_log(apart / "run")[0]["sft/tokens"] == read_log(rows / "run")[0]["sft/tokens"]


def write_pairs(folder: Path, **more: str) -> Path:
    """Write preference rows in place of the run's rows, of which "three" is preferred to "one"; return the settings."""
    settings = write_settings(folder)
    rows = [
        {
            "prompt": [{"role": "user", "content": f"How many shapes are there? {number}"}],
            "chosen": [{"role": "assistant", "content": "There are 3 shapes."}],
            "rejected": [{"role": "assistant", "content": "There is 1 shape."}],
        }
        for number in range(20)
    ]
    write_rows(folder / "rows.jsonl", rows)
    return settings


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["dpo", "cdpo", "ipo", "simpo"])
def test_a_preference_loss_prefers_the_chosen_answers(r1: R1, tmp_path: Path, loss: str) -> None:
    words = [f"sft.loss={loss}", f"data.val_files={tmp_path / 'rows.jsonl'}[:6]", "worker.actor.optim.lr=1e-4"]
    r1("sft", write_pairs(tmp_path), *words)
    first, *steps = read_log(tmp_path / "run")
    assert steps[0]["sft/samples"] == 16
    if loss != "simpo":
        assert first["val/rewards/margins"] == pytest.approx(0, abs=1e-4), "the policy is the reference at first"
    assert steps[-1]["val/rewards/margins"] > first["val/rewards/margins"] + 0.05
    assert steps[-1]["val/rewards/accuracies"] == 1
    assert steps[-1]["preference_loss"] < steps[0]["preference_loss"]


@pytest.mark.slow
def test_kto_reads_labelled_answers_and_dpo_refuses_them_and_a_missing_reference(r1: R1, tmp_path: Path) -> None:
    settings = write_settings(tmp_path)
    answers = "There is 1 shape.", "There are 3 shapes."
    rows = [{"prompt": f"How many? {n}", "completion": answers[n % 2], "label": bool(n % 2)} for n in range(20)]
    write_rows(tmp_path / "rows.jsonl", rows)
    r1("sft", settings, "sft.loss=kto", "worker.actor.optim.lr=1e-4")
    steps = read_log(tmp_path / "run")
    assert steps[-1]["rewards/margins"] > steps[0]["rewards/margins"]
    assert "the loss compares two" in r1("sft", settings, "sft.loss=dpo", ok=False).output
    refused = r1("sft", settings, "sft.loss=dpo", "algorithm.disable_kl=true", ok=False).output
    assert "sft.loss=simpo, which needs none" in refused


def nll_of(r1: R1, folder: Path, model: Path) -> float:
    """The loss of a model's folder on the first rows, by a run of one step that is validated before it."""
    words = [f"data.val_files={folder / 'rows.jsonl'}[:6]", "trainer.max_steps=1", "trainer.save_freq=-1"]
    measured = folder / f"{model.name}-measured"
    r1(
        "sft",
        folder / "sft.yaml",
        *words,
        f"worker.actor.model.model_path={model}",
        f"trainer.save_checkpoint_path={measured}",
    )
    return float(read_log(measured)[0]["val/nll"])


@pytest.mark.slow
def test_an_adapter_on_a_base_of_four_bits_is_merged_as_it_was_trained(r1: R1, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    words = ["worker.actor.model.lora.rank=8", "worker.actor.model.quantization=nf4", "worker.actor.optim.lr=2e-3"]
    r1("sft", write_settings(tmp_path), *words, f"data.val_files={tmp_path / 'rows.jsonl'}[:6]")
    first, *_, last = read_log(tmp_path / "run")
    assert last["val/nll"] < first["val/nll"] - 0.1
    r1("merge", tmp_path / "run/global_step_6", "--output", tmp_path / "merged")
    assert nll_of(r1, tmp_path, tmp_path / "merged") == pytest.approx(last["val/nll"], rel=1e-3)


@pytest.mark.slow
def test_an_adapter_is_fine_tuned_and_merged_and_prefers_against_its_base(r1: R1, tmp_path: Path) -> None:
    lora = ["worker.actor.model.lora.rank=8", "worker.actor.optim.lr=2e-3"]
    r1("sft", write_settings(tmp_path), *lora, f"data.val_files={tmp_path / 'rows.jsonl'}[:6]")
    steps = read_log(tmp_path / "run")
    assert steps[-1]["sft/nll"] < 0.9 * steps[1]["sft/nll"]
    r1("merge", tmp_path / "run/global_step_6", "--output", tmp_path / "merged")
    assert nll_of(r1, tmp_path, tmp_path / "merged") == pytest.approx(steps[-1]["val/nll"], rel=1e-5)
    assert steps[-1]["val/nll"] < steps[0]["val/nll"] - 0.1, "the adapter does nothing, so merging it shows nothing"
    pairs = tmp_path / "pairs"
    pairs.mkdir()
    r1("sft", write_pairs(pairs), *lora, "sft.loss=dpo")
    steps = read_log(pairs / "run")
    assert steps[0]["rewards/margins"] == pytest.approx(0, abs=1e-4)
    assert steps[-1]["rewards/margins"] > 0.05


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["nll", "dpo"])
def test_validation_samples_answers_with_an_engine_that_is_opened_on_first_use(
    r1: R1, tmp_path: Path, loss: str
) -> None:
    rows = "examples/quickstart"
    settings = write_pairs(tmp_path) if loss == "dpo" else write_settings(tmp_path)
    words = [
        f"sft.loss={loss}",
        "sft.val_generations=true",
        f'data.val_sources=[{{"files": "{rows}/val.parquet[:16]", "prompt_key": "problem", "answer_key": "answer"}}]',
        f"worker.reward.reward_function={rows}/reward.py:compute_score",
        "data.max_prompt_length=64", "data.max_response_length=20", "worker.rollout.dtype=fp32",
        "data.min_pixels=3136", "data.max_pixels=50176",
    ]  # fmt: skip
    r1("sft", settings, *words)
    found = [record for record in read_log(tmp_path / "run") if "val/reward_score" in record]
    assert [record["step"] for record in found] == [0, 3, 6]
    assert found[0]["val/accuracy_reward"] > 0
    assert RunReader(tmp_path / "run").recorded_steps("validation") == [0, 3, 6]


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("ray"), reason="ray is not installed")
def test_two_ranks_under_ray_that_are_killed_end_as_one_process(r1: R1, tmp_path: Path) -> None:
    words = ["sft", str(write_settings(tmp_path)), "sft.epochs=3"]
    one, killed = tmp_path / "one", tmp_path / "killed"
    ranked = [*words, *NODES, f"trainer.save_checkpoint_path={killed}"]
    with two_nodes() as (address, *_):
        process = Forked(*ranked, RAY_ADDRESS=address, **HERE)
        assert eventually(
            lambda: process.poll() is not None or ((killed / "global_step_2").is_dir() and steps_of(killed) > 2), 900
        )
        process.kill()
        process.wait()
        assert 3 <= steps_of(killed) < 9, process.communicate()
        said = (process := Forked(*ranked, RAY_ADDRESS=address, **HERE)).communicate()
        assert process.returncode == 0, said
    assert re.search(r"learner-0 +127\.0\.0\.1 +cpu *\n *learner-1 +127\.0\.0\.1 +cpu", said)
    first, second = RunReader(killed).starts()
    assert (first["end"], second["end"]) == ("is running, or was killed", "complete")
    assert second["from_step"] >= 2, "it began anew"
    r1(*words, f"trainer.save_checkpoint_path={one}")
    assert_near(one, killed, 1e-5)


def assert_near(one: Path, ranked: Path, tolerance: float) -> None:
    """The numbers and the last weights of two ranks are those of one process."""
    for single, found in zip(*(without_clock(read_log(run)) for run in (one, ranked)), strict=True):
        shares = {name: found[name] for name in found if name.startswith("global_seqlen/")}  # of each rank
        assert found == pytest.approx(single | shares, rel=tolerance, abs=0.1 * tolerance)
    alone, together = weights(one), weights(ranked)
    assert alone.keys() == together.keys()
    assert all(tensor.allclose(together[name], rtol=0, atol=tolerance) for name, tensor in alone.items())


@pytest.mark.slow
def test_two_ranks_prefer_with_an_adapter_as_one_process_does_and_go_on_to_the_bit(r1: R1, tmp_path: Path) -> None:
    words = ["sft", str(write_pairs(tmp_path)), "sft.loss=dpo"]
    words += ["worker.actor.model.lora.rank=8", "worker.actor.optim.lr=2e-3"]
    r1(*words, f"trainer.save_checkpoint_path={tmp_path / 'one'}")
    ranks.run(ranked_runs.train, tmp_path / "two", *words)
    two = tmp_path / "two/0"
    assert_near(tmp_path / "one", two, 1e-4)  # a margin is a small difference
    start = f"trainer.load_checkpoint_path={two / 'global_step_4'}"
    for found in ranks.run(ranked_runs.train, tmp_path / "again", *words, start):
        assert without_clock(found) == without_clock(read_log(two))[4:]
    assert files_of(tmp_path / "again/0/global_step_6/actor") == files_of(two / "global_step_6/actor")


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def break_run(monkeypatch: pytest.MonkeyPatch, how: Callable[[Any], None]) -> None:
    """Let `how` change the run between its checks and its first step."""
    train = run_loop.train
    monkeypatch.setattr(run_loop, "train", lambda run, at: (how(run), train(run, at))[1])


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["nll", "dpo"])
def test_two_ranks_that_share_each_sequence_fine_tune_as_one_process_does(r1: R1, tmp_path: Path, loss: str) -> None:
    settings = write_pairs(tmp_path) if loss == "dpo" else write_settings(tmp_path)
    words = [f"worker.actor.model.model_path={families.save_model('qwen3', tmp_path / 'model')}", f"sft.loss={loss}"]
    r1("sft", settings, *words, f"trainer.save_checkpoint_path={tmp_path / 'one'}")
    name = "preference_loss" if loss == "dpo" else "sft/nll"
    expected = [record[name] for record in read_log(tmp_path / "one")]
    words += ["trainer.n_gpus_per_node=2", "worker.actor.ulysses_size=2"]
    for found in ranks.run(ranked_runs.train, tmp_path / "two", "sft", str(settings), *words):
        assert [record[name] for record in found] == pytest.approx(expected, rel=1e-4)


def test_a_row_whose_loss_is_not_finite_is_named_and_its_step_changes_nothing(
    r1: R1, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = write_settings(tmp_path)
    rows = [{"messages": conversation(number)} for number in range(20)]
    rows[10]["messages"][0]["content"] += " €"

    def spoil(run: Any) -> None:
        [token, *_] = run.tokenizer("€", add_special_tokens=False)["input_ids"]
        assert not any(token in run.reader.rows[row][0].token_ids for row in range(20) if row != 10)
        with torch.no_grad():
            run.learner.model.get_input_embeddings().weight[token] = torch.nan

    write_rows(tmp_path / "rows.jsonl", rows)
    break_run(monkeypatch, spoil)
    words = ["data.shuffle=false", "sft.epochs=1", "trainer.save_freq=1", "trainer.val_freq=-1"]
    said = r1(
        "sft",
        settings,
        *words,
        *[f"worker.actor.micro_batch_size_per_device_for_{one}=1" for one in ("update", "experience")],
    )
    assert [record["sft/skipped"] for record in read_log(tmp_path / "run")] == [0, 1, 0]
    assert "step 2 is skipped: the loss of rows.jsonl:11 is not finite" in said.output
    one, two, three = (load_file(tmp_path / f"run/global_step_{step}/actor/model.safetensors") for step in (1, 2, 3))
    assert all(torch.equal(one[name].nan_to_num(), two[name].nan_to_num()) for name in one)
    assert not all(torch.equal(two[name].nan_to_num(), three[name].nan_to_num()) for name in two)


def test_a_gradient_that_is_not_finite_is_told_apart(r1: R1, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(run: Any) -> None:
        weight = run.learner.model.get_input_embeddings().weight
        weight.register_hook(lambda gradient: gradient * torch.nan)

    settings = write_settings(tmp_path)
    break_run(monkeypatch, spoil)
    refused = r1("sft", settings, "trainer.max_skipped_steps=2", "trainer.save_freq=-1", ok=False).output
    assert "step 1 is skipped: its gradient is not finite, though the loss of every row is" in " ".join(refused.split())
    assert "the loss or gradient of 2 steps in a row was not finite" in " ".join(refused.split())
    assert read_log(tmp_path / "run")[-1]["actor/skipped_steps"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("lost", [1, 2])
def test_rows_whose_pictures_vanish_are_left_out_up_to_a_share(
    r1: R1, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    settings, rows = write_settings(tmp_path), []
    for number in range(20):
        Image.new("RGB", (56, 56), (number, 0, 0)).save(tmp_path / f"{number}.png")
        messages = conversation(number)
        messages[0]["content"] = f"<image>{messages[0]['content']}"
        rows.append({"messages": messages, "images": [f"{number}.png"]})
    write_rows(tmp_path / "rows.jsonl", rows)
    break_run(monkeypatch, lambda run: [(tmp_path / f"{number}.png").unlink() for number in range(18, 18 + lost)])
    words = ["data.shuffle=false", "sft.epochs=1", "trainer.val_freq=-1", "data.min_pixels=3136", "data.max_length=256"]
    said = r1("sft", settings, *words, f"data.image_dir={tmp_path}", ok=lost == 1).output
    left_out = [record["sft/left_out"] for record in read_log(tmp_path / "run")]
    if lost == 1:
        assert left_out == [0, 0, 1]
        row = RunReader(tmp_path / "run").samples(1, "sft")[0]
        assert (tmp_path / "run/media" / row["media"][0]).is_file()
        assert row["prompt"].count("<|image_pad|>") == 1
        r1("report", tmp_path / "run")
        assert "<img" in (tmp_path / "run/report.html").read_text()
    else:
        assert left_out == [0, 0]
        assert "2 of 20 rows cannot be read, more than 5%" in " ".join(said.split())


def test_a_check_reads_a_configuration_of_fine_tuning(r1: R1, tmp_path: Path) -> None:
    settings = write_settings(tmp_path)
    assert "no errors" in r1("check", settings, "--no-step").output
    phases = [one["name"] for one in json.loads(r1("estimate", settings, "--json").output)["phases"]]
    assert phases == ["log-probs", "gradient", "optimizer step"], "no engine is opened"
    sampled = json.loads(
        r1("estimate", settings, "--json", "sft.val_generations=true", "worker.reward.reward_function=math").output
    )["phases"]
    assert sampled[0]["name"] == "sampling"
    rows = [{"messages": conversation(n)[:1]} for n in range(20)]
    write_rows(tmp_path / "rows.jsonl", rows)
    assert "data." in r1("check", settings, "--no-step", ok=False).output
