"""`r1 run`: the file of stages, their order, what makes a stage run again, and a kill."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from r1_cli.config.problems import ConfigError
from r1_cli.config.stages import Stages, read_stages, resolve
from r1_cli.jobs import stages as jobs
from r1_cli.jobs.stages import StageError, StageRun, digest_of

CHOOSE = """\
output: {folder}/out
base: {folder}/base.yaml
stages:
  score: {{command: eval, model: "${{stages.cold.model}}"}}
  cold: {{command: sft, settings: {{data.train_files: "${{stages.chosen.rows}}", sft: {{epochs: 2}}}}}}
  chosen: {{command: rows, samples: "${{stages.answers.samples}}", options: {{as: sft, keep_cut: true, few: false}}}}
  answers: {{command: sample, model: {folder}/model.bin, options: {{n: 8}}}}
"""


def read(folder: Path, text: str = CHOOSE) -> Stages:
    (folder / "base.yaml").write_text("trainer: {max_steps: 3}\n")
    (folder / "model.bin").write_text("weights")
    file = folder / "stages.yaml"
    file.write_text(text.format(folder=folder))
    return read_stages(file)


def test_a_stage_runs_behind_those_that_it_reads_with_their_outputs(tmp_path: Path) -> None:
    run, out = StageRun(read(tmp_path)), tmp_path / "out"
    assert [one.name for one in run.stages] == ["answers", "chosen", "cold", "score"]
    answers, chosen, cold, score = map(run.words, run.stages)
    config = f"config={tmp_path}/base.yaml"
    assert answers == ["sample", f"{tmp_path}/model.bin", config, "--output", f"{out}/answers", "--n", "8"]
    assert chosen == [
        "rows", f"{out}/answers", "--output", f"{out}/chosen/rows.parquet", "--as", "sft", "--keep-cut",
    ]  # fmt: skip
    rows = f'data.train_files="{out}/chosen/rows.parquet"'
    assert cold == ["sft", config, rows, "sft.epochs=2", f"trainer.save_checkpoint_path={out}/cold"]
    assert score == ["eval", f"{out}/cold", config, "--json", f"{out}/score/result.json"]
    (out / "cold/actor").mkdir(parents=True)
    assert jobs._weights(out / "cold") == out / "cold/actor"  # where config.json is
    assert resolve(["a", "${stages.x.rows}/b"], {"x": Path("c")}) == ["a", "c/b"]


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("command: eval", "command: evl", r"stages.score.command=evl \(.*stages.yaml:4\): .*did you mean eval"),
        ("stages.cold.model", "stages.cool.model", r"stages.score.model=.*:4\): there is no stage cool; .*mean cold"),
        ("stages.cold.model", "stages.cold.rows", r"stage cold \(r1 sft\) has no rows; its output is model"),
        ("stages.cold.model", "stages.cold", r"write \$\{stages.NAME.OUTPUT\}"),
        (
            "options: {{n: 8}}",
            "option: {{n: 8}}",
            r"stages.answers.option.n=8 .*:7\): unknown key; did you mean options",
        ),
        ("{folder}/model.bin", '"${{stages.cold.model}}"', "stages wait for one another: score needs cold; cold needs"),
        ("command: rows, samples", "command: rows, model", r"stages.chosen.samples .*: r1 rows needs samples: …"),
        ("base: {folder}/base.yaml\n", "", r"stages.score.config .*needs a configuration"),
        ("output: {folder}/out\n", "", "output .*is missing"),
    ],
)
def test_a_mistake_is_named_with_its_line_and_key(tmp_path: Path, before: str, after: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, CHOOSE.replace(before, after))


def test_a_wrong_key_of_a_stages_configuration_is_named_before_anything_runs(tmp_path: Path) -> None:
    text = CHOOSE.replace("sft: {{epochs: 2}}", "sft: {{epoch: 2}}")
    with pytest.raises(ConfigError, match=r"stages.cold: sft.epoch.*unknown key; did you mean sft.epochs"):
        StageRun(read(tmp_path, text)).check()


def test_only_inputs_change_a_digest_and_those_of_later_stages_with_it(tmp_path: Path) -> None:
    def digests() -> list[str]:
        found: dict[str, str] = {}
        for one in read_stages(tmp_path / "stages.yaml").stages:
            found[one.name] = digest_of(one, found)
        return [*found.values()]

    read(tmp_path)
    first = digests()
    assert digests() == first
    (tmp_path / "model.bin").write_text("WEIGHTS")
    assert all(one != other for one, other in zip(first, digests(), strict=True))
    (tmp_path / "model.bin").write_text("weights")
    file = tmp_path / "stages.yaml"
    file.write_text(file.read_text().replace("epochs: 2", "epochs: 3"))
    assert [one == other for one, other in zip(first, digests(), strict=True)] == [True, True, False, False]


def test_a_stage_stands_resumes_or_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = 1

    def run_command(words: list[str]) -> tuple[int, int | None]:
        if not code:
            Path(words[words.index("--output") + 1], "part").write_text(words[-1])
        return code, None

    monkeypatch.setattr(jobs, "run_command", run_command)
    run = StageRun(read(tmp_path))
    answers = run.stages[0]
    assert run.states()["answers"] == "begins"
    with pytest.raises(
        StageError, match=r"stage answers ended with code 1; to resume: .+ run .*stages.yaml\n.*r1 sample"
    ):
        run.run(answers)
    assert run.states()["answers"] == "resumes"
    code = 0
    run.run(answers)
    assert StageRun(read(tmp_path)).states() == {
        "answers": "complete", "chosen": "begins", "cold": "begins", "score": "begins",
    }  # fmt: skip
    changed = StageRun(read(tmp_path, CHOOSE.replace("n: 8", "n: 4")))
    assert changed.states()["answers"] == "begins"
    changed.run(changed.stages[0])
    assert (tmp_path / "out/answers/part").read_text() == "4"
    assert (tmp_path / "out/answers.replaced-1/part").read_text() == "8"


@pytest.mark.slow
def test_stages_run_their_commands_and_stand_afterwards(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    file = tmp_path / "stages.yaml"
    file.write_text(
        f"""\
base: examples/quickstart/config.yaml
output: {tmp_path}/out
stages:
  first:
    command: train
    settings: {{trainer.max_steps: 1, trainer.val_freq: -1, trainer.val_before_train: false, trainer.logger: [file]}}
  merged: {{command: merge, model: "${{stages.first.model}}"}}
"""
    )

    def run() -> str:
        done = subprocess.run(
            [sys.executable, "-m", "r1_cli.main", "run", str(file)],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "all 2 stages are complete" in run()
    record = json.loads((tmp_path / "out/merged.stage.json").read_text())
    again = run()
    assert again.count(": complete") == 2
    assert json.loads((tmp_path / "out/merged.stage.json").read_text()) == record
    assert (tmp_path / "out/merged/model/config.json").is_file()
    assert "first/report.html" in (tmp_path / "out/report.html").read_text()
