"""Convert a command of LMM-R1 or OpenRLHF (`openrlhf.cli.train_ppo_ray` of 0.7)."""

import json
import re
from pathlib import PurePath

from r1_cli.config.convert.conversion import Conversion
from r1_cli.config.convert.lmm_r1_keys import DEFAULTS, KEYS, NO_COUNTERPART
from r1_cli.config.convert.shell import command_words, read_flags
from r1_cli.config.section import Tree

PROGRAM = r"(.*\.)?train_ppo_ray(\.py)?"


def convert_lmm_r1(command: str) -> Conversion:
    """Convert a command, as typed or inside a script. Raises ValueError if the text has none."""
    flags = read_flags(command_words(command, PROGRAM))
    if not flags:
        raise ValueError("there are no options such as --pretrain in it")
    made = Conversion("LMM-R1's command", {f"--{k}": v for k, v in flags.items()}, _dashed(DEFAULTS))
    made.rename(_dashed(KEYS))
    made.settings.setdefault("trainer.experiment_name", "lmm_r1")
    _data(made)
    _algorithm(made)
    _reward(made)
    _model(made)
    _placement(made)
    _reports(made)
    made.report_lost(_dashed(NO_COUNTERPART))
    return made


def _dashed(table: Tree) -> Tree:
    return {f"--{name}": value for name, value in table.items()}


def _data(made: Conversion) -> None:
    split, settings = made.read("--prompt_split"), made.settings
    if data := made.read("--prompt_data"):
        entries = [_entry(one.strip(), split) for one in str(data).split(",")]
        settings["data.train_files"] = entries if len(entries) > 1 else entries[0]
    if probs := made.read("--prompt_data_probs"):
        settings["data.train_probs"] = [float(one) for one in str(probs).split(",")]
    eval_split = made.read("--eval_split")
    if rows := made.read("--eval_dataset"):
        settings["data.val_files"] = _entry(str(rows), eval_split)
    if made.read("--label_key") is None:
        made.remarks.append("--label_key is not given, so that labels are empty there: set data.answer_key")
    if template := made.read("--input_template"):
        jinja = str(template).replace("{}", "{{ content }}")
        made.lost.append(f"--input_template: write {jinja!r} into a file, and name it in data.format_prompt")
    pixels = {"min_pixels": 4 * 28 * 28, "max_pixels": 16384 * 28 * 28, **_mapping(made, "--processor_kwargs")}
    for name, value in pixels.items():
        if name in ("min_pixels", "max_pixels"):
            settings[f"data.{name}"] = value
        else:
            made.lost.append(f"--processor_kwargs {name}={value}: the processor is as the model's files have it")
    for name, value in _mapping(made, "--limit_mm_per_prompt").items():
        if name == "image":
            settings["worker.rollout.limit_images"] = value
        else:
            made.lost.append(f"--limit_mm_per_prompt {name}={value}: only pictures are limited")
    settings["data.seed"] = settings["worker.rollout.seed"] = made.read("--seed")
    made.remarks.append("prompts over data.max_prompt_length are left out, where LMM-R1 keeps them")


def _entry(name: str, split: str) -> str:
    if "@" in name and not name.startswith(("json@", "jsonl@", "csv@", "parquet@")):
        return name.partition("@")[0] + f"@{split}"
    is_file = PurePath(name).suffix in (".json", ".jsonl", ".csv", ".parquet") or "@" in name
    return name if is_file else f"{name}@{split}"


def _mapping(made: Conversion, name: str) -> Tree:
    value = made.read(name)
    if isinstance(value, str):
        value = json.loads(value)
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{name} must be a JSON mapping, got {value!r}")
    return value or {}


def _algorithm(made: Conversion) -> None:
    settings, estimator = made.settings, made.read("--advantage_estimator")
    kept_std = not made.read("--no_advantage_std_norm")
    gamma, lam = made.read("--gamma"), made.read("--lambd")
    if estimator == "gae":
        chosen: Tree = {"adv_estimator": "gae", "gamma": gamma, "lam": lam, "norm_adv_by_std": kept_std}
        chosen["adv_unbiased_std"] = False
    elif estimator == "reinforce":
        chosen = {"adv_estimator": "reinforce_plus_plus", "gamma": gamma, "adv_unbiased_std": False}
        chosen["norm_adv_by_std"] = kept_std
    elif estimator == "dr_grpo":
        chosen = {"adv_estimator": "reinforce_baseline", "adv_whiten": False}
    elif estimator == "group_norm":
        chosen = {"adv_estimator": "reinforce_baseline", "adv_baseline": "group_norm", "adv_whiten": False}
    elif estimator in ("rloo", "reinforce_baseline"):
        baseline = "leave_one_out" if estimator == "rloo" else "mean"
        chosen = {"adv_estimator": "reinforce_baseline", "adv_baseline": baseline, "norm_adv_by_std": kept_std}
    else:
        raise ValueError(f"--advantage_estimator {estimator} is none of LMM-R1's")
    settings |= {f"algorithm.{name}": value for name, value in chosen.items()}
    settings["algorithm.reward_clip_range"] = [float(end) for end in made.read("--reward_clip_range")]
    coefficient, target = made.read("--init_kl_coef"), made.read("--kl_target")
    horizon, estimate, in_loss = made.read("--kl_horizon"), made.read("--kl_estimator"), made.read("--use_kl_loss")
    if coefficient <= 0:
        settings["algorithm.disable_kl"] = True
    else:
        settings |= {"algorithm.kl_coef": coefficient, "algorithm.kl_penalty": estimate}
        settings["algorithm.use_kl_loss"] = bool(in_loss)
        if target is not None:
            settings |= {"algorithm.kl_type": "adaptive", "algorithm.kl_target": target}
            settings["algorithm.kl_horizon"] = float(horizon)
    clip = made.read("--eps_clip")
    settings |= {"worker.actor.clip_ratio_low": clip, "worker.actor.clip_ratio_high": clip}
    settings["worker.actor.clip_ratio_dual"] = 1.0e9  # it has no dual clip
    settings |= {"worker.actor.optim.lr_scheduler_type": "cosine", "worker.actor.optim.min_lr_ratio": 0.1}
    sequences, answers = made.read("--train_batch_size"), settings["worker.rollout.n"]
    made.set_prompts("worker.actor.global_batch_size", sequences, answers, "--train_batch_size")
    _critic(made, estimator == "gae")
    if made.read("--store_extra_buffers"):
        settings["algorithm.surplus_max_age"] = 1


def _critic(made: Conversion, used: bool) -> None:
    model, rate, clip = (made.read(f"--{name}") for name in ("critic_pretrain", "critic_learning_rate", "value_clip"))
    warmup = made.read("--freezing_actor_steps")
    if not used:
        return
    if model and model != made.settings.get("worker.actor.model.model_path"):
        made.settings["worker.critic.model.model_path"] = model
    made.settings |= {
        f"worker.critic.{key.removeprefix('worker.actor.')}": value
        for key, value in made.settings.items()
        if key.startswith("worker.actor.optim.") or key == "worker.actor.max_grad_norm"
    }
    made.settings |= {"worker.critic.optim.lr": rate, "worker.critic.cliprange_value": clip}
    if warmup and warmup > 0:
        made.settings["trainer.critic_warmup"] = warmup


def _reward(made: Conversion) -> None:
    remote, models = made.read("--remote_rm_url"), made.read("--reward_pretrain")
    normalized = made.read("--normalize_reward")
    if remote:
        made.settings["worker.reward.reward_function"] = _own_function(str(remote))
        if normalized:
            made.remarks.append("--normalize_reward does nothing there for a remote reward, and is left out")
    elif models:
        paths = [path.strip() for path in str(models).split(",")]
        if len(paths) == 1:
            made.settings["worker.reward.reward_function"] = "reward_model"
            options: Tree = {"path": paths[0]}
        else:
            made.settings["worker.reward.reward_function"] = "combine"
            parts = {f"model_{i}": {"reward": "reward_model", "weight": 1.0, "path": p} for i, p in enumerate(paths)}
            options = {"parts": parts}
            made.remarks.append("several --reward_pretrain are summed here; LMM-R1 takes them for one path")
        made.settings["worker.reward.reward_function_kwargs"] = options
        if normalized:
            made.settings["algorithm.normalize_reward"] = True
            made.remarks.append("--normalize_reward is by the run's own rewards, not by the reward model's config.json")


def _own_function(remote: str) -> str:
    return f"{remote}:reward_func" if remote.endswith(".py") else remote


def _model(made: Conversion) -> None:
    rank, alpha = made.read("--lora_rank") or 0, made.read("--lora_alpha")
    targets, excluded = made.read("--target_modules"), made.read("--exclude_modules")
    four_bits = made.read("--load_in_4bit")
    if rank:
        lora: Tree = {"rank": rank, "alpha": alpha, "exclude_modules": excluded}
        if targets not in (None, "all-linear"):
            lora["target_modules"] = targets
        made.settings |= {f"worker.actor.model.lora.{name}": value for name, value in lora.items()}
    if four_bits and rank:
        made.settings["worker.actor.model.quantization"] = "nf4"
    elif four_bits:
        made.lost.append("--load_in_4bit: weights in 4 bits are not trained; set --lora_rank")
    prefixes = made.read("--freeze_prefix")
    for prefix in prefixes if isinstance(prefixes, list) else [str(prefixes)] if prefixes else []:
        if prefix.removeprefix("model.") == "visual":
            made.settings["worker.actor.model.freeze_vision_tower"] = True
        else:
            made.settings.setdefault("worker.actor.model.freeze", []).append(re.escape(prefix) + ".*")


def _placement(made: Conversion) -> None:
    engines, size = made.read("--vllm_num_engines"), made.settings["worker.rollout.tensor_parallel_size"]
    together = made.read("--colocate_all_models")
    if engines and not together:
        nodes = -(-engines * size // 8)
        made.settings["worker.rollout.engines.nnodes"] = nodes
        made.settings["worker.rollout.engines.n_gpus_per_node"] = -(-engines * size // nodes)
    if made.settings["worker.actor.ulysses_size"] > 1:
        made.remarks.append("--ring_attn_size becomes Ulysses, which deals out heads in place of keys")


def _reports(made: Conversion) -> None:
    wandb, board, modelscope = (made.read(f"--{name}") for name in ("use_wandb", "use_tensorboard", "use_ms"))
    made.settings["trainer.logger"] = ["console", "file", *(["wandb"] if wandb else ["tensorboard"] if board else [])]
    if isinstance(wandb, str):
        made.remarks.append("the key in --use_wandb is not copied: set WANDB_API_KEY in the environment")
    if modelscope:
        made.remarks.append("--use_ms: set USE_MODELSCOPE_HUB=1 in the environment")
    steps = made.read("--eval_steps")
    made.settings["trainer.val_freq"] = steps
    if steps == -1 and "data.val_files" in made.settings:
        made.remarks.append("--eval_steps -1 is once an episode there, and here never: set trainer.val_freq")
    answers, temperature = made.read("--eval_n_samples_per_prompt"), made.read("--eval_temperature")
    if "data.val_files" in made.settings:
        sampling = {"n": answers, "temperature": temperature, "top_p": made.settings.get("worker.rollout.top_p", 1.0)}
        made.settings |= {f"worker.rollout.val_override_config.{name}": value for name, value in sampling.items()}
