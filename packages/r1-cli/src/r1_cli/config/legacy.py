"""Translate keys of earlier EasyR1 releases to today's, each with a notice."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from os.path import isfile

from r1_cli.config.section import Tree
from r1_cli.config.settings import Setting

# Whole keys that have another name today.
RENAMED = {
    "data.train_batch_size": "data.rollout_batch_size",
    "data.chat_template": "data.override_chat_template",
    "data.prompt_data": "data.train_files",
    "data.prompt_data_probs": "data.train_probs",
    "algorithm.kl_ctrl.type": "algorithm.kl_type",
    "algorithm.kl_ctrl.kl_coef": "algorithm.kl_coef",
    "algorithm.kl_ctrl.horizon": "algorithm.kl_horizon",
    "algorithm.kl_ctrl.target_kl": "algorithm.kl_target",
    "worker.actor.use_kl_loss": "algorithm.use_kl_loss",
    "algorithm.norm_adv_by_std_in_grpo": "algorithm.norm_adv_by_std",
    "worker.actor.kl_loss_coef": "algorithm.kl_coef",
    "worker.actor.kl_loss_type": "algorithm.kl_penalty",
    "worker.actor.clip_ratio_c": "worker.actor.clip_ratio_dual",
    "worker.actor.policy_loss.loss_mode": "worker.actor.loss_type",
    "worker.actor.policy_loss.clip_cov_ratio": "worker.actor.clip_cov_ratio",
    "worker.actor.policy_loss.clip_cov_lb": "worker.actor.clip_cov_lb",
    "worker.actor.policy_loss.clip_cov_ub": "worker.actor.clip_cov_ub",
    "worker.actor.policy_loss.kl_cov_ratio": "worker.actor.kl_cov_ratio",
    "worker.actor.policy_loss.ppo_kl_coef": "worker.actor.kl_cov_coef",
    "worker.actor.entropy_coeff": "worker.actor.entropy_coef",
    "worker.rollout.log_prob_micro_batch_size_per_gpu": "worker.actor.micro_batch_size_per_device_for_experience",
    "worker.ref.log_prob_micro_batch_size_per_gpu": "worker.actor.micro_batch_size_per_device_for_experience",
    "worker.rollout.tensor_model_parallel_size": "worker.rollout.tensor_parallel_size",
    "worker.reward.compute_score": "worker.reward.reward_function",
    "worker.reward.score_function": "worker.reward.reward_function",
    "reward_model.reward_compute_score": "worker.reward.reward_function",
    "trainer.total_episodes": "trainer.total_epochs",
    "trainer.total_training_steps": "trainer.max_steps",
    "trainer.val_generations_to_log_to_wandb": "trainer.val_generations_to_log",
    "trainer.test_freq": "trainer.val_freq",
    "trainer.default_local_dir": "trainer.save_checkpoint_path",
}
# The same inside the actor and the critic, and for the offload switches inside the reference.
RENAMED_IN_UPDATE = {
    "ulysses_sequence_parallel_size": "ulysses_size",
    "loss_agg_mode": "loss_avg_mode",
    "ppo_mini_batch_size": "global_batch_size",
    "ppo_micro_batch_size_per_gpu": "micro_batch_size_per_device_for_update",
    "forward_micro_batch_size_per_gpu": "micro_batch_size_per_device_for_experience",
    "use_dynamic_bsz": "dynamic_batching",
    "grad_clip": "max_grad_norm",
    "model.path": "model.model_path",
    "model.use_remove_padding": "padding_free",
    "optim.lr_warmup_steps_ratio": "optim.lr_warmup_ratio",
    "optim.warmup_style": "optim.lr_scheduler_type",
}
RENAMED_IN_SHARDED = {
    "offload.param_offload": "offload.offload_params",
    "offload.optimizer_offload": "offload.offload_optimizer",
    "fsdp.param_offload": "offload.offload_params",
    "fsdp.optimizer_offload": "offload.offload_optimizer",
    "fsdp_config.param_offload": "offload.offload_params",
    "fsdp_config.optimizer_offload": "offload.offload_optimizer",
    "fsdp_config.fsdp_size": "fsdp.fsdp_size",
    "model.fsdp_config.param_offload": "offload.offload_params",
    "model.fsdp_config.optimizer_offload": "offload.offload_optimizer",
    "model.fsdp_config.fsdp_size": "fsdp.fsdp_size",
}
RENAMED |= {
    f"worker.{owner}.{old}": f"worker.{owner}.{new}"
    for owners, names in ((("actor", "critic"), RENAMED_IN_UPDATE), (("actor", "critic", "ref"), RENAMED_IN_SHARDED))
    for owner in owners
    for old, new in names.items()
}
# Beginnings of keys; the first release named its sections otherwise.
MOVED = {
    "actor_rollout_ref.hybrid_engine": "worker.hybrid_engine",
    "actor_rollout_ref.model.": "worker.actor.model.",
    "actor_rollout_ref.actor.": "worker.actor.",
    "actor_rollout_ref.ref.": "worker.ref.",
    "actor_rollout_ref.rollout.": "worker.rollout.",
    "critic.": "worker.critic.",
    "reward_model.overlong_buffer.": "worker.reward.overlong_buffer.",
    "worker.reward.score_function_kwargs.": "worker.reward.reward_function_kwargs.",
}
# Keys without a successor, by their beginning, and why nothing is lost.
DROPPED = {
    "algorithm.filter_target": "set algorithm.filter_mode",
    "worker.reward.overlong_buffer.log": "the penalty is always logged",
    "worker.rollout.calculate_log_probs": "the engine always returns the log-probs that it sampled with",
    "trainer.remove_ckpt_after_load": "a checkpoint is never deleted by loading it; trainer.save_limit prunes",
    "trainer.del_local_ckpt_after_load": "a checkpoint is never deleted by loading it; trainer.save_limit prunes",
    "trainer.default_hdfs_dir": "checkpoints go to trainer.save_checkpoint_path",
    "trainer.resume_from_path": "name the checkpoint in trainer.load_checkpoint_path",
    "trainer.balance_batch": "batches are always balanced by tokens",
    "data.tokenizer": "set worker.actor.model.tokenizer_path",
    "data.return_raw_input_ids": "prompts are rendered once, for the engine and the learner alike",
    "data.return_raw_chat": "prompts are rendered once, for the engine and the learner alike",
    "worker.rollout.free_cache_engine": "the engine always frees its cache between two rounds of sampling",
    "worker.rollout.load_format": "the engine takes its weights from the learner",
    "worker.rollout.max_num_seqs": "the engine chooses how many sequences it runs at once",
    "worker.rollout.do_sample": "set worker.rollout.temperature, 0 for greedy",
    "worker.rollout.prompt_length": "set data.max_prompt_length",
    "worker.rollout.response_length": "set data.max_response_length",
    "reward_model.": "set worker.reward.reward_function",
} | {
    f"worker.{w}.{name}": reason
    for w in ("actor", "critic", "ref", "rollout")
    for name, reason in {
        "ppo_micro_batch_size": "set micro_batch_size_per_device_for_update",
        "forward_micro_batch_size": "set micro_batch_size_per_device_for_experience",
        "log_prob_micro_batch_size": "set worker.actor.micro_batch_size_per_device_for_experience",
        "log_prob_use_dynamic_bsz": "set worker.actor.dynamic_batching",
        "log_prob_max_token_len_per_gpu": "the token budget is micro batch size × longest sequence",
        "ppo_max_token_len_per_gpu": "the token budget is micro batch size × longest sequence",
        "forward_max_token_len_per_gpu": "the token budget is micro batch size × longest sequence",
        "ulysses_sequence_parallel_size": "set worker.actor.ulysses_size",
        "optim.total_training_steps": "the number of steps follows from the data and trainer.max_steps",
        "model.external_lib": "models come from transformers",
        "fsdp_config.wrap_policy": "the model's own layers are sharded",
        "model.fsdp_config.wrap_policy": "the model's own layers are sharded",
    }.items()
}
# Example files that moved between releases.
MOVED_FILES = {"examples/score_function/": "examples/reward_function/", "_format.jinja": ".jinja"}
# The KL loss of early releases had its own coefficient; algorithm.kl_coef then meant KL inside the reward.
KL_LOSS = {"worker.actor.kl_loss_coef": "algorithm.kl_coef", "worker.actor.kl_loss_type": "algorithm.kl_penalty"}
PREVIOUS_CHECKPOINT = ("trainer.remove_previous_ckpt", "trainer.remove_previous_ckpt_in_save")
# What `dapo` means in addition to GRPO's advantages (arXiv 2503.14476).
DAPO = {
    "algorithm.disable_kl": True,
    "algorithm.online_filtering": True,
    "worker.actor.clip_ratio_low": 0.2,
    "worker.actor.clip_ratio_high": 0.28,
    "worker.actor.loss_avg_mode": "token",
}
# The estimators of OpenRLHF and LMM-R1 that have another name here, or settings of their own.
OPENRLHF = {
    "reinforce": {"algorithm.adv_estimator": "reinforce_plus_plus", "algorithm.adv_unbiased_std": False},
    "group_norm": {
        "algorithm.adv_estimator": "reinforce_baseline",
        "algorithm.adv_baseline": "group_norm",
        "algorithm.adv_whiten": False,
    },
}


@dataclass(frozen=True, slots=True)
class Translated:
    settings: list[Setting]
    notices: list[str]


def translate(layer: list[Setting]) -> Translated:
    """Return the layer with current names. A value under the current name wins."""
    moved = [(_moved(setting), setting.key) for setting in layer]
    result = {setting.key: setting for setting, _ in moved if not _is_old(setting.key)}
    given = {setting.key: setting.value for setting, _ in moved}
    notices: list[str] = []
    for setting, typed in moved:
        for new, notice in _convert(setting, typed, given):
            if notice:
                notices.append(f"{setting.origin}: {typed} {notice}")
            if new is None:
                result.pop(setting.key, None)
            elif new.key in result and new.key != setting.key and setting.key not in KL_LOSS:
                if new.value != result[new.key].value:
                    notices.append(f"{setting.origin}: {typed} is ignored, because {new.key} is given too")
            else:
                result[new.key] = new
    return Translated(list(result.values()), notices)


def _moved(setting: Setting) -> Setting:
    for old, new in MOVED.items():
        if setting.key.startswith(old):
            return replace(setting, key=new + setting.key[len(old) :])
    return setting


def _is_old(key: str) -> bool:
    special = key in PREVIOUS_CHECKPOINT or key in ("worker.actor.clip_ratio", "trainer.resume_mode")
    return special or key in RENAMED or _dropped(key) is not None


def _dropped(key: str) -> str | None:
    return next((why for old, why in DROPPED.items() if key == old or key.startswith(f"{old.rstrip('.')}.")), None)


def _convert(setting: Setting, typed: str, given: Tree) -> Iterator[tuple[Setting | None, str]]:
    key, value = setting.key, setting.value
    if value is None and _is_old(key):
        return
    if key == "worker.actor.clip_ratio":
        yield replace(setting, key="worker.actor.clip_ratio_low"), "is now clip_ratio_low and clip_ratio_high"
        yield replace(setting, key="worker.actor.clip_ratio_high"), ""
    elif key in PREVIOUS_CHECKPOINT:
        limit = 1 if value is True else -1
        yield replace(setting, key="trainer.save_limit", value=limit), f"is now trainer.save_limit={limit}"
    elif key == "trainer.resume_mode":
        find = value != "disable"
        yield replace(setting, key="trainer.find_last_checkpoint", value=find), "is now trainer.find_last_checkpoint"
    elif key == "worker.reward.reward_type":
        yield from _reward_type(setting)
    elif key == "algorithm.adv_estimator" and value == "dapo":
        yield from _several(setting, given, {key: "grpo", **DAPO})
    elif key == "algorithm.adv_estimator" and isinstance(value, str) and value in OPENRLHF:
        yield from _several(setting, given, OPENRLHF[value])
    elif key in KL_LOSS and given.get("worker.actor.use_kl_loss") is False:
        yield None, "is ignored, because use_kl_loss is false"
    elif key == "data.prompt_data" and isinstance(value, str) and "," in value:  # LMM-R1 lists files with commas
        yield replace(setting, key="data.train_files", value=value.split(",")), "is now data.train_files, a list"
    elif key in RENAMED:
        yield _with_file_moved(replace(setting, key=RENAMED[key])), f"is now {RENAMED[key]}"
    elif (why := _dropped(key)) is not None:
        yield None, f"is not needed any more: {why}"
    elif key == "data.system_prompt" and value is not None:
        yield setting, "still works; today a template in data.format_prompt is used instead"
    else:
        yield _with_file_moved(setting), f"is now {key}" if typed != key else ""


def _reward_type(setting: Setting) -> Iterator[tuple[Setting | None, str]]:
    if setting.value == "function":
        yield None, "is not needed any more: set worker.reward.reward_function"
    else:
        yield setting, "is now the constant REWARD_TYPE in the file of worker.reward.reward_function"


def _several(setting: Setting, given: Tree, meant: Tree) -> Iterator[tuple[Setting, str]]:
    estimator = str(meant[setting.key])
    added = {key: value for key, value in meant.items() if key != setting.key and key not in given}
    shown = ", ".join(f"{key}={value}" for key, value in added.items())
    yield (
        replace(setting, value=estimator, raw=estimator),
        f"{setting.value} is {estimator} with {shown or 'your own settings'}",
    )
    for key, value in added.items():
        yield replace(setting, key=key, value=value, raw=str(value)), ""


def _with_file_moved(setting: Setting) -> Setting:
    if not isinstance(setting.value, str) or not setting.key.endswith(("reward_function", "format_prompt")):
        return setting
    path = today = setting.value
    for old, new in MOVED_FILES.items():
        today = today.replace(old, new)
    exists = isfile(today.rpartition(".py:")[0] + ".py" if ".py:" in today else today)
    return replace(setting, value=today, raw=today) if today != path and exists else setting
