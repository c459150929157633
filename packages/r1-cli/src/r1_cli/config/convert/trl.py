"""Convert a GRPOConfig of TRL, in YAML, JSON, a training script or a command; find out which trainer is meant."""

import re
from math import ceil
from pathlib import Path
from typing import cast

import yaml

from r1_cli.config.convert.conversion import Conversion, OthersLoader
from r1_cli.config.convert.shell import command_words, read_flags
from r1_cli.config.convert.training_arguments import set_adapter, set_optimizer, set_reports, set_schedule
from r1_cli.config.convert.trl_fine_tuning import Kind, convert_fine_tuning
from r1_cli.config.convert.trl_keys import DEFAULTS, HARMLESS, KEYS, LOSSES, NO_COUNTERPART, REWARDS, SCALES, SERVED
from r1_cli.config.convert.trl_script import read_script, refuse_commands
from r1_cli.config.section import Tree

TRAINERS = ("grpo", "sft", "dpo", "kto", "reward")
PROGRAMS = {"reward": "reward_modeling"} | {name: rf"\w*{name}\w*" for name in TRAINERS[:-1]}  # of TRL's scripts
MARKS = {  # keys that only one trainer has, for files that do not name it
    "grpo": {"num_generations", "max_completion_length", "reward_funcs", "num_iterations", "epsilon"},
    "kto": {"desirable_weight", "undesirable_weight"},
    "reward": {"center_rewards_coefficient"},
    "dpo": {"beta", "label_smoothing", "precompute_ref_log_probs", "rpo_alpha", "reference_free"},
    "sft": {
        "packing", "max_length", "max_seq_length", "assistant_only_loss", "completion_only_loss", "dataset_text_field",
        "padding_free",
    },
}  # fmt: skip


def convert_trl(text: str, devices: int, trainer: str | None = None) -> Conversion:
    """Convert settings of a trainer of TRL for `devices` processes.

    Args:
        text: YAML, JSON, a Python script, or a command or shell script that starts one of TRL's scripts.
        trainer: one of `TRAINERS`; None: by the script, or by the keys.

    Raises:
        ValueError: the text has none of these, or a loss that r1 does not have.
    """
    given, unread, found = _read(text)
    trainer = trainer or found or _guess_trainer(given)
    if trainer == "grpo":
        return _convert_grpo(given, unread, devices)
    return convert_fine_tuning(cast(Kind, trainer), given, unread, devices)


def _read(text: str) -> tuple[Tree, list[str], str | None]:
    """Return settings, arguments of a script that are no literals, and the trainer that the script names."""
    if (script := read_script(text)) is not None:
        return script
    refuse_commands(text)
    for trainer in TRAINERS:
        program = rf"(\S*/)?(trl\s+{trainer}|{PROGRAMS[trainer]}\.py)"
        if re.search(rf"(?m)^[^#\n]*(?<!\S){program}(?!\S)", text):
            words = command_words(
                re.sub(r"\btrl\s+(?=\w)", "trl-", text), rf"(.*/)?(trl-{trainer}|{PROGRAMS[trainer]}\.py)"
            )
            return _read_command(words), [], trainer
    return _read_yaml(text), [], None


def _read_command(words: list[str]) -> Tree:
    flags = read_flags(words)
    file = flags.pop("config", None)
    return (_read_yaml(Path(str(file)).read_text("utf-8")) if file else {}) | flags


def _guess_trainer(given: Tree) -> str:
    return next((trainer for trainer, marks in MARKS.items() if marks & given.keys()), "grpo")


def _convert_grpo(given: Tree, unread: list[str], devices: int) -> Conversion:
    made = Conversion("TRL's GRPOConfig", given, DEFAULTS)
    made.remarks += [f"not a literal in the script, set it by hand: {code}" for code in unread]
    made.rename(KEYS)
    made.settings |= {"trainer.n_gpus_per_node": devices, "worker.rollout.tensor_parallel_size": 1}
    made.settings.setdefault("trainer.experiment_name", "trl")
    if devices == 1:
        made.remarks.append("batch sizes are those of one process: --devices N says how many trained")
    _data(made)
    _batches(made, devices)
    _loss(made)
    _advantages(made)
    set_optimizer(made)
    set_adapter(made)
    _sampling(made)
    _reward(made)
    _turns(made)
    set_reports(made)
    made.report_lost(NO_COUNTERPART)
    made.skip_defaults(HARMLESS)
    return made


def _read_yaml(text: str) -> Tree:
    try:
        given = yaml.load(text, OthersLoader)
    except yaml.YAMLError as error:
        raise ValueError(
            "the file is not YAML or JSON, no Python that calls GRPOConfig or GRPOTrainer, or those of SFT, DPO, "
            "KTO or Reward, and no command of TRL: " + " ".join(str(error).split())
        ) from error
    if not isinstance(given, dict):
        raise ValueError("the file must hold the keys of a GRPOConfig, such as num_generations, or of an SFTConfig")
    return {name: "no" if name.endswith("_strategy") and value is False else value for name, value in given.items()}


def _data(made: Conversion) -> None:
    name, config = made.read("dataset_name"), made.read("dataset_config")
    splits = {"train_files": made.read("dataset_train_split"), "val_files": made.read("dataset_test_split")}
    if made.read("eval_strategy") == "no":
        splits.pop("val_files")
    for key, split in splits.items():
        if name:
            made.settings[f"data.{key}"] = f"{name}{f':{config}' if config else ''}@{split}"
    made.settings["data.seed"] = made.read("data_seed") or made.read("seed")
    made.settings["worker.rollout.seed"] = made.read("seed")
    if not name:
        made.remarks.append("a GRPOConfig names no rows: set data.train_files")


def _batches(made: Conversion, devices: int) -> None:
    sequences, accumulated = made.read("per_device_train_batch_size"), made.read("gradient_accumulation_steps")
    per_generation = made.read("steps_per_generation") or accumulated
    sampled = made.read("generation_batch_size") or sequences * devices * per_generation
    answers, settings = made.settings["worker.rollout.n"], made.settings
    update = sequences * accumulated * devices
    made.set_prompts("worker.actor.global_batch_size", update, answers, "per_device_train_batch_size × …")
    made.set_prompts("data.rollout_batch_size", sampled, answers, "generation_batch_size")
    settings["worker.actor.micro_batch_size_per_device_for_update"] = sequences
    settings["worker.actor.micro_batch_size_per_device_for_experience"] = sequences
    settings["data.val_batch_size"] = -1
    made.read("per_device_eval_batch_size")
    updates = max(1, sampled // update) * made.read("num_iterations")  # optimizer steps of one of our steps
    settings["trainer.total_epochs"] = max(1, ceil(made.read("num_train_epochs")))
    set_schedule(made, updates)
    if updates > 1:
        made.remarks.append(f"a step here has {updates} optimizer steps; max_steps and the like are divided by them")


def _loss(made: Conversion) -> None:
    name, level = made.read("loss_type"), made.read("importance_sampling_level")
    low, high, both = made.read("epsilon"), made.read("epsilon_high"), made.read("delta")
    if name not in LOSSES:
        raise ValueError(f"loss_type={name} is none of {', '.join(LOSSES)}")
    loss, averaged = LOSSES[name]
    high = low if high is None else high
    if loss == "default" and level == "sequence":
        loss = "gspo"
    chosen: Tree = {"loss_type": loss, "loss_avg_mode": averaged}
    if loss == "cispo":  # a bound above, of the ratio itself
        chosen |= {"clip_ratio_low": 1.0, "clip_ratio_high": high - 1}
    elif loss == "sapo":
        positive, negative = made.read("sapo_temperature_pos"), made.read("sapo_temperature_neg")
        chosen |= {"tau_positive": positive, "tau_negative": negative}
    else:
        chosen |= {"clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_dual": both or 1.0e9}
    made.settings |= {f"worker.actor.{key}": value for key, value in chosen.items()}
    if name == "bnpo":
        made.remarks.append("loss_type=bnpo averages over the tokens of the whole optimizer step here")
    made.read("sapo_temperature_pos"), made.read("sapo_temperature_neg")
    beta = made.read("beta")
    made.settings["algorithm.disable_kl"] = not beta
    if beta:
        made.settings |= {"algorithm.kl_coef": beta, "algorithm.kl_penalty": "low_var_kl"}


def _advantages(made: Conversion) -> None:
    scale = {True: "group", False: "none"}.get(made.read("scale_rewards"), made.read("scale_rewards"))
    if scale not in SCALES:
        raise ValueError(f"scale_rewards={scale} is none of {', '.join(SCALES)}")
    estimator = SCALES[scale]
    if made.read("multi_objective_aggregation") == "normalize_then_sum":
        estimator = "gdpo"
    made.settings["algorithm.adv_estimator"] = estimator
    if estimator in ("grpo", "lite_ppo"):
        made.settings["algorithm.adv_eps"] = 1e-4


def _sampling(made: Conversion) -> None:
    settings, served = made.settings, made.read("use_vllm")
    settings["worker.rollout.top_k"] = made.read("top_k") or -1
    mode, size = made.read("vllm_mode"), made.read("vllm_tensor_parallel_size")
    corrected, how = made.read("vllm_importance_sampling_correction"), made.read("vllm_importance_sampling_mode")
    cap = made.read("vllm_importance_sampling_cap")
    if served:
        made.remarks.append("use_vllm: worker.rollout.name=auto takes vLLM where it is installed (r1-rollout[vllm])")
        settings["worker.rollout.tensor_parallel_size"] = size or 1
        if mode != "colocate":
            made.lost.append(f"vllm_mode={mode or 'server'}: {SERVED}")
        if corrected:
            level, _, bound = how.partition("_")
            settings["algorithm.rollout_correction.rollout_is"] = level
            settings["algorithm.rollout_correction.rollout_is_threshold"] = cap if bound == "truncate" else f"0_{cap}"
    answers = made.read("num_generations_eval")
    if "data.val_files" in settings:
        sampling = {"temperature": settings.get("worker.rollout.temperature", 1.0)}
        sampling |= {"top_p": settings.get("worker.rollout.top_p", 1.0), "n": answers or settings["worker.rollout.n"]}
        settings |= {f"worker.rollout.val_override_config.{key}": value for key, value in sampling.items()}


def _reward(made: Conversion) -> None:
    functions, weights, model = (made.read(n) for n in ("reward_funcs", "reward_weights", "reward_model_name_or_path"))
    named: list[tuple[str, Tree]] = [("reward_model", {"path": model})] if model else []
    for name in [functions] if isinstance(functions, str) else functions or []:
        if name.rpartition(".")[2] in REWARDS:
            reward, options = REWARDS[name.rpartition(".")[2]]
            named.append((reward, dict(options)))
        else:
            made.lost.append(f"reward_funcs {name}: name its file and function, as in ./rewards.py:{name}")
    if len(named) == 1:
        made.settings["worker.reward.reward_function"], options = named[0]
        if options:
            made.settings["worker.reward.reward_function_kwargs"] = options
    elif named:
        shares = weights if weights and len(weights) == len(named) else [1.0] * len(named)
        parts = {name: {"weight": share, **options} for (name, options), share in zip(named, shares, strict=True)}
        made.settings["worker.reward.reward_function"] = "combine"
        made.settings["worker.reward.reward_function_kwargs"] = {"parts": parts}
    else:
        made.remarks.append(
            "reward functions are Python there: set worker.reward.reward_function; TRL's shape is taken"
        )
        if weights:
            made.remarks.append(f"reward_weights={weights}: reward_function=combine takes a weight for each part")


def _turns(made: Conversion) -> None:
    ours, calls = "worker.rollout.multi_turn", made.read("max_tool_calling_iterations")
    for name, key in (("tools", "tools"), ("environment_factory", "environment")):
        for function in made.read(name) or ():
            where = f"./{key}.py:{function}"
            made.lost.append(f"{name} {function}: put it into a file without the training script, and set {ours}.{key}")
            made.lost[-1] += f"={where} and {ours}.enable=true"
    if calls is not None:
        made.settings[f"{ours}.max_assistant_turns"] = calls + 1
