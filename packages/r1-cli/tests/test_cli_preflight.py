"""`r1 check`: faults that people make, each found by its key; a sound configuration passes."""

import json
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from r1_cli.checkpoint.damage import find_cut
from r1_cli.commands.check import _is_model
from r1_cli.main import main
from r1_cli.plan.check import configuration, environment
from r1_cli.plan.check.checks import PARTS, run_checks
from r1_cli.plan.check.findings import Finding, Subject, examine

ROOT = Path(__file__).parents[3]
GB = 10**9
Fault = Callable[[Path], list[str]]  # breaks a working folder, and returns further words
FAULTS: dict[str, tuple[str, str, Fault]] = {}  # by what is wrong: (part, key of the finding, the fault)


@pytest.fixture
def working(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with all that a run needs, and the words of its configuration in it."""
    monkeypatch.chdir(ROOT)
    quickstart = ROOT / "examples/quickstart"
    shutil.copytree(quickstart / "model", tmp_path / "model")
    shutil.copy(quickstart / "reward.py", tmp_path / "reward.py")
    table = pq.read_table(quickstart / "train.parquet")
    pq.write_table(table.slice(0, 24), tmp_path / "train.parquet")
    pq.write_table(table.slice(24, 8), tmp_path / "val.parquet")
    return tmp_path


def words_of(folder: Path) -> list[str]:
    return [
        str(ROOT / "examples/quickstart/config.yaml"),
        f"data.train_files={folder}/train.parquet",
        f"data.val_files={folder}/val.parquet",
        f"worker.actor.model.model_path={folder}/model",
        f"worker.reward.reward_function={folder}/reward.py:compute_score",
        f"trainer.save_checkpoint_path={folder}/checkpoints",
        "data.filter_overlong_prompts_workers=1",
        "worker.reward.timeout=1",
    ]


def fault(part: str, key: str) -> Callable[[Fault], Fault]:
    def keep(function: Fault) -> Fault:
        FAULTS[function.__name__] = part, key, function
        return function

    return keep


def setting(name: str, key: str, *words: str, part: str = "config") -> None:
    FAULTS[name] = part, key, lambda folder: [word.format(folder=folder) for word in words]


def edit_json(path: Path, **values: Any) -> list[str]:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return []


def change_rows(
    folder: Path, change: Callable[[list[dict[str, Any]]], object], file: str = "train.parquet"
) -> list[str]:
    rows = pq.read_table(folder / file).to_pylist()
    rows = change(rows) or rows  # type: ignore[assignment]
    pq.write_table(pa.Table.from_pylist(rows), folder / file)
    return []


setting("an unknown key", "config.worker.rollout.nn", "worker.rollout.nn=3")
setting("a word for a number", "config.data.max_response_length", "data.max_response_length=long")
setting("batches that do not divide", "config.worker.actor.global_batch_size", "worker.actor.global_batch_size=7")
setting("more prompts than rows", "config.data.rollout_batch_size", "data.rollout_batch_size=512")
setting("no rows file", "config.data.train_files", "data.train_files={folder}/trian.parquet")
setting("no model folder", "config.worker.actor.model.model_path", "worker.actor.model.model_path={folder}/modle")
setting("a reward function that is not there", "config.worker.reward.reward_function",
        "worker.reward.reward_function={folder}/reward.py:score")  # fmt: skip
setting("a keyword that the reward has not", "config.worker.reward.reward_function_kwargs",
        "+worker.reward.reward_function_kwargs.wieght=1")  # fmt: skip
setting("an estimator by another name", "config.algorithm.adv_estimator", "algorithm.adv_estimator=grop")
setting("nothing is saved", "config.nothing saved", "trainer.save_freq=-1")
setting("nothing to validate on", "config.odd", "data.val_files=null")
setting("a loss option of another loss", "config.worker.actor.optim.num_cycles", "worker.actor.optim.num_cycles=2")
setting("half precision that overflows", "model.dtype", "worker.actor.fsdp.torch_dtype=fp16", part="model")
setting("longer than the model knows", "config.data.max_response_length", "data.max_response_length=200000")
setting("prompts over the limit", "data.overlong", "data.max_prompt_length=4", part="data")
setting("columns that are not there", "data.failed", "data.prompt_key=question", part="data")


def episodes(folder: Path, code: str) -> list[str]:
    """Write an environment, and return the words of a run with it."""
    (folder / "world.py").write_text(code)
    return [f"worker.rollout.multi_turn.environment={folder}/world.py:World", "worker.rollout.multi_turn.enable=true"]


@fault("episodes", "episodes.environment")
def an_environment_that_fails_for_every_row(folder: Path) -> list[str]:
    return episodes(folder, "class World:\n def reset(self, row): row['goal']\n def step(self, text): return None\n")


@fault("episodes", "episodes.failed")
def an_environment_that_cannot_be_loaded(folder: Path) -> list[str]:
    return episodes(folder, "import nothing_like_this\nclass World:\n def reset(self, row): pass\n")


@fault("episodes", "episodes.reset")
def an_environment_that_answers_before_the_policy(folder: Path) -> list[str]:
    return episodes(folder, "class World:\n def reset(self, row): return 'hello'\n def step(self, text): pass\n")


@fault("environment", "environment.servers")
def a_server_that_does_not_answer(folder: Path) -> list[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [f"worker.rollout.servers.urls=[http://127.0.0.1:{port}]"]


@fault("model", "model.files")
def weights_that_were_cut_off(folder: Path) -> list[str]:
    file = folder / "model/model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    return []


@fault("model", "model.files")
def a_shard_that_is_missing(folder: Path) -> list[str]:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model/model.safetensors.index.json").write_text(json.dumps(index))
    return []


@fault("model", "model.tokenizer")
def a_tokenizer_that_is_missing(folder: Path) -> list[str]:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "model" / name).unlink()
    return []


@fault("model", "model.tokenizer")
def a_tokenizer_of_another_model(folder: Path) -> list[str]:
    whole = json.loads((folder / "model/config.json").read_text())
    return edit_json(folder / "model/config.json", text_config=whole["text_config"] | {"vocab_size": 8})


@fault("model", "model.chat template")
def no_chat_template(folder: Path) -> list[str]:
    (folder / "model/chat_template.jinja").unlink()
    return []


@fault("model", "model.eos")
def no_end_of_an_answer(folder: Path) -> list[str]:
    return edit_json(folder / "model/tokenizer_config.json", eos_token=None)


@fault("model", "model.answers")
def a_template_whose_answers_do_not_end(folder: Path) -> list[str]:
    template = folder / "model/chat_template.jinja"
    text = template.read_text()
    assert text.count("<|im_end|>") == 1
    template.write_text(text.replace("<|im_end|>", ""))
    return []


@fault("data", "data.media")
def pictures_that_are_broken(folder: Path) -> list[str]:
    def spoil(rows: list[dict[str, Any]]) -> None:
        rows[0]["images"] = [{"bytes": b"no picture", "path": None}]

    return change_rows(folder, spoil)


@fault("data", "data.markers")
def markers_without_pictures(folder: Path) -> list[str]:
    def spoil(rows: list[dict[str, Any]]) -> None:
        rows[1]["problem"] += " <image>"

    return change_rows(folder, spoil)


@fault("data", "data.empty")
def an_answer_that_is_null(folder: Path) -> list[str]:
    return change_rows(folder, lambda rows: rows[2].update(answer=None))


@fault("data", "data.leak")
def validation_rows_that_are_trained_on(folder: Path) -> list[str]:
    shutil.copy(folder / "train.parquet", folder / "val.parquet")
    return []


@fault("data", "data.contradiction")
def one_question_with_two_answers(folder: Path) -> list[str]:
    return change_rows(folder, lambda rows: [*rows, rows[0] | {"answer": "99"}])


EACH = 'REWARD_TYPE = "sequential"\n'
UNPACK = 'response, ground_truth = reward_input["response"], reward_input["ground_truth"]\n    '


def write_reward(folder: Path, body: str) -> list[str]:
    (folder / "own.py").write_text(f"{EACH}def score(reward_input):\n    {UNPACK}{body}\n")
    return [f"worker.reward.reward_function={folder}/own.py:score"]


@fault("reward", "reward.right beats wrong")
def a_reward_that_gives_all_answers_the_same(folder: Path) -> list[str]:
    return write_reward(folder, "return 1.0")


@fault("reward", "reward.scores answers")
def a_reward_that_raises(folder: Path) -> list[str]:
    return write_reward(folder, "raise KeyError(response[:9])")


@fault("reward", "reward.evaluates nothing")
def a_reward_that_runs_answers_as_code(folder: Path) -> list[str]:
    body = "import re; found = re.search(r'boxed.(.*).$', response)\n    "
    return write_reward(folder, body + "exec(found[1] if found else '0')\n    return float(ground_truth in response)")


@fault("reward", "reward.failed")
def a_reward_that_cannot_be_imported(folder: Path) -> list[str]:
    (folder / "own.py").write_text("import no_such_package\ndef score(response, ground_truth):\n    return 0.0\n")
    return [f"worker.reward.reward_function={folder}/own.py:score"]


@fault("reward", "reward.says the same twice")
def a_reward_that_changes_its_mind(folder: Path) -> list[str]:
    return write_reward(folder, "import random; return (ground_truth in response) + random.random()")


def found_in(part: str, words: list[str]) -> dict[str, Finding]:
    return {finding.key: finding for finding in run_checks(words, [part])}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_by_its_key_and_says_what_to_do(
    name: str, working: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("R1_SERVERS_TOKEN", "secret")
    part, key, break_it = FAULTS[name]
    found = found_in(part, [*words_of(working), *break_it(working)])
    assert key in found, {one.key: one.message for one in found.values()}
    assert found[key].message


def test_there_are_thirty_faults() -> None:
    assert len(FAULTS) >= 30
    assert {part for part, _, _ in FAULTS.values()} == set(PARTS) - {"step"}


def test_a_check_of_episodes_describes_what_answers_and_what_the_template_does(working: Path) -> None:
    world = episodes(working, "class World:\n def reset(self, row): pass\n def step(self, text): return None\n")
    found = list(
        run_checks([*words_of(working), *world, "worker.rollout.multi_turn.max_assistant_turns=3"], ["episodes"])
    )
    assert {one.level for one in found} == {"note"}
    told = [one.message for one in found]
    assert f"environment {working}/world.py:World answers the policy" in told[0]
    assert "3 turns of the policy, 20 tokens behind the prompt, 30 s a call, 600 s in all" in told[1]
    assert "scheduling: arrival" in told[1]
    assert "history: the policy sees its turns as it sampled them" in told[2]
    assert "chat template: a turn ends with <|im_end|>" in told[3]


def test_tools_of_an_environment_that_can_give_no_reward_are_refused_without_a_reward_function(working: Path) -> None:
    code = "class World:\n def look(self) -> str:\n  return 'tea'\n"
    words = [*words_of(working), *episodes(working, code)]
    assert "episodes.failed" not in found_in("episodes", words)
    unjudged = [*words, "worker.reward.reward_function=null"]
    message = found_in("episodes", unjudged)["episodes.failed"].message
    assert f"worker.reward.reward_function: is missing: {working}/world.py:World can give no reward" in message
    assert "get_reward()" in message
    episodes(working, code + " def get_reward(self):\n  return 1.0\n")
    assert "episodes.failed" not in found_in("episodes", unjudged)


def test_tools_that_cannot_be_loaded_are_named_by_key_and_file(working: Path) -> None:
    tools = working / "tools.py"
    tools.write_text("raise KeyError('no such thing')\ndef look(x: int):\n    pass\n")
    words = [f"worker.rollout.multi_turn.tools=[{tools}:look]", "worker.rollout.multi_turn.enable=true"]
    done = CliRunner().invoke(main, ["train", *words_of(working), *words])
    assert done.exit_code == 2, done.output
    assert f"worker.rollout.multi_turn.tools={tools}:look: " in done.output
    assert "no such thing" in done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize("part", [part for part in PARTS if part != "step"])
def test_a_sound_configuration_has_no_error(part: str, working: Path) -> None:
    assert not [one for one in run_checks(words_of(working), [part]) if one.level == "error"]


def test_how_long_a_reward_takes_for_an_answer_is_told(working: Path) -> None:
    found = found_in("reward", words_of(working))
    assert "p50" in found["reward.latency"].message
    assert found["reward.latency"].level == "note"


@pytest.mark.slow
def test_a_tiny_step_is_made_and_what_stops_it_is_told(working: Path) -> None:
    assert list(run_checks(words_of(working), ["step"])) == []
    (working / "own.py").write_text("def loss(inputs):\n    raise RuntimeError('no loss today')\n")
    broken = [*words_of(working), f"worker.actor.loss_type={working}/own.py:loss"]
    found = found_in("step", broken)
    assert "no loss today" in found["step.failed"].message
    assert not (working / "checkpoints").exists()


def test_a_check_that_crashes_is_a_finding_and_the_others_go_on(working: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(_: Subject) -> Iterator[Finding]:
        yield Finding("environment.first", "note", "seen")
        raise ZeroDivisionError("out of order")

    def goes_on(_: Subject) -> list[Finding]:
        return [Finding("environment.second", "note", "seen, too")]

    monkeypatch.setitem(PARTS, "environment", (crash, goes_on))
    found = list(run_checks(words_of(working), ["environment"]))
    assert [one.key for one in found] == ["environment.first", "environment.failed", "environment.second"]
    assert "out of order" in found[1].message


def subject_of(working: Path, *words: str) -> Subject:
    from r1_cli.config import load_config

    return Subject(words, *load_config([*words_of(working), *words]))


def test_a_disk_a_memory_and_limits_that_are_too_small_are_told(working: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = subject_of(working)
    monkeypatch.setattr(configuration, "free_memory", lambda: 10_000_000)
    monkeypatch.setattr(configuration, "find_card", lambda: None)
    assert [one.key for one in configuration.check_memory(subject)] == ["environment.memory"]
    monkeypatch.setattr("r1_cli.plan.disk.disk_usage", lambda path: (0, 0, 1000))
    assert [one.key for one in configuration.check_disk(subject)] == ["environment.disk"]
    monkeypatch.setattr("resource.getrlimit", lambda which: (256, 4096))
    assert [one.fix for one in environment.check_limits(subject)] == ["ulimit -n 1024 (at most 4096 here)"]


def test_packages_of_other_versions_are_named_with_the_command_that_mends_them(
    working: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "version", lambda name: "0.0.1")
    found = list(environment.check_versions(subject_of(working)))
    assert found
    assert all("0.0.1 is installed" in one.message and one.fix.startswith("pip install") for one in found)


def test_a_gpu_that_torch_does_not_see_is_told(working: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "find_card", lambda: 80 * GB)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert [one.key for one in environment.check_gpus(subject_of(working))] == ["environment.gpu"]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    several = subject_of(working, "trainer.n_gpus_per_node=2")
    assert [one.fix for one in environment.check_gpus(several)] == ["set trainer.n_gpus_per_node=1"]


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\x02" + b"\0" * 7 + b"[]", b"\x02" + b"\0" * 7 + b"{}x"])
def test_files_of_no_weights_are_damaged(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    assert find_cut(tmp_path / "a.safetensors")


def test_the_command_answers_in_json_and_by_its_exit_code(working: Path) -> None:
    result = CliRunner().invoke(main, ["check", *words_of(working), "worker.rollout.nn=3", "--json"])
    told = json.loads(result.stdout)
    assert (result.exit_code, told["ok"], [one["key"] for one in told["findings"]]) == (
        1,
        False,
        ["config.worker.rollout.nn"],
    )
    assert "did you mean" in told["findings"][0]["message"]


def test_what_could_control_a_terminal_is_written_out(working: Path) -> None:
    body = "raise ValueError(chr(27) + '[2J' + chr(0x202E))"
    result = CliRunner().invoke(main, ["check", *words_of(working), *write_reward(working, body), "--no-step"])
    assert result.exit_code == 1
    assert "\\x1b[2J\\u202e" in result.stdout
    assert "\x1b" not in result.stdout


def test_what_a_check_raises_without_words_is_told_by_its_kind() -> None:
    def crash(_: Any) -> Iterator[Finding]:
        raise KeyError
        yield

    assert [one.message for one in examine("x", crash, None)] == ["KeyError"]  # type: ignore[arg-type]


def test_a_model_alone_is_asked_four_questions() -> None:
    result = CliRunner().invoke(main, ["check", str(ROOT / "examples/quickstart/model"), "--precision", "bf16"])
    assert result.exit_code == 0, result.output
    *answers, pictures = [line.split("  ")[-1].strip() for line in result.stdout.splitlines()[-6:]]
    assert answers == ["right"] * 4 + ["packed micro-batches that share prompts"]
    assert pictures.startswith("resized once")


def test_a_model_is_told_from_a_configuration_and_one_that_is_not_there_is_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["check", str(tmp_path)])
    assert result.exit_code == 2
    assert f"{tmp_path}: the folder has no config.json" in result.output
    assert _is_model("owner/model")
    assert not any(map(_is_model, ["run.yaml", "missing.yml", "trainer.max_steps=3"]))
