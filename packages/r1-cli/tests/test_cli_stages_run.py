"""`r1 run` with a small program in place of `r1`: what runs again, what a failure says, and what can be looked at."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from cli_pages import write_log
from click.testing import CliRunner

from r1_cli.jobs import stages as jobs
from r1_cli.main import main
from r1_cli.runs.stages import recorded_folders

STAGES = """\
output: {folder}/out
stages:
  first: {{command: merge, model: {folder}/model}}
  chosen: {{command: rows, samples: {folder}/samples, options: {{as: sft}}}}
  second: {{command: merge, model: "${{stages.first.model}}"}}
  third: {{command: merge, model: "${{stages.second.model}}"}}
"""
PROGRAM = """
import sys
from pathlib import Path
folder, command, source, _, output, *_ = map(Path, sys.argv[1:])
if (folder / "fault").is_file() and str(command) == "rows":
    sys.exit("r1: data.train_files=rows.jsonl (config.yaml:3): no such file")
if not (folder / "silent").is_file():
    output.mkdir(exist_ok=True)
    (output / "content").write_text((source / "content").read_text() + ".")
with (folder / "ran").open("a") as file:
    file.write(output.parent.name + " ")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "stages.yaml").write_text(STAGES.format(folder=tmp_path))
    (tmp_path / "program.py").write_text(PROGRAM)
    for name in ("model", "samples"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "content").write_text(name)
    monkeypatch.setattr(jobs, "R1", (sys.executable, str(tmp_path / "program.py"), str(tmp_path)))
    return tmp_path


def run(folder: Path, *words: str, code: int = 0) -> str:
    """Return the output of `r1 run`."""
    (folder / "ran").write_text("")
    result = CliRunner().invoke(main, ["run", str(folder / "stages.yaml"), *words])
    assert result.exit_code == code, result.output
    return result.output


def ran(folder: Path) -> list[str]:
    """Return the stages that `r1 run` ran."""
    run(folder)
    return (folder / "ran").read_text().split()


def test_what_has_changed_runs_again_with_all_that_reads_it_and_nothing_else(folder: Path) -> None:
    told = run(folder)
    assert (folder / "ran").read_text().split() == ["first", "chosen", "second", "third"]
    assert "r1 run: stage 2/4 chosen" in told
    assert (folder / "out/third/model/content").read_text() == "model..."
    assert ran(folder) == []
    (folder / "model/content").write_text("another")
    assert "third: r1 merge, reads second: begins" in run(folder, "--dry-run")
    assert ran(folder) == ["first", "second", "third"]
    assert (folder / "out/third/model/content").read_text() == "another..."
    assert (folder / "out/third.replaced-1/model/content").read_text() == "model..."
    (folder / "samples/more").write_text("")
    assert ran(folder) == ["chosen"]


def test_a_stage_whose_output_is_gone_runs_again(folder: Path) -> None:
    run(folder)
    shutil.rmtree(folder / "out/second/model")
    assert ran(folder) == ["second"]


def test_what_reads_an_output_that_was_changed_by_hand_runs_again(folder: Path) -> None:
    run(folder)
    (folder / "out/second/model/report.html").write_text("no data")
    (folder / "out/second/own.safetensors").write_text("not of the output")
    assert ran(folder) == []
    (folder / "out/second/model/model.safetensors").write_text("other weights")
    record = folder / "out/second.stage.json"
    record.write_text((ended := record.read_text()).replace('"ended": true', '"ended": false'))
    assert "third: r1 merge, reads second: complete" in run(folder, "--dry-run"), "its input is not complete yet"
    record.write_text(ended)
    assert "third: r1 merge, reads second: begins" in run(folder, "--dry-run")
    assert ran(folder) == ["third"]
    assert (folder / "out/third.replaced-1/model/content").is_file()
    assert ran(folder) == []


def test_a_stage_that_fails_is_named_with_the_next_command(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "fault").touch()
    told = run(folder, code=2)
    assert "r1: data.train_files=rows.jsonl (config.yaml:3): no such file" in capfd.readouterr().err
    assert re.search(f"stage chosen ended with code 1; to resume: .+ run {folder}/stages.yaml\n", told)
    assert f"r1 rows {folder}/samples --output {folder}/out/chosen/rows.parquet --as sft" in told
    assert (folder / "ran").read_text().split() == ["first"]
    assert "chosen: r1 rows: resumes" in run(folder, "--dry-run")
    assert "not complete" in (report := page_of(folder))
    assert "second" not in report
    (folder / "fault").unlink()
    assert ran(folder) == ["chosen", "second", "third"]
    assert "not complete" not in page_of(folder)


def test_a_stage_without_its_output_is_an_error(folder: Path) -> None:
    (folder / "silent").touch()
    told = run(folder, code=2)
    assert re.search(f"stage first ended without its output, {folder}/out/first/model; to resume: .+ run", told)


def page_of(folder: Path) -> str:
    result = CliRunner().invoke(main, ["report", str(folder / "out"), "--output", str(folder / "page.html")])
    assert result.exit_code == 0, result.output
    return (folder / "page.html").read_text()


def test_the_folder_is_reported_and_viewed_as_its_stages(tmp_path: Path) -> None:
    (tmp_path / "stages.json").write_text(json.dumps({"title": "r1<", "stages": ["z", "cold", "score", "later"]}))
    for name, command, output in (("z", "sample", "z"), ("cold", "sft", None), ("score", "eval", "score/result.json")):
        record = {
            "command": command,
            "typed": f"r1 {command}",
            "ended": bool(output),
            "output": output and str(tmp_path / output),
        }
        (tmp_path / f"{name}.stage.json").write_text(json.dumps({**record, "seconds": 2.0}))
        write_log(tmp_path / name, 2)
    (tmp_path / "score/result.json").write_text('{"accuracy": 0.5, "pass@1": 0.5, "avg@8": 0.625}')
    result = CliRunner().invoke(main, ["report", str(tmp_path)])
    assert result.exit_code == 0, result.output
    page = (tmp_path / "report.html").read_text()
    assert page.index("<h2>z</h2>") < page.index("<h2>cold</h2>") < page.index("<h2>score</h2>")
    assert "r1&lt;" in page
    assert "<td>avg@8 0.625</td>" in page
    assert "reward/overall: 0 to 0.5" in page
    assert 'href="cold/report.html"' in page
    assert (tmp_path / "cold/report.html").is_file()
    assert recorded_folders([tmp_path, tmp_path / "cold"]) == [tmp_path / "z", tmp_path / "cold", tmp_path / "cold"]
