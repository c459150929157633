"""`r1 eval --output`: answers that are kept, resumed, graded again and compared."""

import json
import shutil
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pyarrow.parquet as pq
import pytest
import torch
from chat_server import reply, served
from endtoend import QUICKSTART, R1
from transformers import AutoModelForImageTextToText

from r1_cli.config.suites import published_figures
from r1_cli.jobs import sample
from r1_cli.runs.rows.parts import SampleFolder
from r1_rewards.services.endpoint import Patience

MODEL = "examples/quickstart/model"
ROWS, N = 40, 2
WORDS = [
    QUICKSTART, "data.filter_overlong_prompts_workers=1", f"data.val_files=examples/quickstart/val.parquet[:{ROWS}]",
    "worker.rollout.val_override_config.temperature=1", "--n", str(N),
]  # fmt: skip


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "MOST_ANSWERS", 32)
    monkeypatch.setattr(sample, "PAID_ANSWERS", 32)
    monkeypatch.setattr("r1_cli.build.endpoint.Patience", partial(Patience, backoff=0.01))


def parts(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "samples").iterdir())}


@pytest.fixture(scope="module")
def whole(r1: R1, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "answers"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample, "MOST_ANSWERS", 32)
        r1("eval", MODEL, *WORDS, "--output", folder, "--json", folder.parent / "result.json")
    return folder


def test_a_killed_evaluation_goes_on_where_it_was(
    whole: Path, r1: R1, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks, sample_block = Counter[str](), sample.sample_block

    def killed_in_the_second(*words: Any) -> None:
        blocks["begun"] += 1
        if blocks["begun"] == 2:
            raise KeyboardInterrupt
        sample_block(*words)

    with monkeypatch.context() as patch:
        patch.setattr(sample, "sample_block", killed_in_the_second)
        with pytest.raises((KeyboardInterrupt, AssertionError)):
            r1("eval", MODEL, *WORDS, "--output", tmp_path)
    assert [*parts(tmp_path)] == [next(iter(parts(whole)))]
    ended = r1("eval", MODEL, *WORDS, "--output", tmp_path, "--json", tmp_path / "result.json")
    assert parts(tmp_path) == parts(whole)
    assert json.loads((tmp_path / "manifest.json").read_text())["starts"][-1]["counts"]["there"] == 16
    ours, theirs = (json.loads((one / "result.json").read_text()) for one in (tmp_path, whole.parent))
    assert ours == theirs
    low, high = ours["intervals"]["avg@2"]
    assert 0 <= low < ours["avg@2"] < high <= 1
    assert "80 % power, by the answers that are there" in ended.output.replace("\n", " ")


def test_the_same_grader_gives_the_stored_scores_to_the_bit_and_another_is_not_compared(
    whole: Path, r1: R1, tmp_path: Path
) -> None:
    ended = r1("eval", "--regrade", whole, "--json", tmp_path / "same.json")
    assert f"0 of {ROWS * N} answers get another score" in ended.output
    before, same = (json.loads(path.read_text()) for path in (whole.parent / "result.json", tmp_path / "same.json"))
    assert {**same, "model": before["model"]} == before
    strict = tmp_path / "strict.py"
    strict.write_text("def grade(inputs):\n    return [float(len(item['response']) % 2) for item in inputs]\n")
    ended = r1("eval", "--regrade", whole, "--grader", f"{strict}:grade", "--output", tmp_path / "again")
    assert f"{ROWS * N} of {ROWS * N} answers get another score" in ended.output  # they have other parts
    found = [one for path in sorted((tmp_path / "again/samples").iterdir()) for one in pq.read_table(path).to_pylist()]
    assert [one["score"] for one in found] == [float(len(one["answer"]) % 2) for one in found]
    ended = r1("eval", "--compare", whole, tmp_path / "again", ok=False)
    assert "val has another grader in" in ended.stderr
    assert "0 of 80 answers get another score" in r1("eval", "--regrade", tmp_path / "again", "--grader",
                                                      f"{strict}:grade").output  # fmt: skip
    ended = r1("eval", "--compare", whole, whole, "--json", tmp_path / "compared.json")
    assert "p 1 (sign flips, mid-p; exact 1): not significant" in ended.output
    assert "Answers of step 2" in Path(r1("report", whole).output.split(" (")[0]).read_text()


def test_an_endpoint_that_throttles_and_dies_answers_nothing_twice(whole: Path, r1: R1, tmp_path: Path) -> None:
    answered, dead = Counter[int](), [True]

    def answer(body: dict[str, Any], number: int) -> tuple[int, object]:
        if number % 5 == 0:
            return 429, {}
        if dead[0] and body["seed"] % 7 == 0:
            return 400, {"error": "content policy"}
        answered[body["seed"]] += 1
        return 200, reply("\\boxed{2}")

    server = [*WORDS, "--served-name", "other", "--timeout", "20", "--concurrency", "4", "--output", tmp_path / "b"]
    with served(answer) as (address, _):
        ended = r1("eval", address, *server, ok=False)
        assert "are missing or could not be graded, more than 1%: run the same command again" in ended.stderr
        assert "avg@2" not in ended.output
        ended = r1("eval", address, *server, "--partial")
        assert "the share of right answers is from" in ended.output.replace("\n", " ")
        dead[0] = False
        r1("eval", address, *server)
    assert len(answered) == ROWS * N
    assert set(answered.values()) == {1}
    ended = r1("eval", "--compare", whole, tmp_path / "b")
    assert f"val, {ROWS} rows, 2 answers a row" in ended.output
    shutil.rmtree(tmp_path / "b")
    ended = r1("eval", "http://127.0.0.1:9/v1", *WORDS, "--served-name", "other", ok=False)
    assert "--output is missing" in ended.stderr


@pytest.fixture
def sums(tmp_path: Path) -> list[str | Path]:
    """The words for a suite of four rows."""
    rows = [json.dumps({"problem": f"Is {one} even?", "answer": "AB"[one % 2]}) for one in range(4)]
    (tmp_path / "sums.jsonl").write_text("\n".join(rows))
    (tmp_path / "sums.yaml").write_text(
        "{title: Sums, page: here, rows: {hub: me/sums, columns: [problem, answer]}, question: problem,\n"
        "answer: {column: answer}, grader: choice, groups: [answer], sample: {n: 2, max_tokens: 8},\n"
        "prompts: {boxed: {text: '{{ content }} In a box.', source: me}, plain: {text: '{{ content }}', source: me}},\n"
        "published: [{model: theirs, value: 0.5, prompt: boxed, source: page 3},\n"
        "  {model: others, value: 0.6, prompt: plain, source: page 4}]}"
    )
    return ["--suite", tmp_path / "sums.yaml", "--data-root", tmp_path, "data.max_prompt_length=64",
            "data.filter_overlong_prompts_workers=1"]  # fmt: skip


def test_a_suite_brings_rows_prompt_grader_and_published_figures_of_its_prompt(
    sums: list[str | Path], r1: R1, tmp_path: Path
) -> None:
    words = ["eval", MODEL, *sums]
    ended = r1(*words, "--output", tmp_path / "boxed", "--json", tmp_path / "result.json")
    assert "published, sums/boxed: theirs 0.500 (page 3)" in ended.output
    assert "others" not in ended.output
    assert "sums/boxed by answer" in ended.output
    (of_set,) = json.loads((tmp_path / "result.json").read_text())["sets"].values()
    assert {value: rows for value, (rows, *_) in of_set["groups"]["answer"].items()} == {"A": 2, "B": 2}
    found = [one for path in (tmp_path / "boxed/samples").iterdir() for one in pq.read_table(path).to_pylist()]
    assert len(found) == 8
    assert all("In a box." in one["prompt"] for one in found)
    assert "0 of 8 answers get another score" in r1("eval", "--regrade", tmp_path / "boxed").output
    broken = tmp_path / "own.py"
    broken.write_text("def grade(inputs):\n    raise ValueError('no')\n")
    words = ["eval", "--regrade", tmp_path / "boxed", "--grader", f"{broken}:grade", "--output", tmp_path / "failed"]
    assert "are missing or could not be graded, more than 1%: correct the grader" in r1(*words, ok=False).stderr
    assert "the new scores are stored" in r1("eval", "--regrade", tmp_path / "failed").output
    assert "0 of 8 answers get another score" in r1("eval", "--regrade", tmp_path / "failed").output
    assert published_figures([str(tmp_path / "sums.yaml")], "plain") == ["published, sums/plain: others 0.600 (page 4)"]


def texts(folder: Path) -> list[str]:
    return [one["answer"] for path in sorted((folder / "samples").iterdir()) for one in pq.read_table(path).to_pylist()]


def write_adapter(adapter: Path, merged: Path) -> None:
    """Write a random adapter of the model, and the model with it, as peft merges them."""
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(AutoModelForImageTextToText.from_pretrained(MODEL), config)
    model.save_pretrained(adapter)
    shutil.copytree(MODEL, merged)
    model.merge_and_unload().save_pretrained(merged)


def test_a_killed_watch_goes_on_where_it_was_and_compares_with_the_model_that_the_run_began_with(
    sums: list[str | Path], r1: R1, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    shutil.copytree(MODEL, run / "global_step_2/actor")
    (run / "global_step_2/trainer.json").write_text("{}")
    (run / "experiment_config.json").write_text(json.dumps({"worker": {"actor": {"model": {"model_path": MODEL}}}}))
    (run / "experiment_log.jsonl").write_text('{"step": 2, "reward/overall": 0.5}\n')
    words = ["eval", "--watch", run, *sums, "--guard", sums[1]]
    blocks, sample_block = list[Path](), sample.sample_block

    def killed_in_the_second(folder: SampleFolder, *words: Any) -> None:
        blocks.append(folder.path)
        if len(blocks) == 2:
            raise KeyboardInterrupt
        sample_block(folder, *words)

    monkeypatch.setattr(sample, "sample_block", killed_in_the_second)
    monkeypatch.setattr("sys.argv", ["r1", *map(str, words)])
    ended = r1(*words, ok=False)
    assert ended.exit_code == 130
    assert f"eval --watch {run} --suite" in ended.stderr.splitlines()[-1]
    ended = r1(*words)
    assert [path.name for path in blocks] == ["start", "global_step_2", "global_step_2"]
    assert "published, sums/boxed: theirs 0.500 (page 3)" in ended.output
    lines = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    start, end = lines
    assert (start["step"], end["step"], end["eval/sums/boxed/change"], end["eval/sums/boxed/change/p"]) == (0, 2, 0, 1)
    assert start["eval/sums/boxed/avg@2"] == end["eval/sums/boxed/avg@2"]
    assert "Evaluations of checkpoints" in Path(r1("report", run).output.split(" (")[0]).read_text()
    shutil.rmtree(run / "evaluations")
    write_adapter(tmp_path / "adapter", tmp_path / "merged")
    about = {"model_path": MODEL, "lora": {"path": str(tmp_path / "adapter")}}
    (run / "experiment_config.json").write_text(json.dumps({"worker": {"actor": {"model": about}}}))
    r1(*words)
    r1("eval", tmp_path / "merged", *sums, "--output", tmp_path / "of-merged")
    answers = [
        texts(run / "evaluations/start"),
        texts(tmp_path / "of-merged"),
        texts(run / "evaluations/global_step_2"),
    ]
    assert answers[0] == answers[1] != answers[2]
    shutil.rmtree(run / "global_step_2")
    monkeypatch.chdir(tmp_path)
    ended = r1(*words, ok=False)
    assert "the model that" in ended.stderr
    assert "is not there (examples/quickstart/model): work in the folder" in ended.stderr
