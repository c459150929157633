"""Runs on several sources, each with its own weight, reward and metrics; and the check of their rows."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from endtoend import QUICKSTART, R1, ROOT, SHORT, read_log

FOLDER = ROOT / "examples/quickstart"


def shapes(path: Path, number: int) -> Path:
    table = pq.read_table(FOLDER / "val.parquet")
    pq.write_table(table.slice(0, number), path)
    return path


def sums(path: Path) -> Path:
    rows = [
        {"prompt": [{"role": "user", "content": f"{i}+1?"}], "reward_model": {"ground_truth": str(i + 1)}}
        for i in range(12)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture
def mixture(tmp_path: Path) -> list[str]:
    """Pictures and text, the text in another format and judged by another reward."""
    picture = {"files": str(FOLDER / "train.parquet"), "name": "shapes", "weight": 3}
    text = {"files": f"{sums(tmp_path / 'sums.jsonl')}[:50%]", "name": "sums", "weight": 1}
    own = {"row_format": "verl", "reward_function": "math"}
    validation = [
        {"files": str(shapes(tmp_path / "shapes_Avg2.parquet", 3))},
        {"files": str(tmp_path / "sums.jsonl"), **own},
    ]
    return [
        "data.train_files=null", "data.val_files=null", f"data.sources={json.dumps([picture, text | own])}",
        f"data.val_sources={json.dumps(validation)}",
    ]  # fmt: skip


def test_a_mixture_trains_and_reports_each_source(r1: R1, tmp_path: Path, mixture: list[str]) -> None:
    run = ["trainer.max_steps=2", "trainer.val_freq=2", "trainer.save_freq=-1", "trainer.val_before_train=false"]
    output = r1("train", QUICKSTART, *SHORT, *run, *mixture, f"trainer.save_checkpoint_path={tmp_path / 'run'}").output
    for said in ("easyr1", "verl", "reward_model.ground_truth", "weight 3", "2 answers"):
        assert said in output
    first, last = read_log(tmp_path / "run")
    assert (first["reward/shapes/prompts"], first["reward/sums/prompts"]) == (3, 1)
    assert "reward/sums/accuracy" in first
    assert (last["val/shapes_Avg2/prompts"], last["val/sums/prompts"]) == (3, 12)
    assert {"val/shapes_Avg2/avg@2", "val/sums/avg@1", "val/sums/accuracy_reward"} <= last.keys()
    per_prompt = (3 * last["val/shapes_Avg2/reward_score"] + 12 * last["val/sums/reward_score"]) / 15
    assert last["val/reward_score"] == pytest.approx(per_prompt)


def test_eval_reports_each_source(r1: R1, tmp_path: Path, mixture: list[str]) -> None:
    r1("eval", FOLDER / "model", QUICKSTART, *mixture, "--json", tmp_path / "result.json")
    result = json.loads((tmp_path / "result.json").read_text())
    assert {"accuracy", "shapes_Avg2/avg@2", "sums/avg@1"} <= result.keys()


def test_a_clean_mixture_passes_the_check(r1: R1, mixture: list[str]) -> None:
    result = r1("data", "check", QUICKSTART, *mixture, f"data.sources={shrink(mixture)}")
    assert "a step has about" in result.output
    assert "error" not in result.output


def test_the_check_finds_the_same_in_several_processes(r1: R1) -> None:
    def lines(workers: int) -> list[str]:
        rows = "data.train_files=examples/quickstart/val.parquet", "data.val_files=null", "data.max_prompt_length=34"
        output = r1("data", "check", QUICKSTART, *rows, f"data.filter_overlong_prompts_workers={workers}").output
        return output.splitlines()

    assert lines(2) == lines(1)
    assert any("prompts over data.max_prompt_length" in line for line in lines(1))


def shrink(mixture: list[str]) -> str:
    sources = json.loads(mixture[2].removeprefix("data.sources="))
    sources[0]["files"] += "[:20]"
    return json.dumps(sources)


def test_the_check_names_bad_rows_in_a_table_and_on_a_page(r1: R1, tmp_path: Path) -> None:
    rows = pq.read_table(FOLDER / "train.parquet").to_pylist()[:12]
    rows[2]["images"][0]["bytes"] = rows[2]["images"][0]["bytes"][:60]
    rows[3]["answer"] = " "
    rows[4]["problem"] = "<image><image>?"
    rows[5]["answer"] = "<script>alert(1)</script> 9"
    rows[6] = dict(rows[1])
    rows[7] = dict(rows[1], answer="17")
    schema = pq.read_schema(FOLDER / "train.parquet")
    pq.write_table(pa.Table.from_pylist(rows, schema), tmp_path / "bad.parquet")
    pq.write_table(pa.Table.from_pylist(rows[:1], schema), tmp_path / "val.parquet")
    page = tmp_path / "report.html"
    files = f"data.train_files={tmp_path / 'bad.parquet'}", f"data.val_files={tmp_path / 'val.parquet'}"
    result = r1("data", "check", QUICKSTART, *files, "worker.reward.reward_function=gsm8k", "--html", page,
                "--rows", tmp_path / "rows.jsonl", ok=False)  # fmt: skip
    assert result.exit_code == 1
    for said in (
        "bad.parquet:3: picture", "bad.parquet:4: the answer is empty", "bad.parquet:5: 2 <image> markers",
        "bad.parquet:7: asks what bad.parquet:2 asks", "but answers '17'",
        "val.parquet:1: is training row bad.parquet:1",
    ):  # fmt: skip
        assert said in result.output, said
    bad = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert {"bad.parquet:3", "bad.parquet:4", "bad.parquet:5"} <= {found["row"] for found in bad}
    assert all(found["reason"] for found in bad)
    html = page.read_text()
    assert "<script>" not in html
    assert "&lt;script&gt;alert(1)" in html
    assert html.count("data:image/jpeg;base64,") >= 6
    assert "http" not in html.replace("http-equiv", "")


def test_the_check_finds_answers_that_the_reward_cannot_read(r1: R1, tmp_path: Path) -> None:
    rows = [{"question": f"{i}?", "answer": answer} for i, answer in enumerate(["#### 3", "many", "7"])]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    words = [f"data.train_files={path}", "data.val_files=null", "data.prompt_key=question"]
    result = r1("data", "check", QUICKSTART, *words, "worker.reward.reward_function=gsm8k", ok=False)
    assert result.exit_code == 1
    assert "rows.jsonl:2: gsm8k can use no response: the truth 'many' has no number" in result.output
    assert "1 × answers that their own reward gives no credit" in result.output


def test_a_row_is_shown_by_number_or_id(r1: R1) -> None:
    for row in ("3", "val.parquet:3"):
        output = r1("data", "show", QUICKSTART, "--val", "--row", row).output
        assert "val.parquet:3" in output
        assert "112 × 112" in output
        assert "<|image_pad|>" in output
    result = r1("data", "show", QUICKSTART, "--row", "val.parquet:3", ok=False)
    assert result.exit_code == 2
    assert "there is no row val.parquet:3" in result.stderr


def test_help_loads_nothing_heavy() -> None:
    code = "import sys; from r1_cli.main import main; import r1_cli.commands.data; "
    code += (
        "found = {'torch', 'transformers', 'rich', 'pydantic', 'jinja2'} & set(sys.modules); assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
