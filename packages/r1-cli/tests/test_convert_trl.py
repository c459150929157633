"""What a GRPOConfig of TRL comes to, from YAML, JSON or a training script, and what of it is named as lost."""

import ast
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_convert import dry_run, run

from r1_cli.config import lookup
from r1_cli.config.convert.trl import convert_trl
from r1_cli.config.convert.trl_keys import DEFAULTS

TRL = {
    "model_name_or_path": "Qwen/Qwen2.5-0.5B-Instruct",
    "dataset_name": "owner/rows",
    "dataset_config": "main",
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 4,
    "steps_per_generation": 8,
    "num_generations": 8,
    "num_iterations": 2,
    "max_steps": 400,
    "save_steps": 40,
    "beta": 0.04,
    "use_vllm": True,
    "vllm_mode": "colocate",
    "report_to": ["tensorboard", "trackio"],
    "use_peft": True,
    "reward_funcs": ["accuracy_reward", "think_format_reward"],
    "reward_weights": [1.0, 0.5],
    "lr_scheduler_type": "cosine_with_min_lr",
    "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
    "optim": "paged_adamw_8bit",
    "fancy_new": 3,
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("write", [json.dumps, yaml.safe_dump])
def test_a_dry_run_takes_what_a_grpo_config_of_trl_comes_to(folder: Path, write: Any) -> None:
    (folder / "grpo.yaml").write_text(write(TRL))
    printed, told = run("convert", "trl", "grpo.yaml", "--devices", "2")
    assert told == ""
    assert "#   fancy_new=3" in printed
    assert "optim=paged_adamw_8bit: worker.actor.optim.strategy" in printed
    config = dry_run(printed)
    # 4 sequences × 2 processes × 8 micro-steps sampled, × 4 accumulated updated, of 8 answers to a prompt
    assert (config.data.rollout_batch_size, config.worker.actor.global_batch_size) == (8, 4)
    assert config.trainer.max_steps == 100  # 400 optimizer steps, 2 × 2 of them a step
    assert config.trainer.save_freq == 10
    assert config.data.train_files == "owner/rows:main@train"
    assert (config.algorithm.kl_coef, config.algorithm.disable_kl) == (0.04, False)
    assert lookup(config, "algorithm.adv_eps") == 1e-4
    assert config.algorithm.rollout_correction.rollout_is == "sequence"
    assert config.worker.actor.model.lora.rank == 16
    assert config.worker.actor.optim.min_lr_ratio == 0.1
    parts = config.worker.reward.reward_function_kwargs["parts"]
    assert parts == {"math": {"weight": 1.0}, "format": {"weight": 0.5, "mode": "think"}}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"loss_type": "grpo"}, {"worker.actor.loss_type": "default", "worker.actor.loss_avg_mode": "seq"}),
        ({"loss_type": "dr_grpo", "scale_rewards": False}, {"algorithm.adv_estimator": "dr_grpo"}),
        ({"scale_rewards": "batch"}, {"algorithm.adv_estimator": "lite_ppo"}),
        ({"multi_objective_aggregation": "normalize_then_sum"}, {"algorithm.adv_estimator": "gdpo"}),
        ({"importance_sampling_level": "sequence", "epsilon": 3e-4}, {"worker.actor.loss_type": "gspo"}),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, {"worker.actor.clip_ratio_high": 4.0}),
        ({"loss_type": "sapo", "sapo_temperature_neg": 1.1}, {"worker.actor.tau_negative": 1.1}),
        ({"delta": 4.0}, {"worker.actor.clip_ratio_dual": 4.0}),
        ({"warmup_steps": 0.1}, {"worker.actor.optim.lr_warmup_ratio": 0.1}),
        ({"eval_strategy": "steps", "eval_steps": 5, "dataset_name": "a/b"}, {"data.val_files": "a/b@test"}),
        ({"bf16": None}, {"worker.actor.fsdp.mp_param_dtype": "bf16"}),
    ],
)
def test_trls_losses_and_scalings_have_their_counterparts(given: dict[str, Any], expected: dict[str, Any]) -> None:
    rest = {"model_name_or_path": "a/b", "dataset_name": "a/b", "reward_funcs": "accuracy_reward"}
    made = convert_trl(yaml.safe_dump(rest | given), 1)
    assert expected.items() <= made.settings.items()
    dry_run(made.text())


@pytest.mark.parametrize("value", ["none", "false", "False"])
def test_plain_yaml_of_trl_is_read_as_trl_reads_it(value: str) -> None:
    made = convert_trl(f"scale_rewards: {value}\nlearning_rate: 1e-6\neval_strategy: no\nepsilon_high: null\n", 1)
    assert made.settings["algorithm.adv_estimator"] == "dr_grpo"
    assert made.settings["worker.actor.optim.lr"] == 1e-6
    assert made.settings["worker.actor.clip_ratio_high"] == 0.2
    assert made.settings["trainer.val_freq"] == -1


def test_what_the_source_named_is_in_the_file_even_if_it_is_r1s_default() -> None:
    named = {"learning_rate": 1e-6, "num_generations": 5, "num_train_epochs": 15, "temperature": 1.0}
    tree = yaml.safe_load(convert_trl(yaml.safe_dump(named), 1).text())
    assert (tree["worker"]["actor"]["optim"]["lr"], tree["trainer"]["total_epochs"]) == (1e-6, 15)
    assert (tree["worker"]["rollout"]["n"], tree["worker"]["rollout"]["temperature"]) == (5, 1.0)


def defaults_of_transformers() -> dict[str, Any]:
    """What TrainingArguments of the installed transformers has where nothing is given, read without importing torch."""
    spec = find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).with_name("training_args.py").read_text("utf-8"))
    body = next(node.body for node in tree.body if getattr(node, "name", "") == "TrainingArguments")
    found = {}
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(node.value, ast.Call):
            default = next((word.value for word in node.value.keywords if word.arg == "default"), None)
            literal = isinstance(default, ast.Constant | ast.UnaryOp)
            found[node.target.id] = ast.literal_eval(default) if literal else None
    return found


def test_a_dump_of_a_whole_grpo_config_asks_for_nothing_unknown(folder: Path) -> None:
    given = defaults_of_transformers() | DEFAULTS
    given |= {"include_for_metrics": [], "debug": [], "disable_tqdm": False, "remove_unused_columns": False}
    made = convert_trl(json.dumps(given), 1)
    assert len(given) > 130
    assert (made.unknown(), made.lost) == ([], [])
    (folder / "grpo.json").write_text(json.dumps(given | {"label_smoothing_factor": 0.1, "fancy_new": 3}))
    printed, _ = run("convert", "trl", "grpo.json")
    assert "# Unknown, and left out:\n#   label_smoothing_factor=0.1, fancy_new=3\n" in printed


SCRIPT = """\
import trl
from datasets import load_dataset
from peft import LoraConfig
from trl.rewards import accuracy_reward
import no_such_module  # nothing of this file is executed

MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
SEEN = 1
SEEN = 2

def main():
    rows = load_dataset("owner/rows", split="train")
    config = trl.GRPOConfig(
        "out", learning_rate=2e-6, num_generations=4, scale_rewards="none", max_steps=args.steps, seed=SEEN, **more
    )
    raise SystemExit("executed")
    trainer = trl.GRPOTrainer(
        model=MODEL, reward_funcs=[accuracy_reward, length], args=config, train_dataset=rows, callbacks=[Report()],
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj"]),
    )
"""


def test_a_training_script_of_trl_is_read_without_being_executed(folder: Path) -> None:
    (folder / "train.py").write_text(SCRIPT)
    printed, _ = run("convert", "trl", "train.py")
    config = dry_run(printed)
    assert config.worker.actor.model.model_path == "Qwen/Qwen2.5-0.5B-Instruct"
    assert (config.worker.actor.optim.lr, config.worker.rollout.n) == (2e-6, 4)
    assert (config.algorithm.adv_estimator, config.trainer.save_checkpoint_path) == ("dr_grpo", "out")
    assert config.data.train_files == "owner/rows@train"
    assert (config.worker.actor.model.lora.rank, config.worker.actor.model.lora.target_modules) == (8, ["q_proj"])
    assert config.worker.reward.reward_function == "math"
    for code in ("GRPOConfig(max_steps=args.steps)", "seed=SEEN", "GRPOConfig(**more)", "callbacks=[Report()]"):
        assert code in printed
    assert "reward_funcs length: name its file and function" in printed


def test_tools_and_environments_of_trl_are_named_with_the_setting_to_write() -> None:
    script = (
        "from trl import GRPOConfig, GRPOTrainer\n"
        "args = GRPOConfig(max_tool_calling_iterations=3, max_completion_length=64)\n"
        "GRPOTrainer('owner/model', reward_funcs=[accuracy_reward], args=args, tools=[look, multiply], "
        "environment_factory=Store, rollout_func=play)\n"
    )
    made = convert_trl(script, 1)
    assert made.settings["worker.rollout.multi_turn.max_assistant_turns"] == 4
    told = "\n".join(made.lost)
    for tool in ("look", "multiply"):
        assert f"tools {tool}: put it into a file" in told
        assert f"set worker.rollout.multi_turn.tools=./tools.py:{tool}" in told
    assert "environment_factory Store" in told
    assert "worker.rollout.multi_turn.environment=./environment.py:Store" in told
    assert "worker.rollout.multi_turn.agent" in told
    assert made.unknown() == []
