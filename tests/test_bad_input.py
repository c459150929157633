"""Bad input is reported before training starts, or counted during the run; it never ends a run silently."""

import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from endtoend import QUICKSTART, R1, ROOT, SMALL, read_log

FOLDER = ROOT / "examples/quickstart"
ONE_STEP = [
    *SMALL,
    "trainer.max_steps=1",
    "trainer.val_before_train=false",
    "trainer.val_freq=-1",
    "trainer.save_freq=-1",
]

FOUR_ANSWERS = ["data.rollout_batch_size=2", "worker.rollout.n=2"]  # each of which a worker may have to die for

UNRELIABLE = """
import os, zlib
REWARD_TYPE = "sequential"

def compute_score(reward_input):
    match zlib.crc32((reward_input["response"] + reward_input["ground_truth"]).encode()) % 6:
        case 0: raise ValueError("no such answer")
        case 1: return {"overall": float("nan")}
        case 2: return {"accuracy": 1.0}
        case 3: os._exit(3)
        case 4: print("noise on stdout")
    return {"overall": 0.5, "accuracy": 1.0}
"""
TOO_FEW = """
def compute_score(reward_inputs):
    return [{"overall": 1.0}] * (len(reward_inputs) - 1)
"""
ENDLESS = """
def compute_score(reward_inputs):
    while True:
        pass
"""


def train(r1: R1, folder: Path, *overrides: str, ok: bool = True):  # type: ignore[no-untyped-def]
    return r1("train", QUICKSTART, *ONE_STEP, f"trainer.save_checkpoint_path={folder}", *overrides, ok=ok)


@pytest.mark.parametrize(
    ("code", "settings", "causes"),
    [
        (UNRELIABLE, ["data.rollout_batch_size=16"], {"exception", "non_finite", "wrong_shape", "crash"}),
        (TOO_FEW, [], {"wrong_shape"}),
        (ENDLESS, [*FOUR_ANSWERS, "worker.reward.timeout=0.2", "worker.reward.failure_score=-1"], {"timeout"}),
    ],
    ids=["unreliable", "too_few", "endless"],
)
def test_a_failing_reward_is_counted_and_the_run_goes_on(
    r1: R1, tmp_path: Path, code: str, settings: list[str], causes: set[str]
) -> None:
    (tmp_path / "reward.py").write_text(code)
    reward = f"worker.reward.reward_function={tmp_path / 'reward.py'}:compute_score"
    process = train(r1, tmp_path / "run", reward, "trainer.max_idle_steps=-1", *settings)  # where all fail, goes on
    record = read_log(tmp_path / "run")[-1]
    counted = {name.removeprefix("reward/failures/") for name in record if name.startswith("reward/failures/")}
    assert counted == causes
    assert record["reward/failures"] == sum(record[f"reward/failures/{cause}"] for cause in causes)
    for cause in causes:
        assert process.stdout.count(f"({cause})") == 1
    if "worker.reward.failure_score=-1" in settings:
        assert record["critic/score/mean"] == -1


HALF_RAISES = """
REWARD_TYPE = "sequential"

def compute_score(reward_input):
    compute_score.calls = getattr(compute_score, "calls", 0) + 1
    if compute_score.calls % 2:
        raise ValueError("no such answer")
    return 0.5
"""


def test_a_failed_answer_can_be_dropped(r1: R1, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(HALF_RAISES)
    reward = f"worker.reward.reward_function={tmp_path / 'reward.py'}:compute_score"
    train(r1, tmp_path / "run", reward, "worker.reward.failure_policy=drop", "worker.reward.failure_score=-9")
    record = read_log(tmp_path / "run")[-1]
    assert record["reward/failures/exception"] > 0
    assert record["critic/score/min"] == 0.5


def test_a_failed_answer_can_end_the_run_with_a_checkpoint_and_its_name(r1: R1, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(HALF_RAISES)
    reward = f"worker.reward.reward_function={tmp_path / 'reward.py'}:compute_score"
    ended = train(r1, tmp_path / "run", reward, "worker.reward.failure_policy=stop", ok=False)
    assert ended.exit_code == 2
    assert "could not score response" in ended.output
    assert "ValueError: no such answer" in ended.output
    assert (tmp_path / "run" / "global_step_0" / "actor").is_dir()


def rows() -> list[dict]:  # type: ignore[type-arg]
    return pq.read_table(FOLDER / "train.parquet").to_pylist()[:40]


def write(path: Path, table: list[dict]) -> Path:  # type: ignore[type-arg]
    pq.write_table(pa.Table.from_pylist(table), path)
    return path


def cut_picture(table: list[dict]) -> None:  # type: ignore[type-arg]
    picture = table[6]["images"][0]
    picture["bytes"] = picture["bytes"][: len(picture["bytes"]) // 2]


def drop_answer(table: list[dict]) -> None:  # type: ignore[type-arg]
    for row in table:
        row["label"] = row.pop("answer")


def null_answer(table: list[dict]) -> None:  # type: ignore[type-arg]
    table[2]["answer"] = None


def lengthen(table: list[dict]) -> None:  # type: ignore[type-arg]
    table[4]["problem"] += " really" * 300


@pytest.mark.parametrize(
    ("spoil", "settings", "said"),
    [
        (cut_picture, ["data.bad_rows=refuse"], ["rows.parquet:7", "picture"]),
        (drop_answer, [], ["rows.parquet: none of the first 40 rows", "data.answer_key=answer", "label"]),
        (null_answer, [], ["rows.parquet:3", "answer"]),
        (lengthen, ["data.filter_overlong_prompts=false"], ["rows.parquet:5", "max_prompt_length"]),
        (lambda table: table.clear(), [], ["rows.parquet"]),
    ],
    ids=["cut picture", "no answer column", "null answer", "overlong prompt", "empty"],
)
def test_a_bad_row_is_named_before_training_starts(  # type: ignore[no-untyped-def]
    r1: R1, tmp_path: Path, spoil, settings: list[str], said: list[str]
) -> None:
    table = rows()
    spoil(table)
    schema = pq.read_schema(FOLDER / "train.parquet")
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(table) if table else schema.empty_table(), path)
    process = train(r1, tmp_path / "run", f"data.train_files={path}", *settings, ok=False)
    assert process.exit_code == 2
    assert "Traceback" not in process.stderr
    for part in said:
        assert part in process.stderr
    assert not (tmp_path / "run").exists()


def test_overlong_prompts_are_filtered_when_that_is_asked_for(r1: R1, tmp_path: Path) -> None:
    table = rows()
    lengthen(table)
    process = train(r1, tmp_path / "run", f"data.train_files={write(tmp_path / 'rows.parquet', table)}")
    assert "1 of 40" in process.stdout


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.train_files=examples/quickstart/trian.parquet", ["data.train_files", "trian.parquet", "train.parquet"]),
        ("worker.actor.model.model_path=./no/such/model", ["worker.actor.model.model_path", "./no/such/model"]),
        ("worker.reward.reward_function=nothing.py:score", ["worker.reward.reward_function", "nothing.py"]),
        ("worker.reward.reward_function=mth", ["mth", "math"]),
        ("worker.actor.optim.lrr=1", ["worker.actor.optim.lrr", "worker.actor.optim.lr"]),
        ("worker.actor.fsdp.torch_dtype=fp16", ["worker.actor.fsdp.torch_dtype", "not available in this version"]),
        ("worker.actor.model.lora.path=no/adapter", ["worker.actor.model.lora.path", "no/adapter"]),
    ],
)
def test_what_does_not_exist_is_named(r1: R1, tmp_path: Path, override: str, said: list[str]) -> None:
    process = train(r1, tmp_path / "run", override, ok=False)
    assert process.exit_code == 2
    assert "Traceback" not in process.stderr
    for part in said:
        assert part in process.stderr


def test_a_model_folder_without_weights_is_named(r1: R1, tmp_path: Path) -> None:
    shutil.copytree(FOLDER / "model", tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    process = train(r1, tmp_path / "run", f"worker.actor.model.model_path={tmp_path / 'model'}", ok=False)
    assert process.exit_code == 2
    assert str(tmp_path / "model") in process.stderr.replace("\n", "")


def test_an_own_loss_that_fails_in_a_step_is_named_with_its_line_and_the_last_step_is_kept(
    r1: R1, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(
        "def loss(inputs):\n    losses = -inputs.advantages * inputs.logprobs\n"
        "    if inputs.totals.tokens > 4:  # not on the made-up batch\n        losses = losses / inputs.nothing\n"
        "    return losses, {}\n"
    )
    result = train(r1, tmp_path / "run", f"worker.actor.loss_type={tmp_path}/mine.py:loss", ok=False)
    assert result.exit_code == 2
    assert "mine.py:loss fails in line 4 (losses = losses / inputs.nothing): AttributeError" in result.stderr
    assert "stopping after step 0, which is saved in" in " ".join(result.output.split())
    assert (tmp_path / "run/global_step_0/trainer.json").is_file()


def test_an_estimator_that_fails_is_named_and_the_last_step_is_kept(r1: R1, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(
        "def f(inputs):\n    return [{'overall': -1.0 * (i % 2)} for i in range(len(inputs))]\n"
    )
    words = ["algorithm.adv_estimator=maxrl", f"worker.reward.reward_function={tmp_path / 'reward.py'}:f"]
    result = train(r1, tmp_path / "run", *words, ok=False)
    assert result.exit_code == 2
    assert "the estimator MaxRL fails: ValueError: sample" in result.stderr
    assert "has reward -1.0; MaxRL divides by the mean reward" in result.stderr
    assert (tmp_path / "run/global_step_0/trainer.json").is_file()
