"""Other trainers' commands and configurations come out as what a run takes, and what is lost is named."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_convert import dry_run, run

from r1_cli.config import load_config, lookup
from r1_cli.config.convert.lmm_r1 import convert_lmm_r1
from r1_cli.config.convert.lmm_r1_keys import DEFAULTS, KEYS, NO_COUNTERPART
from r1_cli.config.convert.shell import command_words, read_flags
from r1_cli.config.convert.verl import convert_verl
from r1_cli.config.multi_turn import MultiTurnSettings

VL = "--pretrain Qwen/Qwen2.5-VL-3B-Instruct --prompt_data owner/rows --input_key message --label_key answer"
SERVER = "--remote_rm_url http://127.0.0.1:5000/get_reward"
# LMM-R1's ways to train, each as a command, and what has to come of it.
COMMANDS: dict[str, tuple[str, dict[str, Any]]] = {
    "PPO with a critic": (
        f"{VL} {SERVER} --advantage_estimator gae --actor_learning_rate 1e-6 --critic_learning_rate 9e-6 "
        "--rollout_batch_size 256 --n_samples_per_prompt 16 --train_batch_size 256 --value_clip 0.1 --lambd 0.95 "
        "--freezing_actor_steps 5",
        {
            "algorithm.adv_estimator": "gae",
            "algorithm.lam": 0.95,
            "worker.critic.optim.lr": 9e-6,
            "worker.critic.optim.betas": (0.9, 0.95),
            "worker.critic.cliprange_value": 0.1,
            "worker.critic.global_batch_size": 16,
            "worker.actor.global_batch_size": 16,
            "trainer.critic_warmup": 5,
        },
    ),
    "text before pictures, by a group's baseline": (
        f"{VL} {SERVER} --advantage_estimator reinforce_baseline --init_kl_coef 0.001 --rollout_batch_size 256 "
        "--n_samples_per_prompt 16 --train_batch_size 256 --actor_learning_rate 4e-7 --prompt_max_len 4096 "
        "--generate_max_len 4096 --freeze_prefix visual --colocate_all_models --packing_samples --normalize_reward",
        {
            "algorithm.adv_estimator": "reinforce_baseline",
            "algorithm.kl_penalty": "k1",
            "algorithm.kl_coef": 0.001,
            "algorithm.use_kl_loss": False,
            "algorithm.normalize_reward": False,
            "worker.actor.optim.lr": 4e-7,
            "worker.actor.model.freeze_vision_tower": True,
            "worker.actor.padding_free": True,
            "worker.reward.reward_function": "http://127.0.0.1:5000/get_reward",
            "data.prompt_key": "message",
            "data.max_pixels": 16384 * 28 * 28,
        },
    ),
    "REINFORCE++ with a growing KL": (
        f"{VL} {SERVER} --advantage_estimator reinforce --kl_target 0.05 --kl_horizon 5000 --gamma 0.99",
        {
            "algorithm.adv_estimator": "reinforce_plus_plus",
            "algorithm.adv_unbiased_std": False,
            "algorithm.gamma": 0.99,
            "algorithm.kl_type": "adaptive",
            "algorithm.kl_horizon": 5000.0,
        },
    ),
    "RLOO without a reference": (
        f"{VL} {SERVER} --advantage_estimator rloo --n_samples_per_prompt 4 --init_kl_coef 0 --train_batch_size 16",
        {"algorithm.adv_baseline": "leave_one_out", "algorithm.disable_kl": True, "worker.actor.global_batch_size": 4},
    ),
    "GRPO with the KL in the loss": (
        f"{VL} {SERVER} --advantage_estimator group_norm --n_samples_per_prompt 8 --use_kl_loss --kl_estimator k3",
        {
            "algorithm.adv_baseline": "group_norm",
            "algorithm.adv_whiten": False,
            "algorithm.use_kl_loss": True,
            "algorithm.kl_penalty": "k3",
        },
    ),
    "mixed data, other GPUs for the engines": (
        "--pretrain Qwen/Qwen2.5-VL-3B-Instruct --prompt_data owner/a,owner/b --prompt_data_probs 0.3,0.7 "
        f"--input_key message --label_key answer {SERVER} --actor_num_gpus_per_node 4 --vllm_num_engines 2 "
        "--vllm_tensor_parallel_size 2 --eval_dataset owner/a --eval_split test --eval_steps 10 "
        "--prompt_max_len 512 --train_batch_size 64",
        {
            "data.train_files": ["owner/a@train", "owner/b@train"],
            "data.train_probs": [0.3, 0.7],
            "data.val_files": "owner/a@test",
            "trainer.n_gpus_per_node": 4,
            "worker.rollout.engines.nnodes": 1,
            "worker.rollout.engines.n_gpus_per_node": 4,
            "worker.rollout.val_override_config.n": 4,
            "trainer.val_freq": 10,
        },
    ),
    "several reward models and an adapter in 4 bits": (
        f"{VL} --reward_pretrain owner/one,owner/two --normalize_reward --lora_rank 32 --load_in_4bit "
        "--target_modules q_proj v_proj --actor_num_gpus_per_node 1 --reward_clip_range -5 5",
        {
            "worker.reward.reward_function": "combine",
            "algorithm.normalize_reward": True,
            "algorithm.reward_clip_range": (-5.0, 5.0),
            "worker.actor.model.lora.rank": 32,
            "worker.actor.model.lora.alpha": 16,
            "worker.actor.model.lora.target_modules": ["q_proj", "v_proj"],
            "worker.actor.model.quantization": "nf4",
        },
    ),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", COMMANDS)
def test_a_dry_run_takes_what_a_command_of_lmm_r1_comes_to(name: str) -> None:
    words, expected = COMMANDS[name]
    printed, told = run("convert", "lmm-r1", f"python3 -m openrlhf.cli.train_ppo_ray {words} --bf16")
    assert told == ""
    assert "Unknown" not in printed
    config = dry_run(printed)
    assert {key: lookup(config, key) for key in expected} == expected
    assert lookup(config, "worker.actor.clip_ratio_dual") == 1e9  # it has none


def test_every_option_of_lmm_r1_is_known() -> None:
    further = """
        eval_dataset temperature top_p max_norm enforce_eager use_wandb use_tensorboard use_ms limit_mm_per_prompt
        processor_kwargs input_template remote_rm_url reward_pretrain critic_pretrain normalize_reward freeze_prefix
        lora_rank target_modules exclude_modules load_in_4bit vllm_num_engines colocate_all_models store_extra_buffers
        entropy_loss_coef use_kl_loss no_advantage_std_norm kl_target freezing_actor_steps prompt_data prompt_data_probs
    """
    flags = {*further.split(), *KEYS, *DEFAULTS, *NO_COUNTERPART}
    own = {"prompt_data_probs": "1", "limit_mm_per_prompt": "'{\"image\": 2}'", "processor_kwargs": "'{}'"}
    own |= {"adam_betas": "0.9 0.95", "reward_clip_range": "-1 1", "advantage_estimator": "gae", "kl_estimator": "k1"}
    made = convert_lmm_r1(" ".join(f"--{flag} {own.get(flag, 1)}" for flag in sorted(flags)))
    assert made.unknown() == []
    assert made.settings["worker.rollout.limit_images"] == 2


def test_what_has_no_counterpart_is_told_with_its_reason_and_what_is_unknown_by_its_name() -> None:
    printed, _ = run("convert", "lmm-r1", f"{VL} {SERVER} --zero_stage 3 --enable_ema --no_such_thing 7")
    assert "#   --zero_stage=3: weights, gradients and states are always sharded" in printed
    assert "#   --enable_ema=True: no moving average" in printed
    assert "# Unknown, and left out:\n#   --no_such_thing=7\n" in printed


def test_a_key_on_the_command_line_is_not_copied() -> None:
    printed, told = run("convert", "lmm-r1", f"{VL} {SERVER} --use_wandb SECRETSECRET --other_token SECRETSECRET")
    assert "SECRETSECRET" not in printed + told
    assert "WANDB_API_KEY" in printed


def test_a_script_is_read_with_its_variables_continued_lines_and_job_runner(folder: Path) -> None:
    (folder / "run.sh").write_text(
        '#!/bin/bash\n# --pretrain is below\nexport MODEL="owner/model"\nSTEPS=7\n'
        'ray job submit --address="http://127.0.0.1:8265" \\\n  --runtime-env-json=\'{"a": "b"}\' \\\n'
        "  -- python3 -m openrlhf.cli.train_ppo_ray \\\n   --pretrain $MODEL --save_steps ${STEPS} \\\n"
        "   --ckpt_path $OUT/ckpt --prompt_data owner/rows --label_key answer > train.log 2>&1 &\n"
    )
    config, _ = run("convert", "lmm-r1", "run.sh")
    tree = yaml.safe_load(config)
    assert tree["worker"]["actor"]["model"]["model_path"] == "owner/model"
    assert tree["trainer"]["save_freq"] == 7
    assert tree["trainer"]["save_checkpoint_path"] == "$OUT/ckpt"


def test_what_a_run_would_be_refused_for_is_said_on_stderr() -> None:
    _, told = run("convert", "lmm-r1", f"{VL} {SERVER} --train_batch_size 100 --rollout_batch_size 64")
    assert "worker.actor.global_batch_size" in told
    _, told = run("convert", "lmm-r1", "--pretrain owner/model")
    assert "data.train_files" in told
    assert "worker.reward.reward_function" in told


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lmm-r1", "--train_batch_size many --pretrain a/b"], "--train_batch_size=many: must be a number"),
        (["lmm-r1", "--adam_betas 0.9 --pretrain a/b"], "--adam_betas=0.9: must be a list"),
        (["lmm-r1", "--advantage_estimator magic"], "--advantage_estimator magic is none"),
        (["lmm-r1", "--pretrain 'a/b"], "No closing quotation"),
        (["lmm-r1", "a.yaml b"], "stands before the first option"),
        (["lmm-r1", "--processor_kwargs 5"], "must be a JSON mapping"),
        (["trl", "bad.yaml"], "is not YAML"),
        (["trl", "list.yaml"], "must hold the keys of a GRPOConfig"),
        (["verl", "list.yaml"], "neither a configuration of veRL"),
    ],
)
def test_what_cannot_be_read_is_said_in_one_line(folder: Path, words: list[str], message: str) -> None:
    (folder / "bad.yaml").write_text("a: [1\n b: {")
    (folder / "list.yaml").write_text("- 1\n")
    _, told = run("convert", *words, code=2)
    assert message in told


VERL = """\
set -x
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files=owner/geometry3k@train data.val_files=owner/geometry3k@test \\
    data.train_batch_size=512 data.max_prompt_length=1024 data.max_response_length=2048 \\
    data.filter_overlong_prompts=True data.truncation='error' \\
    actor_rollout_ref.model.path=Qwen/Qwen2.5-VL-7B-Instruct actor_rollout_ref.model.use_remove_padding=True \\
    actor_rollout_ref.actor.ppo_mini_batch_size=128 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=10 \\
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.01 \\
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=5 \\
    +actor_rollout_ref.rollout.engine_kwargs.vllm.disable_mm_preprocessor_cache=True \\
    trainer.logger='["console","tensorboard"]' trainer.save_freq=20 trainer.test_freq=5 what.is.this=4 $@
"""


def test_a_dry_run_takes_what_a_script_of_verl_comes_to(folder: Path) -> None:
    (folder / "run.sh").write_text(VERL)
    printed, told = run("convert", "verl", "run.sh", "actor_rollout_ref.actor.clip_ratio_high=0.28")
    assert told == ""
    assert "#   what.is.this=4" in printed
    assert "disable_mm_preprocessor_cache=True: engines have the keys of worker.rollout" in printed
    config = dry_run(printed)
    run("train", "converted.yaml", "--dry-run")
    assert config.data.rollout_batch_size == 512
    assert config.worker.reward.reward_function == "geo3k"
    assert (config.worker.actor.global_batch_size, config.worker.rollout.n) == (128, 5)
    assert lookup(config, "worker.actor.clip_ratio_high") == 0.28
    assert (config.algorithm.use_kl_loss, config.algorithm.kl_coef) == (True, 0.01)
    assert (config.trainer.total_epochs, config.trainer.val_freq) == (30, 5)  # the former is veRL's own default
    assert config.worker.rollout.val_override_config.temperature == 0
    assert config.worker.actor.dynamic_batching is False


def test_a_file_of_verl_is_read_with_its_references() -> None:
    text = """\
data: {train_files: owner/rows@train, max_prompt_length: 1000, max_response_length: 3000, train_batch_size: 64}
actor_rollout_ref:
  model: {path: owner/model, lora_rank: 8, target_modules: all-linear}
  actor:
    _target_: verl.workers.config.FSDPActorConfig
    ppo_mini_batch_size: 32
    use_dynamic_bsz: true
    ppo_max_token_len_per_gpu: 16000
    optim: {lr_warmup_steps: -1, lr: 2.0e-6, total_training_steps: -1}
    policy_loss: {loss_mode: gspo}
    profiler: {enable: false, ranks: []}
  rollout:
    n: 4
    name: sglang
    log_prob_use_dynamic_bsz: ${oc.select:actor_rollout_ref.actor.use_dynamic_bsz,false}
    response_length: ${data.max_response_length}
    multi_turn: {enable: true, max_user_turns: 3}
algorithm:
  adv_estimator: rloo
  use_kl_in_reward: true
  kl_ctrl: {type: adaptive, kl_coef: 0.002, horizon: 5000, target_kl: 0.2}
  filter_groups: {enable: true, metric: acc, max_num_gen_batches: 10}
reward_model:
  reward_manager: dapo
  reward_kwargs: {overlong_buffer_cfg: {enable: true, len: 512, penalty_factor: 1.0}}
custom_reward_function: {path: rewards.py, name: score}
trainer: {project_name: p, default_local_dir: "checkpoints/${trainer.project_name}/x", max_actor_ckpt_to_keep: 2}
"""
    Path("rewards.py").write_text("REWARD_TYPE = 'sequential'\ndef score(reward_input):\n    return 0.0\n")
    made = convert_verl(text, ["trainer.total_epochs=2"])
    config = dry_run(made.text())
    assert made.unknown() == []
    assert lookup(config, "worker.actor.micro_batch_size_per_device_for_update") == 4  # 16,000 of 4,000 tokens
    assert (config.algorithm.kl_type, config.algorithm.kl_coef, config.algorithm.kl_target) == ("adaptive", 0.002, 0.2)
    assert (config.algorithm.filter_mode, config.algorithm.filter_key) == ("zero_variance", "accuracy")
    assert (config.worker.actor.loss_type, config.worker.actor.model.lora.alpha) == ("gspo", 16)
    assert config.trainer.save_checkpoint_path == "checkpoints/p/x"
    assert config.worker.reward.overlong_buffer.len == 512
    assert config.worker.reward.reward_function == "rewards.py:score"
    told = "\n".join(made.lost)
    assert "multi_turn.enable=true: set worker.rollout.multi_turn.tools, environment or agent, and its enable" in told
    assert "name=sglang" in told


def test_every_key_of_verls_critic_is_translated_or_named() -> None:
    text = """\
data: {train_files: owner/rows@train, train_batch_size: 8}
algorithm: {adv_estimator: gae}
actor_rollout_ref:
  model: {path: owner/model}
  rollout: {n: 1}
critic:
  rollout_n: 1
  strategy: fsdp2
  enable: true
  optim: {lr: 2.0e-5, lr_warmup_steps_ratio: 0.1, min_lr_ratio: 0.1, warmup_style: cosine, total_training_steps: 5}
  model:
    path: owner/critic
    external_lib: mine
    enable_gradient_checkpointing: false
    enable_activation_offload: true
    use_remove_padding: true
    lora_rank: 8
    fsdp_config: {param_offload: true, fsdp_size: 2, forward_prefetch: true}
  ppo_mini_batch_size: 4
  ppo_micro_batch_size_per_gpu: 2
  forward_micro_batch_size_per_gpu: 4
  ppo_max_token_len_per_gpu: 100
  ulysses_sequence_parallel_size: 2
  ppo_epochs: 2
  shuffle: true
  grad_clip: 0.5
  cliprange_value: 0.3
  loss_agg_mode: seq-mean-token-mean
  checkpoint: {load_contents: [model]}
trainer: {critic_warmup: 3, n_gpus_per_node: 2, nnodes: 1}
"""
    made = convert_verl(text, [])
    assert made.unknown() == []
    ours = {key.removeprefix("worker.critic."): made.settings[key] for key in made.settings if ".critic." in key}
    assert (ours["global_batch_size"], ours["max_grad_norm"], ours["cliprange_value"], ours["ppo_epochs"]) == (
        4,
        0.5,
        0.3,
        2,
    )
    assert (ours["ulysses_size"], ours["loss_avg_mode"], ours["model.model_path"]) == (
        2,
        "seq-mean-token-mean",
        "owner/critic",
    )
    assert (ours["optim.lr"], ours["optim.lr_scheduler_type"], made.settings["trainer.critic_warmup"]) == (
        2e-5,
        "cosine",
        3,
    )
    told = "\n".join(made.lost)
    for key, why in {
        "critic.model.lora_rank=8": "all the critic's weights train",
        "critic.model.external_lib=mine": "models come from transformers",
        "critic.shuffle=True": "samples keep the order of sampling",
        "critic.ppo_max_token_len_per_gpu=100": "the token budget is micro batch size × longest sequence",
    }.items():
        assert f"{key}: {why}" in told
    assert "this one it has not" not in told


def test_a_script_of_verl_has_the_environments_variables_but_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("WANDB_API_KEY", "SECRETSECRET")
    monkeypatch.delenv("UNSET_HERE", raising=False)
    line = "python3 -m verl.trainer.main_ppo data.train_files=$HOME/a.parquet data.val_files=${HOME}/b.parquet "
    line += "actor_rollout_ref.model.path=~/models/a "
    made = convert_verl(line + "trainer.project_name=$WANDB_API_KEY trainer.experiment_name=$UNSET_HERE", [])
    assert made.settings["data.train_files"] == "/home/someone/a.parquet"
    assert made.settings["data.val_files"] == "/home/someone/b.parquet"
    assert made.settings["worker.actor.model.model_path"] == "/home/someone/models/a"
    assert made.settings["trainer.project_name"] == "$WANDB_API_KEY"
    assert made.settings["trainer.experiment_name"] == "$UNSET_HERE"


def test_words_of_a_command_end_where_the_shell_goes_on() -> None:
    words = command_words("cd x; python train_ppo_ray.py --a 1 --b -1 2 --c=x --d | tee log", ".*train_ppo_ray.py")
    assert read_flags(words) == {"a": 1, "b": [-1, 2], "c": "x", "d": True}


VERL_TURNS = """\
data: {{train_files: owner/rows@train, max_prompt_length: 1000, max_response_length: 3000, train_batch_size: 64}}
actor_rollout_ref:
  model: {{path: owner/model}}
  actor: {{ppo_mini_batch_size: 32}}
  rollout:
    n: 4
    multi_turn: {{{turns}}}
    agent: {{num_workers: 3, default_agent_loop: {loop}, custom_async_server: {{path: null}}}}
algorithm: {{adv_estimator: grpo}}
custom_reward_function: {{path: rewards.py, name: score}}
"""


def turns_of(turns: str, loop: str = "tool_agent") -> tuple[MultiTurnSettings, list[str], list[str]]:
    Path("rewards.py").write_text("def score(data_source, solution_str, ground_truth):\n    return 0.0\n")
    Path("tools.py").write_text("def look(x): ...\n")
    made = convert_verl(VERL_TURNS.format(turns=turns, loop=loop), [])
    assert made.unknown() == []
    Path("converted.yaml").write_text(made.text())
    return load_config(["converted.yaml"])[0].worker.rollout.multi_turn, made.lost, made.remarks


def test_settings_of_verls_episodes_keep_their_names_and_its_defaults() -> None:
    found, lost, remarks = turns_of(
        "enable: true, function_tool_path: tools.py, max_assistant_turns: 5, max_user_turns: 4, "
        "use_inference_chat_template: true, format: qwen3_coder"
    )
    assert lost == []
    assert any("turns keep the tokens that were sampled" in remark for remark in remarks)
    assert found == MultiTurnSettings(
        enable=True,
        function_tool_path="tools.py",
        max_assistant_turns=5,
        max_user_turns=4,
        max_parallel_calls=1,
        max_tool_response_length=256,
        num_workers=3,
        format="qwen3_coder",
        history="template",
    )


def test_tool_classes_of_verl_become_built_in_tools_or_are_named_with_the_function_to_write() -> None:
    Path("verl.yaml").write_text(
        "tools:\n- {class_name: verl.tools.search_tool.SearchTool}\n- class_name: mine.Zoom\n"
        "  tool_schema: {function: {name: zoom, parameters: {properties: {left: {}, top: {}}}}}\n"
    )
    found, lost, _ = turns_of("enable: true, tool_config_path: verl.yaml")
    assert (found.enable, found.tools, found.tool_config_path) == (True, ["search"], None)
    [told] = lost
    assert "mine.Zoom is a class: write a function zoom(left, top) into a file" in told


def test_what_of_verls_episodes_has_no_counterpart_is_named() -> None:
    found, lost, _ = turns_of(
        "enable: true, function_tool_path: tools.py, format: gpt-oss, interaction_config_path: a.yaml, "
        "num_repeat_rollouts: 2",
        loop="my_loop",
    )
    told = "\n".join(lost)
    assert found.format == "auto"
    assert "format=gpt-oss: the format is read off the chat template" in told
    assert "default_agent_loop=my_loop: an agent loop becomes worker.rollout.multi_turn.agent" in told
    assert "interaction_config_path=a.yaml: write a class with reset and step" in told
    assert "num_repeat_rollouts=2" in told


def test_settings_of_episodes_that_are_not_enabled_ask_for_nothing() -> None:
    found, lost, remarks = turns_of("enable: false, tool_config_path: null, max_user_turns: 3", loop="my_loop")
    assert found == MultiTurnSettings()
    assert lost == []
    assert not any("multi_turn" in remark for remark in remarks)


@pytest.mark.parametrize(
    ("words", "replays", "lost"),
    [
        (["actor_rollout_ref.actor.router_replay.mode=R3"], True, 0),
        (["actor_rollout_ref.rollout.enable_rollout_routing_replay=True"], True, 0),
        (["actor_rollout_ref.actor.router_replay.mode=disabled"], False, 0),
        (["actor_rollout_ref.actor.router_replay.mode=R2"], False, 1),
    ],
)
def test_verls_replay_of_routers_is_translated_or_named(words: list[str], replays: bool, lost: int) -> None:
    made = convert_verl("data: {train_files: owner/rows@train}", words)
    assert made.settings.get("worker.actor.router_replay", False) == replays
    assert sum("router_replay.mode=R2: worker.actor.router_replay=true" in line for line in made.lost) == lost
    assert made.unknown() == []
