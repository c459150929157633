"""The commands of EasyR1's users, and the `r1` command itself."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from r1_cli.config import load_config, lookup
from r1_cli.config.options import ESTIMATOR_OPTIONS, LOSS_OPTIONS
from r1_cli.config.schema import schema
from r1_cli.main import main

ROOT = Path(__file__).parents[3]
EASYR1 = json.loads((Path(__file__).parent / "easyr1_commands.json").read_text(encoding="utf-8"))
COMMANDS = EASYR1["commands"]
HEAVY = ("torch", "transformers", "datasets", "ray", "sympy")


@pytest.fixture
def repository(monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(ROOT)
    return ROOT


def run(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, list(words), terminal_width=100)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_each_easyr1_command_loads_and_its_words_win(name: str, repository: Path) -> None:
    config, provenance = load_config(COMMANDS[name])
    assert provenance.notices == ()
    for word in COMMANDS[name][1:]:
        key, _, text = word.partition("=")
        if not text.startswith(("{", "[")):
            assert str(lookup(config, key)).lower() in (text.lower(), str(_number(text)))
            assert provenance.origins[key] == "command line"


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def test_structured_words_of_the_easyr1_commands_become_structures(repository: Path) -> None:
    config, _ = load_config(COMMANDS["qwen3_14b_dapo17k_dapo"])
    validation = config.worker.rollout.val_override_config
    assert (validation.n, validation.temperature, validation.top_p) == (16, 1.0, 0.7)
    assert config.worker.reward.reward_function_kwargs == {
        "max_response_length": 20480,
        "overlong_buffer_length": 4096,
        "overlong_penalty_factor": 1.0,
    }
    assert load_config(COMMANDS["qwen2_5_vl_7b_geo3k_swanlab"])[0].trainer.logger == ["console", "swanlab"]
    assert load_config(COMMANDS["qwen2_5_vl_3b_android_gui_grpo"])[0].trainer.logger == ["console", "wandb"]


def test_shell_text_stays_text(repository: Path) -> None:
    config, _ = load_config(COMMANDS["qwen2_5_vl_3b_android_gui_grpo"])
    assert config.trainer.experiment_name == "${EXPERIMENT_NAME:-qwen2_5_vl_3b_android_gui_grpo_$(date"


def test_the_example_file_holds_the_values_that_people_copy(repository: Path) -> None:
    config, _ = load_config(["examples/config.yaml"])
    for key, value in EASYR1["defaults"].items():
        own = "auto" if ".micro_batch_size_per_device_for_" in key else value
        assert lookup(config, key) == own, key


def test_the_example_file_lists_every_key_of_the_algorithm(repository: Path) -> None:
    _, provenance = load_config(["examples/config.yaml"])
    of_the_algorithm = ("algorithm.", "worker.actor.optim.", "worker.reward.overlong_buffer.")
    written = {option.key for option in (*ESTIMATOR_OPTIONS, *LOSS_OPTIONS)}  # these are held to the code elsewhere
    keys = {key for key in schema().values if key.startswith(of_the_algorithm)} - written
    keys |= {"worker.actor.loss_scale_factor", "worker.actor.loss_type", "worker.actor.loss_avg_mode"}
    assert keys - provenance.origins.keys() == set()


def test_a_dry_run_shows_the_plan_and_refuses_what_the_run_would_refuse(repository: Path) -> None:
    words = [*COMMANDS["qwen3_4b_math_grpo_lora"], "worker.actor.fsdp.torch_dtype=fp16"]
    code, out, err = run("train", *words, "--dry-run")
    assert code == 2
    assert "model_path=Qwen/Qwen3-4B" in out
    assert "sequences per device" in out
    assert "worker.actor.fsdp.torch_dtype=fp16 (command line): is not available in this version" in err
    assert run("train", *words) == (2, "", err)


OWN = """
import json
import shutil
def reward(inputs):
    return [1.0] * len(inputs)
def none():
    return 1.0
def raises(inputs):
    raise KeyError("answer")
def nothing(inputs):
    return None
def words(inputs):
    return ["right"] * len(inputs)
def one(inputs):
    return [1.0]
def unless_empty(inputs):
    return [1.0 / len(one["response"]) for one in inputs]
def loss(inputs):
    return inputs.nothing
"""


@pytest.mark.parametrize(
    ("text", "word", "message"),
    [
        (
            "import no_such_module\n" + OWN,
            "worker.reward.reward_function={}:reward",
            "No module named 'no_such_module'",
        ),
        (OWN, "worker.reward.reward_function={}:none", "too many positional arguments"),
        (OWN, "worker.reward.reward_function={}:json", "has no function 'json'"),
        ("import os; os._exit(3)\n" + OWN, "worker.reward.reward_function={}:reward", "exited with code 3"),
        (OWN, "worker.actor.loss_type={}:loss", "fails on a made-up batch: AttributeError"),
        (OWN, "worker.reward.reward_function={}:raises", "KeyError: 'answer'"),
        (OWN, "worker.reward.reward_function={}:nothing", "own.py:nothing fails for an empty answer"),
        (OWN, "worker.reward.reward_function={}:words", "own.py:words fails for an empty answer"),
        (OWN, "worker.reward.reward_function={}:one", None),
        (OWN, "worker.reward.reward_function={}:unless_empty", None),
        (OWN, "worker.reward.reward_function={}:reward", None),
    ],
)
def test_a_dry_run_tries_what_is_of_the_users_own(
    repository: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    text: str,
    word: str,
    message: str | None,
) -> None:
    (tmp_path / "own.py").write_text(text)
    code, out, err = run("train", "examples/quickstart/config.yaml", word.format(tmp_path / "own.py"), "--dry-run")
    assert code == (2 if message else 0)
    assert (message or "") in err
    assert "Traceback" not in err
    assert ("sequences per device" in out) == (message is None)
    assert ("fails for an empty answer: " in out) == ("unless_empty" in word)
    assert ("returned 1 scores for 2 responses" in caplog.text) == word.endswith(":one")


def test_a_dry_run_shows_the_row_format_of_each_source(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "sums.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n' * 3)
    files = f"data.train_files=[examples/quickstart/train.parquet,{tmp_path / 'sums.jsonl'}]"
    words = ["worker.actor.model.model_path=owner/model", "data.val_files=hiyouga/geometry3k@test"]
    words += ["trainer.n_gpus_per_node=1"]
    code, out, _ = run("train", *words, "worker.reward.reward_function=math", files, "--dry-run")
    assert code == 0
    assert "not downloaded" in out
    shown = {line.split()[0]: line.split()[1:] for line in out.splitlines() if "not checked" in line}
    assert shown["geometry3k"][:2] == ["not", "downloaded"]
    assert shown["train"] == ["3,000", "not", "checked", "easyr1", "problem,", "answer"]
    assert shown["sums"] == ["3", "not", "checked", "gsm8k", "question,", "answer"]


def test_a_real_run_refuses_what_is_not_available_all_at_once(repository: Path) -> None:
    words = [f"worker.actor.fsdp.{key}=fp16" for key in ("torch_dtype", "mp_param_dtype")]
    code, _, err = run("train", *COMMANDS["qwen3_4b_math_grpo_lora"], *words)
    assert code == 2
    assert "worker.actor.fsdp.mp_param_dtype=fp16 (command line): is not available in this version" in err
    assert "worker.actor.fsdp.torch_dtype=fp16 (command line): is not available in this version" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["eval", "--help"], ["merge", "--help"]])
def test_help_and_dry_run_load_nothing_heavy(words: list[str], repository: Path) -> None:
    assert loaded_by(words) == []


def test_a_dry_run_loads_nothing_heavy(repository: Path) -> None:
    one_device = ["trainer.n_gpus_per_node=1", "worker.rollout.tensor_parallel_size=1"]
    assert loaded_by(["train", *COMMANDS["qwen2_5_7b_math_grpo"], *one_device, "--dry-run"]) == []


def loaded_by(words: list[str]) -> list[str]:
    """Return the heavy modules that a command, run in its own process, has imported; the command must succeed."""
    code = (
        "import json, sys; from r1_cli.main import main\n"
        f"try: main({words!r})\n"
        "except SystemExit as end: code = end.code or 0\n"
        f"print(json.dumps([code, [m for m in {HEAVY!r} if m in sys.modules]]), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    status, modules = json.loads(done.stderr.strip().splitlines()[-1])
    assert status == 0, done.stderr
    return list(modules)


def test_help_shows_how_to_start() -> None:
    code, out, _ = run("train", "--help")
    assert code == 0
    assert "r1 train config=examples/config.yaml" in out
    assert "--dry-run" in out
    assert {"train", "eval", "merge"} <= set(run("--help")[1].split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data.seed=1"], "settings are written without dashes: data.seed=1"),
        (["--resume"], "--resume: no such option"),
        (["data.seed"], "expected key=value"),
        (["missing.yaml"], "missing.yaml (command line): no such file"),
        (["config=a.yaml", "b.yaml"], "one configuration file at a time, got a.yaml and b.yaml"),
        (["data.seed=[1"], "not a YAML or JSON value"),
    ],
)
def test_words_that_are_no_settings_are_explained(words: list[str], message: str) -> None:
    code, _, err = run("train", *words)
    assert code == 2
    assert message in err


def test_eval_needs_no_training_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["data.val_files=owner/name@test", "worker.reward.reward_function=math", "worker.actor.model.model_path=m"]
    config, _ = load_config(words, command="eval")
    assert config.data.train_files is None
    code, _, err = run("train", *words)
    assert code == 2
    assert "data.train_files: is missing" in err


def test_a_dry_run_is_one_screen_with_what_differs_and_all_of_it_if_asked(repository: Path) -> None:
    code, out, _ = run("train", "examples/quickstart/config.yaml", "trainer.find_last_checkpoint=true", "--dry-run")
    assert code == 0
    assert len(out.splitlines()) <= 55
    assert "val_freq=20" in out
    assert "find_last_checkpoint" not in out  # as the default has it
    assert out.splitlines()[-1].startswith(("starts anew in ", "resumes from "))
    _, full, _ = run("train", "examples/quickstart/config.yaml", "--dry-run", "--full")
    assert "find_last_checkpoint: true" in full
    assert "of which" in full
    code, _, err = run("train", "examples/quickstart/config.yaml", "--full")
    assert code == 2
    assert "--full takes --dry-run" in err


def test_a_dry_run_warns_of_a_model_that_is_not_here_and_names_a_near_one(repository: Path, tmp_path: Path) -> None:
    empty = f"trainer.save_checkpoint_path={tmp_path}"  # without it, the quickstart's own checkpoint refuses the model
    for name, near in (("examples/quickstart/modle", "examples/quickstart/model"), ("exmples/quickstart/model", "")):
        _, out, err = run(
            "train", "examples/quickstart/config.yaml", f"worker.actor.model.model_path={name}", empty, "--dry-run"
        )
        told = out + err
        assert f"worker.actor.model.model_path={name}" in told
        assert ("did you mean" in told) == bool(near)
        assert near in told
    _, out, _ = run(
        "train", "examples/quickstart/config.yaml", "worker.actor.model.model_path=owner/model", empty, "--dry-run"
    )
    assert "the run would ask the hub" in out.splitlines()[-3]


def test_a_path_that_is_missing_is_the_only_problem_and_says_where_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/global_step_20").mkdir(parents=True)
    for words in (["eval"], ["merge"], ["diagnose"], ["report"], ["diff", "."], ["replay", "--step", "1"]):
        code, _, err = run(*words, "runs/elsewhere")
        assert code == 2, words
        assert f"working directory: {tmp_path}" in err
        assert "data.val_files" not in err
        code, _, err = run(*words, "runs/global_step_2")
        assert "did you mean runs/global_step_20?" in err
    _, _, err = run("reward", "test", "own.py:f")
    assert f"there is no file {tmp_path}/own.py" in err


def test_a_dry_run_refuses_a_model_without_a_chat_template(repository: Path, tmp_path: Path) -> None:
    shutil.copytree("examples/quickstart/model", tmp_path / "model")
    paths = [f"worker.actor.model.model_path={tmp_path}/model", f"trainer.save_checkpoint_path={tmp_path}/run"]
    words = ["train", "examples/quickstart/config.yaml", *paths, "--dry-run"]
    assert run(*words)[0] == 0
    (tmp_path / "model/chat_template.jinja").unlink()
    code, _, err = run(*words)
    assert code == 2
    assert "data.override_chat_template" in err
    assert run(*words, "data.override_chat_template={{ messages }}")[0] == 0
