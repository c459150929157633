"""Convert a GRPOConfig of TRL, in YAML, JSON or a training script."""

from math import ceil

import yaml

from r1_cli.config.convert.conversion import Conversion, OthersLoader
from r1_cli.config.convert.trl_keys import DEFAULTS, HARMLESS, KEYS, LOSSES, NO_COUNTERPART, REWARDS, SCALES, SERVED
from r1_cli.config.convert.trl_script import read_script
from r1_cli.config.section import Tree


def convert_trl(text: str, devices: int) -> Conversion:
    """Convert a GRPOConfig for `devices` processes. Raises ValueError if the text has none."""
    given, unread = read_script(text) or (_read(text), [])
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
    _optimizer(made)
    _adapter(made)
    _sampling(made)
    _reward(made)
    _turns(made)
    _reports(made)
    made.report_lost(NO_COUNTERPART)
    for name, default in HARMLESS.items():
        if name in given and given[name] == default:
            made.read(name)
    return made


def _read(text: str) -> Tree:
    try:
        given = yaml.load(text, OthersLoader)
    except yaml.YAMLError as error:
        raise ValueError(
            "the file is not YAML or JSON, and no Python that calls GRPOConfig or GRPOTrainer: "
            + " ".join(str(error).split())
        ) from error
    if not isinstance(given, dict):
        raise ValueError("the file must hold the keys of a GRPOConfig, such as num_generations")
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
    if (steps := made.read("max_steps")) > 0:
        settings["trainer.max_steps"] = ceil(steps / updates)
    limit, strategy = made.read("save_total_limit"), made.read("save_strategy")
    settings["trainer.save_limit"] = -1 if limit is None else limit
    settings["trainer.save_freq"] = _steps(made, "save_steps", updates) if strategy == "steps" else -1
    made.read("eval_steps")
    evaluated = made.read("eval_strategy") == "steps"
    settings["trainer.val_freq"] = _steps(made, "eval_steps", updates) if evaluated else -1
    settings["trainer.val_before_train"] = bool(made.read("eval_on_start"))
    if strategy not in ("steps", "no"):
        made.lost.append(f"save_strategy={strategy}: set trainer.save_freq, in steps")
    warmup = made.read("warmup_steps")
    if warmup and warmup < 1:  # a share of all steps
        settings["worker.actor.optim.lr_warmup_ratio"] = warmup
    elif warmup:
        settings["worker.actor.optim.lr_warmup_steps"] = ceil(warmup / updates)
    if updates > 1:
        made.remarks.append(f"a step here has {updates} optimizer steps; max_steps and the like are divided by them")


def _steps(made: Conversion, name: str, updates: int) -> int:
    value = made.read(name)
    if value is None:
        return -1
    if value < 1:
        made.remarks.append(f"{name}={value} is a share of all steps there: set the number in trainer.*_freq")
        return -1
    return ceil(value / updates)


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


def _optimizer(made: Conversion) -> None:
    settings = made.settings
    settings["worker.actor.optim.betas"] = [made.read("adam_beta1"), made.read("adam_beta2")]
    kind, options = made.read("lr_scheduler_type"), made.read("lr_scheduler_kwargs") or {}
    ours = {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine"}.get(kind, kind)
    if ours not in ("constant", "cosine", "linear"):
        made.lost.append(f"lr_scheduler_type={kind}: there are constant, cosine and linear")
        ours = "constant"
    settings["worker.actor.optim.lr_scheduler_type"] = ours
    for name, value in options.items():
        if name == "min_lr_rate":
            settings["worker.actor.optim.min_lr_ratio"] = value
        elif name == "min_lr":
            settings["worker.actor.optim.min_lr_ratio"] = value / settings["worker.actor.optim.lr"]
        elif name == "num_cycles":
            settings["worker.actor.optim.num_cycles"] = value
        else:
            made.lost.append(f"lr_scheduler_kwargs {name}={value}: no such setting")
    halves, fp16 = made.read("bf16"), made.read("fp16")
    settings["worker.actor.fsdp.mp_param_dtype"] = "bf16" if halves is not False and not fp16 else "fp32"
    if fp16:
        made.lost.append("fp16=true: losses are not scaled; float32 is set, bf16 is quicker")
    kept = made.read("dtype") or made.read("torch_dtype")
    if kept in ("bfloat16", "bf16"):
        settings["worker.actor.fsdp.torch_dtype"] = "bf16"
    made.read("torch_dtype")


def _adapter(made: Conversion) -> None:
    used, rank, alpha = made.read("use_peft"), made.read("lora_r"), made.read("lora_alpha")
    targets, four_bits = made.read("lora_target_modules"), made.read("load_in_4bit")
    if used:
        chosen = {"rank": rank, "alpha": alpha} | ({"target_modules": targets} if targets else {})
        made.settings |= {f"worker.actor.model.lora.{key}": value for key, value in chosen.items()}
        if four_bits:
            made.settings["worker.actor.model.quantization"] = "nf4"
    elif four_bits:
        made.lost.append("load_in_4bit=true: weights in 4 bits are not trained without use_peft")


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


def _reports(made: Conversion) -> None:
    asked = made.read("report_to")
    listed = [asked] if isinstance(asked, str) else asked or []
    known = [name for name in listed if name in ("wandb", "tensorboard", "mlflow", "swanlab", "trackio")]
    made.lost += [
        f"report_to={name}: there are wandb, tensorboard, mlflow, swanlab and trackio"
        for name in listed
        if name not in (*known, "none")
    ]
    made.settings["trainer.logger"] = ["console", "file", *known]
