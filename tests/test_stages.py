"""`r1 run` of whole files of stages: one killed at several moments, and the example, shortened."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from forked import Forked
from patience import eventually

from r1_cli.config.stages import read_stages
from r1_cli.jobs.stages import StageRun

ROOT = Path(__file__).parents[1]

STAGES = """\
base: examples/quickstart/config.yaml
output: {output}
stages:
  answers: {{command: sample, model: examples/quickstart/model, options: {{n: 2, limit: 8, block: 4}}}}
  chosen: {{command: rows, samples: "${{stages.answers.samples}}", options: {{as: sft, few: true}}}}
  cold:
    command: sft
    settings: {{
      data.train_files: "${{stages.chosen.rows}}", data.prompt_key: prompt, data.val_files: null, data.max_length: 128,
      worker.actor.global_batch_size: 2, trainer.max_steps: 6, trainer.save_freq: 1, trainer.logger: [file],
      worker.actor.micro_batch_size_per_device_for_update: 2, worker.actor.micro_batch_size_per_device_for_experience: 4
    }}
  train:
    command: train
    settings: {{
      worker.actor.model.model_path: "${{stages.cold.model}}", trainer.max_steps: 3, trainer.save_freq: 1,
      trainer.val_freq: -1, trainer.val_before_train: false, trainer.logger: [file],
      worker.actor.micro_batch_size_per_device_for_update: 2, worker.actor.micro_batch_size_per_device_for_experience: 4
    }}
  merged: {{command: merge, model: "${{stages.train.model}}"}}
  score: {{command: eval, model: "${{stages.train.model}}", settings: {{data.val_files: "examples/quickstart/val.parquet[:8]"}}}}
"""  # noqa: E501
# With sizes of micro-batches, because the runs that are compared are in two folders, and `auto` may find two sizes.


@pytest.mark.parametrize("page", ["docs/stages.md", "examples/r1_stages/stages.yaml"])
def test_a_published_file_is_accepted(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = (ROOT / page).read_text()
    (file := tmp_path / "stages.yaml").write_text(text.partition("```yaml\n")[2].partition("```")[0] or text)
    run = StageRun(read_stages(file))
    run.check()
    cold = run.words(next(one for one in run.stages if one.name == "cold"))
    steps = [word for word in cold if word.startswith("trainer.max_steps=")]
    assert steps, "the 140 steps of base win over sft.epochs"


# What is there when `r1 run` is killed: a block of two, the chosen rows, a checkpoint, a step, a model folder.
MOMENTS = (
    "answers/samples/*.parquet",
    "chosen/rows.parquet",
    "cold/global_step_2",
    "train/experiment_log.jsonl",
    "merged/model/config.json",
)


# `r1 run` of which each stage is a fork: starting Python anew takes longer than most of these stages. Stages that are
# started anew, and signals to them, are those of test_cli_stage_process.py.
FORKING = """
import os
from multiprocessing import get_context
from r1_cli.jobs import stages
from r1_cli.main import main
from r1_rewards.sandbox.jail.kernel import die_with_parent

def run_stage(parent, words):
    die_with_parent(parent)
    main(words)

def run_command(words):
    process = get_context("fork").Process(target=run_stage, args=(os.getpid(), words))
    process.start()
    process.join()
    return process.exitcode, None

stages.run_command = run_command
main()
"""


def start(file: Path) -> Forked:
    return Forked("run", str(file), program=FORKING)


def outputs(folder: Path) -> dict[str, bytes]:
    """The files by which outputs are used: answers, rows, weights, results."""
    kinds = (
        "answers/samples/*.parquet",
        "*/rows.parquet",
        "*/global_step_*/actor/*",
        "merged/model/*",
        "*/result.json",
    )
    files = [path for kind in kinds for path in folder.glob(kind) if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(files)}


@pytest.mark.slow
def test_stages_that_are_killed_end_as_those_that_are_not(tmp_path: Path) -> None:
    output, file = tmp_path / "out", tmp_path / "stages.yaml"
    file.write_text(STAGES.format(output=output))
    told = (whole := start(file)).communicate()
    assert whole.returncode == 0, told
    output.rename(tmp_path / "whole")
    for moment in MOMENTS:
        run = start(file)
        eventually(lambda run=run, moment=moment: run.poll() is not None or [*output.glob(moment)])
        assert run.poll() is None, f"ended before {moment}: {run.communicate()}"
        run.kill()
        run.communicate()
    told = (last := start(file)).communicate()
    assert last.returncode == 0, told  # and no stage of the killed ones holds its folder
    ours, theirs = outputs(output), outputs(tmp_path / "whole")
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []
    assert {Path(name).name for name in ours} >= {"rows.parquet", "result.json", "model.safetensors"}


def shorten(name: str, stage: dict[str, Any]) -> dict[str, Any] | None:
    """A stage of the example with few rows and steps; None for all evaluations but the last."""
    command, settings = stage["command"], stage.get("settings", {})
    if command == "eval":
        few = {"data.val_files": "examples/quickstart/val.parquet[:8]", "worker.rollout.val_override_config.n": 1}
        return {**stage, "settings": few} if name == "final_score" else None
    if command == "sample":
        return {**stage, "options": {"n": 2, "limit": 16}}
    if command in ("sft", "train"):
        few = {"trainer.max_steps": 1, "worker.actor.global_batch_size": 2, "trainer.logger": ["file"]}
        few |= {"data.rollout_batch_size": 2, "worker.rollout.n": 2} if command == "train" else {}
        return {**stage, "settings": {**settings, **few}}
    return stage


@pytest.mark.slow
def test_the_example_runs_every_stage_once(tmp_path: Path) -> None:
    told = yaml.safe_load((ROOT / "examples/r1_stages/stages.yaml").read_text())
    stages = {name: short for name, one in told["stages"].items() if (short := shorten(name, one))}
    (file := tmp_path / "stages.yaml").write_text(
        yaml.safe_dump({**told, "output": str(tmp_path / "out"), "stages": stages}, sort_keys=False)
    )
    first = (run := start(file)).communicate()
    assert run.returncode == 0, first
    assert [line.split()[-1] for line in first.splitlines() if line.startswith("r1 run: stage")] == [*stages]
    assert re.search(
        r"complete: .*report.html\n  final_score: \S+ [01]\.\d{3}\nnext: .* chat .*/final/.*\n +.* view ", first
    )
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.safetensors")}
    again = (run := start(file)).communicate()
    assert run.returncode == 0, again
    assert again.count(": complete\n") == len(stages) == 9
    assert "r1 run: stage" not in again
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.safetensors")}
    page = (tmp_path / "out/report.html").read_text()
    assert all(f"<h2>{name}</h2>" in page for name in stages)
