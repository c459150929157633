"""`r1 sample`: answers once, whatever was killed, torn, sharded or changed meanwhile."""

import io
import json
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from endtoend import QUICKSTART, R1, ROOT, SMALL, read_log
from episode_runs import write_environment
from faults_table import note_fault
from forked import Forked
from patience import eventually
from PIL import Image

MODEL = "examples/quickstart/model"
ROWS = 24
FEW = [
    "data.filter_overlong_prompts_workers=1", f"data.train_files=examples/quickstart/train.parquet[:{ROWS}]",
    "--n", "2", "--block", "8",
]  # fmt: skip
WORDS = ["sample", MODEL, QUICKSTART, *FEW]


def parts(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "samples").iterdir())}


def starts(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "manifest.json").read_text())["starts"]
    return found


@pytest.fixture(scope="module")
def whole(r1: R1, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "samples"
    r1(*WORDS, "--output", folder)
    return folder


def test_answers_are_recorded_as_those_of_a_run(whole: Path, r1: R1) -> None:
    table = pa.concat_tables([pq.read_table(path) for path in sorted((whole / "samples").iterdir())])
    assert set(table["phase"].to_pylist()) == {"sample"}
    assert table["prompt_id"].to_pylist() == [f"train.parquet:{row}" for row in range(1, ROWS + 1) for _ in range(2)]
    assert table["sample"].to_pylist() == [0, 1] * ROWS
    assert len(set(table["key"].to_pylist())) == ROWS
    assert {len(name) for name in table["media"].to_pylist()} == {1}
    assert starts(whole)[0]["counts"]["groups"] == ROWS
    assert starts(whole)[0]["end"] == "complete"
    assert "Answers of step 2" in Path(r1("report", whole).output.split(" (")[0]).read_text()


def test_shards_write_the_files_of_a_single_process(whole: Path, r1: R1, tmp_path: Path) -> None:
    for number in (3, 1, 2):
        r1(*WORDS, "--output", tmp_path, "--shard", f"{number}/3")
    assert parts(tmp_path) == parts(whole)
    assert [one["counts"]["groups"] for one in starts(tmp_path)] == [8, 8, 8]


def test_a_torn_and_a_missing_part_are_sampled_again_and_nothing_else(whole: Path, r1: R1, tmp_path: Path) -> None:
    folder = shutil.copytree(whole, tmp_path / "samples")
    first, second, _ = sorted((folder / "samples").iterdir())
    first.unlink()
    os.truncate(second, 1000)
    r1(*WORDS, "--output", folder)
    assert parts(folder) == parts(whole)
    assert starts(folder)[-1]["counts"]["there"] == ROWS // 3
    ended = r1(*WORDS, "--output", folder, "worker.rollout.temperature=0.5", ok=False)
    assert "sampling.temperature was 1.0, is 0.5" in ended.stderr


def test_rows_that_have_changed_are_named_sampled_again_and_put_aside(whole: Path, r1: R1, tmp_path: Path) -> None:
    folder = shutil.copytree(whole, tmp_path / "samples")
    rows = pq.read_table(ROOT / "examples/quickstart/train.parquet").slice(0, ROWS)
    answers = rows["answer"].to_pylist()
    before, answers[5] = answers[5], "9"
    column = rows.schema.get_field_index("answer")
    rows = rows.set_column(column, rows.schema.field(column), pa.array(answers, rows.schema.field(column).type))
    file = tmp_path / "train.parquet"
    pq.write_table(rows, file)
    words = [word.replace("examples/quickstart/train.parquet", str(file)) for word in WORDS]
    ended = r1(*words, "--output", folder)
    assert "1 rows have changed since they were sampled, and are sampled again: train.parquet:6" in ended.output
    (old,) = (folder / "aside").iterdir()
    assert pq.read_table(old)["ground_truth"].to_pylist() == [before] * 2
    now, then = (pq.read_table(f / "samples/000000000-sample.parquet").to_pylist() for f in (folder, whole))
    assert [a["prompt_id"] for a, b in zip(now, then, strict=True) if a != b] == ["train.parquet:6"] * 2
    assert now[10]["ground_truth"] == "9"


def test_rows_are_chosen_with_their_messages_pictures_and_pass_rates(whole: Path, r1: R1, tmp_path: Path) -> None:
    def write(*words: str) -> list[dict[str, Any]]:
        file = tmp_path / f"{len(list(tmp_path.iterdir()))}.parquet"
        ended = r1("rows", whole, "--output", file, *words)
        rows: list[dict[str, Any]] = pq.read_table(file).to_pylist()
        assert f"{file}: {len(rows)} rows of" in ended.output
        return rows

    source = pq.read_table(ROOT / "examples/quickstart/train.parquet").slice(0, ROWS).to_pylist()
    recorded = pa.concat_tables([pq.read_table(path) for path in sorted((whole / "samples").iterdir())]).to_pylist()
    by_row = [recorded[at : at + 2] for at in range(0, 2 * ROWS, 2)]
    right = [any(dict(one["parts"])["accuracy"] > 0 for one in pair) for pair in by_row]

    examples = write("--as", "sft", "--control")
    assert [one["prompt_id"] for one in examples] == [
        pair[0]["prompt_id"] for pair, passed in zip(by_row, right, strict=True) if passed
    ]
    place = right.index(True)
    asked, answered = examples[0]["messages"]
    assert asked == {"role": "user", "content": source[place]["problem"]}
    assert answered["content"] in [one["answer"] for one in by_row[place]]
    assert examples[0]["images"] == [{"bytes": source[place]["images"][0]["bytes"], "path": None}]
    assert pq.read_table(tmp_path / "0.control.parquet").num_rows == len(examples)

    rates = write("--as", "rates")
    assert [{name: one[name] for name in source[0]} for one in rates] == source
    assert [one["pass_rate"] > 0 for one in rates] == right

    nobody = tmp_path / "reward.py"
    nobody.write_text("def score(inputs):\n    return [float(item['response_length'] % 2) for item in inputs]\n")
    again = write("--as", "sft", "--keep", "all", "--rescore", f"{nobody}:score")
    assert {one["score"] for one in again} == {1.0}
    pairs = write("--as", "pairs", "--few")
    assert {one["score_chosen"] > one["score_rejected"] for one in pairs} == {True}
    ended = r1("rows", whole, "--as", "sft", "--band", "0.6:0.9", "--output", tmp_path / "none.parquet", ok=False)
    assert "nothing is left\nrows by pass rate:" in ended.stderr


def test_rows_that_have_changed_since_they_were_sampled_are_not_written(whole: Path, r1: R1, tmp_path: Path) -> None:
    folder = shutil.copytree(whole, tmp_path / "samples")
    settings = json.loads((folder / "experiment_config.json").read_text())
    settings["data"]["train_files"] = "examples/quickstart/train.parquet[20:30]"
    (folder / "experiment_config.json").write_text(json.dumps(settings))
    ended = r1("rows", folder, "--as", "rates", "--output", tmp_path / "rates.parquet")
    assert "20 rows have changed since they were sampled, and are left out" in ended.output
    assert pq.read_table(tmp_path / "rates.parquet").num_rows == 4
    settings["data"]["train_files"] = "examples/quickstart/val.parquet[:4]"
    (folder / "experiment_config.json").write_text(json.dumps(settings))
    ended = r1("rows", folder, "--as", "rates", "--output", tmp_path / "none.parquet", ok=False)
    assert "none of the rows is as it was sampled" in ended.stderr


@pytest.mark.slow
def test_training_and_fine_tuning_read_the_rows_of_a_band(whole: Path, r1: R1, tmp_path: Path) -> None:
    r1("rows", whole, "--as", "rates", "--output", tmp_path / "rated.parquet")
    r1("rows", whole, "--as", "sft", "--output", tmp_path / "sft.parquet")
    rates = {row["prompt_id"]: row["pass_rate"] for row in pq.read_table(tmp_path / "sft.parquet").to_pylist()}
    inside = sum(rate == 0.5 for rate in rates.values())
    curriculum = ["data.curriculum.by=pass_rate", "data.curriculum.order=easy_first"]
    rated, train = f"data.train_files={tmp_path / 'rated.parquet'}", tmp_path / "train"
    words = [QUICKSTART, *SMALL, rated, *curriculum, "data.val_files=null", "data.rollout_batch_size=2"]
    # In parts, by resuming; the second half of the rows in the band never begins an epoch.
    steps = ["trainer.save_freq=1", f"trainer.save_checkpoint_path={train}", "trainer.record_gb=1"]
    ended = r1("train", *words, *steps, "data.curriculum.band=[0.1,1]", "trainer.max_steps=1")
    r1(
        "train",
        *words,
        *steps,
        "data.curriculum.band=[0.1,1]",
        "trainer.max_steps=3",
        "trainer.find_last_checkpoint=true",
    )
    assert f"rows outside the band {ROWS - len(rates)}" in " ".join(ended.output.split())
    expected = [record["curriculum/expected"] for record in read_log(train) if "curriculum/expected" in record]
    assert expected == [1.0] * 3
    assert sum(rate == 1.0 for rate in rates.values()) >= 6

    tuned = tmp_path / "tuned"
    words = [MODEL, f"data.train_files={tmp_path / 'sft.parquet'}", *curriculum, "data.prompt_key=prompt"]
    sizes = ["worker.actor.global_batch_size=3", f"trainer.save_checkpoint_path={tuned}", "sft.epochs=1"]
    r1("sft", f"worker.actor.model.model_path={MODEL}", *words[1:], *sizes, "trainer.n_gpus_per_node=1",
       "trainer.logger=[file]", "data.filter_overlong_prompts_workers=1", "data.max_length=512")  # fmt: skip
    records = [record for record in read_log(tuned) if "sft/epoch" in record]
    assert [record["curriculum/expected"] for record in records] == [0.5] * -(-inside // 3)


@pytest.mark.slow
def test_an_online_curriculum_resumes_and_replays_to_the_bit(r1: R1, tmp_path: Path) -> None:
    words = [*SMALL, "data.val_files=null", "data.curriculum.by=online", "trainer.save_freq=2", "trainer.record_gb=1"]
    words += ["algorithm.online_filtering=true", "algorithm.surplus_max_age=1", "trainer.max_try_make_batch=4"]
    words += ["worker.actor.optim.lr_scheduler_type=constant"]  # else it follows the end of the run

    def rows(run: str) -> list[tuple[int, str, float]]:
        table = pa.concat_tables([pq.read_table(path) for path in sorted((tmp_path / run / "samples").iterdir())])
        return list(zip(*(table[name].to_pylist() for name in ("step", "prompt_id", "score")), strict=True))

    whole, parts = (f"trainer.save_checkpoint_path={tmp_path / name}" for name in ("whole", "parts"))
    r1("train", QUICKSTART, *words, whole, "trainer.max_steps=4")
    r1("train", QUICKSTART, *words, parts, "trainer.max_steps=2")
    r1("train", QUICKSTART, *words, parts, "trainer.max_steps=4", "trainer.find_last_checkpoint=true")
    assert (tmp_path / "whole/global_step_2/curriculum.safetensors").is_file()
    assert rows("parts") == rows("whole")
    assert "step 4 is the same to the bit" in r1("replay", tmp_path / "whole", "--step", "4").output
    log = read_log(tmp_path / "whole")
    seen = [record["curriculum/rows_seen"] for record in log if "curriculum/rows_seen" in record]
    assert seen == sorted(seen)
    assert len(seen) == 4


TOOL = """
def count(shape: str) -> int:
    \"\"\"Count the shapes of a kind.\"\"\"
    return 1
"""


def sample_episodes(r1: R1, folder: Path, *words: str) -> list[dict[str, Any]]:
    """Return the rows for `r1 sft` of two prompts, and fine-tune a step on them."""
    settings = ["data.max_prompt_length=1024", "data.max_response_length=60", "worker.rollout.multi_turn.enable=true"]
    few = ["data.filter_overlong_prompts_workers=1", "data.train_files=examples/quickstart/train.parquet[:2]"]
    samples, rows, run = folder / "samples", folder / "rows.parquet", folder / "run"
    r1("sample", MODEL, QUICKSTART, *few, *settings, *words, "--n", "4", "--output", samples)
    r1("rows", samples, "--as", "sft", "--keep", "all", "--keep-cut", "--min-score", "0", "--output", rows)
    learner = [f"worker.actor.model.model_path={MODEL}", "worker.actor.global_batch_size=4", "trainer.max_steps=1"]
    sizes = ["trainer.logger=[file]", "trainer.n_gpus_per_node=1", "data.max_length=2048", *few[:1]]
    template = [word for word in words if word.startswith("data.override")]
    r1("sft", f"data.train_files={rows}", *learner, *sizes, *template, f"trainer.save_checkpoint_path={run}")
    assert read_log(run)[0]["sft/tokens"] > 0
    found: list[dict[str, Any]] = pq.read_table(rows).to_pylist()
    return found


@pytest.mark.slow
def test_episodes_become_rows_with_the_pictures_of_their_turns(r1: R1, tmp_path: Path) -> None:
    environment = f"worker.rollout.multi_turn.environment={write_environment(tmp_path)}:Album"
    rows = sample_episodes(r1, tmp_path, environment, "worker.rollout.multi_turn.max_turn_tokens=8")
    for row in rows:
        markers = sum(message["content"].count("<image>") for message in row["messages"])
        assert markers == len(row["images"]) == 2
        shown = Image.open(io.BytesIO(row["images"][1]["bytes"]))
        heard = row["messages"][1]["content"]
        assert shown.convert("RGB").getpixel((9, 9)) == (9, 99, len(heard))  # what this very answer was shown
    ended = r1("rows", tmp_path / "samples", "--as", "pairs", "--few", "--output", tmp_path / "pairs.parquet", ok=False)
    assert "episodes whose turns show pictures cannot be compared as pairs" in ended.stderr


@pytest.mark.slow
def test_rows_of_episodes_have_the_tools_of_their_prompts(r1: R1, tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(TOOL)
    tools = f"worker.rollout.multi_turn.tools=[{tmp_path}/tools.py]"
    for row in sample_episodes(r1, tmp_path, tools):  # the template has no place for schemas, so the prompt has them
        assert "Count the shapes of a kind." in row["messages"][0]["content"]
        assert "tools" not in row


@pytest.mark.slow
def test_a_format_prompt_is_applied_once_over_sampling_and_fine_tuning(r1: R1, tmp_path: Path) -> None:
    (tmp_path / "format.jinja").write_text("{{ content }} Think.")
    asked, rows = f"data.format_prompt={tmp_path / 'format.jinja'}", tmp_path / "rows.parquet"
    r1(*WORDS, asked, "--limit", "8", "--output", tmp_path / "samples")
    r1("rows", tmp_path / "samples", "--as", "sft", "--keep", "all", "--min-score", "0", "--output", rows)
    model = ["sft.turns=all", "data.max_length=512", f"worker.actor.model.model_path={MODEL}"]
    told = r1("data", "show", f"data.train_files={rows}", asked, *model, "--row", "1").output
    assert "Think." in told
    assert "Think. Think." not in told


@pytest.mark.slow
def test_files_are_those_of_a_whole_run_however_often_it_is_killed(whole: Path, tmp_path: Path) -> None:
    folder, draw = tmp_path / "samples", random.Random()
    command = [*WORDS, "--output", str(folder)]
    kills = int(os.environ.get("R1_KILLS", "5"))
    for written in (number * 3 // kills for number in range(kills)):  # files, of three
        process = Forked(*command)
        assert eventually(lambda: folder.exists() and len([*folder.glob("samples/*.parquet")]) >= written)  # noqa: B023
        time.sleep(draw.uniform(0, 0.5))
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert Forked(*command).wait() == 0
    assert parts(folder) == parts(whole)
    note_fault("SIGKILL of `r1 sample`", outcome="resumes")


@pytest.mark.slow
def test_more_shards_than_blocks_write_the_files_of_a_single_process(whole: Path, r1: R1, tmp_path: Path) -> None:
    for number in range(8, 0, -1):
        r1(*WORDS, "--output", tmp_path, "--shard", f"{number}/8")
    assert parts(tmp_path) == parts(whole)
