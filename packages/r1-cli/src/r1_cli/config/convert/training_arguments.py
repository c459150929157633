"""Convert the settings of transformers' TrainingArguments, which TRL and LLaMA-Factory share, and of their adapters."""

from math import ceil

from r1_cli.config.convert.conversion import Conversion


def set_schedule(made: Conversion, updates: int = 1) -> None:
    """Set when a run ends, saves and validates.

    Args:
        updates: optimizer steps, in which transformers counts, of one of our steps.
    """
    settings = made.settings
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


def _steps(made: Conversion, name: str, updates: int) -> int:
    value = made.read(name)
    if value is None:
        return -1
    if value < 1:
        made.remarks.append(f"{name}={value} is a share of all steps there: set the number in trainer.*_freq")
        return -1
    return ceil(value / updates)


def set_optimizer(made: Conversion) -> None:
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


def set_adapter(made: Conversion) -> None:
    used, rank, alpha = made.read("use_peft"), made.read("lora_r"), made.read("lora_alpha")
    targets, four_bits = made.read("lora_target_modules"), made.read("load_in_4bit")
    if used:
        chosen = {"rank": rank, "alpha": alpha} | ({"target_modules": targets} if targets else {})
        made.settings |= {f"worker.actor.model.lora.{key}": value for key, value in chosen.items()}
        if four_bits:
            made.settings["worker.actor.model.quantization"] = "nf4"
    elif four_bits:
        made.lost.append("load_in_4bit=true: weights in 4 bits are not trained without use_peft")


def set_reports(made: Conversion) -> None:
    asked = made.read("report_to")
    listed = [asked] if isinstance(asked, str) else asked or []
    known = [name for name in listed if name in ("wandb", "tensorboard", "mlflow", "swanlab", "trackio")]
    made.lost += [
        f"report_to={name}: there are wandb, tensorboard, mlflow, swanlab and trackio"
        for name in listed
        if name not in (*known, "none")
    ]
    made.settings["trainer.logger"] = ["console", "file", *known]
