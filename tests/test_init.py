"""`r1 init`: what it writes passes `r1 check` and trains, for each kind of task, by flags and by typed answers."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import pytest
from click.testing import CliRunner, Result
from endtoend import read_log

from r1_cli.jobs.new_task import TASKS
from r1_cli.main import main

# Right and half right answers of each kind, to the first of its rows.
ANSWERS = {
    "number": ["Answer: 36", "Answer: $36.00.", "so 36", "Answer: 12, then 36", "Answer: 37", "Answer: -36"],
    "choice": ["Answer: B", "Answer: (b). 23", "so B", "Answer: both", "Answer: A", "Answer: "],
    "text": ['Answer: "Paris".', "answer? Answer: paris", "Paris", "Answer: Paris, France", "Answer: Rome", "Answer:"],
    "json": [
        'Answer: {"name": "Ada Lovelace", "year": 1815}', 'Answer: {"year": 1815, "name": "Ada Lovelace"}',
        '{"name": "Ada Lovelace", "year": 1815}', 'Answer: {"name": "Ada", "year": "x"}', "Answer: [1815]", "Answer: {",
    ],
    "picture": ["Answer: red", "Answer: Red.", "red", "Answer: red circle", "Answer: blue", "Answer: "],
}  # fmt: skip
PAID = [1.0, 1.0, 0.0, 0.1, 0.1, 0.1]


def r1(*words: str, stdin: str | None = None) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(main, list(words), input=stdin)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """A tiny random model that reads what a task shows."""
    folder = tmp_path_factory.mktemp("models")

    def make(kind: str) -> str:
        family = "qwen2_5_vl" if kind == "picture" else "qwen3"
        return str(folder / family) if (folder / family).is_dir() else families.save_model(family, folder / family)

    return make


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("reward", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "kind", [kind if kind == "number" else pytest.param(kind, marks=pytest.mark.slow) for kind in TASKS]
)
def test_what_flags_or_typed_answers_write_passes_the_check_and_trains(
    kind: str, model: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flagged = r1("init", "by flags/mine", "--task", kind, "--model", model(kind), "--lora")
    assert flagged.exit_code == 0, flagged.output
    typed = r1("init", "typed", stdin=f"{kind}\n{model(kind)}\nfull\n")
    assert typed.exit_code == 0, typed.output
    for folder in ("by flags/mine", "typed"):
        config = f"{folder}/config.yaml"
        assert len(Path(config).read_text().splitlines()) <= 25
        assert len(Path(folder, "rows.jsonl").read_text().splitlines()) == 3
    checked = r1("check", "typed/config.yaml")
    assert checked.exit_code == 0, checked.output
    assert "typed/config.yaml" in typed.stdout.splitlines()[-1]
    lora = "by flags/mine/config.yaml"
    trained = r1("train", lora, "trainer.max_steps=2", "data.max_response_length=8", "worker.rollout.n=2")
    assert trained.exit_code == 0, trained.output
    (folder,) = Path("checkpoints/tasks").iterdir()
    assert folder.name == "mine"
    assert [record["step"] for record in read_log(folder) if "reward/format" in record] == [1, 2]
    assert (folder / "global_step_2/actor/adapter_model.safetensors").is_file()


@pytest.mark.parametrize("kind", TASKS)
def test_the_reward_pays_for_right_answers_in_the_form(kind: str, tmp_path: Path) -> None:
    assert r1("init", str(tmp_path / "x"), "--task", kind, "--model", "m", "--full").exit_code == 0
    truth = json.loads((tmp_path / "x/rows.jsonl").read_text().splitlines()[0])["answer"]
    given = [{"response": answer, "ground_truth": truth} for answer in ANSWERS[kind]]
    scores = load(tmp_path / "x/reward.py").compute_score(given)
    assert [one["overall"] for one in scores] == pytest.approx(PAID)
    assert [one["accuracy"] for one in scores] == [1, 1, 0, 0, 0, 0]


def test_the_reward_pays_a_share_of_the_fields(tmp_path: Path) -> None:
    r1("init", str(tmp_path / "x"), "--task", "json", "--model", "m", "--full")
    given = {
        "response": 'Answer: {"name": "Ada Lovelace", "year": 1816}',
        "ground_truth": '{"name": "Ada Lovelace", "year": 1}',
    }
    (score,) = load(tmp_path / "x/reward.py").compute_score([given])
    assert score == {"overall": pytest.approx(0.55), "accuracy": 0.0, "format": 1.0}


def test_no_file_is_overwritten_and_none_is_written_beside_one_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("mine")
    found = r1("init", str(tmp_path), "--task", "text", "--model", "m", "--full")
    assert found.exit_code == 2
    assert f"{tmp_path / 'reward.py'} exists and is not overwritten" in found.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["reward.py"]
    assert (tmp_path / "reward.py").read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "stdin", "told"),
    [
        (["--task", "poem", "--model", "m", "--full"], None, "--task poem is none of:"),
        (["--task", "text", "--model", "m"], "", "--lora or --full answer it, too"),
        (["--task", "text"], None, "was not answered"),
    ],
)
def test_what_cannot_be_written_is_a_sentence(words: list[str], stdin: str | None, told: str, tmp_path: Path) -> None:
    found = r1("init", str(tmp_path / "x"), *words, stdin=stdin)
    assert found.exit_code == 2
    assert told in found.stderr
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("name", ["a@b", "rows[1]", 'x"y', "x: y", "#x", "a\nb", "x{y}"])
def test_a_folder_whose_name_would_be_read_otherwise_is_refused(name: str, tmp_path: Path) -> None:
    found = r1("init", str(tmp_path / name), "--task", "text", "--model", "m", "--full")
    assert found.exit_code == 2
    assert "name a folder with letters" in found.stderr
