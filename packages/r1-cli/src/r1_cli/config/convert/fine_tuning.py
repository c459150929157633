"""What conversions of fine-tuning share: TRL's configurations but GRPOConfig, and LLaMA-Factory's stages."""

from math import ceil

from r1_cli.config.convert.conversion import Conversion
from r1_cli.config.convert.training_arguments import set_optimizer, set_reports, set_schedule
from r1_cli.config.section import Tree

# Of transformers' TrainingArguments, as far as they are not ours or decide others.
DEFAULTS: Tree = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3.0,
    "max_steps": -1,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "lr_scheduler_type": "linear",
    "seed": 42,
    "save_strategy": "steps",
    "save_steps": 500,
    "eval_strategy": "no",
    "report_to": "none",
    "optim": "adamw_torch_fused",
    "ddp_timeout": 1800,
    "dataloader_pin_memory": True,
    "logging_steps": 10,
    "logging_strategy": "steps",
    "hub_strategy": "every_save",
    "log_level": "passive",
}
KEYS = {
    "model_name_or_path": "worker.actor.model.model_path",
    "trust_remote_code": "worker.actor.model.trust_remote_code",
    "max_grad_norm": "worker.actor.max_grad_norm",
    "learning_rate": "worker.actor.optim.lr",
    "weight_decay": "worker.actor.optim.weight_decay",
    "warmup_ratio": "worker.actor.optim.lr_warmup_ratio",
    "output_dir": "trainer.save_checkpoint_path",
    "run_name": "trainer.experiment_name",
    "project": "trainer.project_name",
    "save_only_model": "trainer.save_model_only",
}
PACKED = "rows are packed into micro-batches by tokens, and none sees another; worker.actor.padding_free"
LENGTHS = "micro-batches are filled by tokens"
NO_COUNTERPART = {
    "packing": PACKED,
    "eval_packing": PACKED,
    "packing_strategy": PACKED,
    "padding_free": PACKED,
    "neat_packing": PACKED,
    "pad_to_multiple_of": PACKED,
    "group_by_length": LENGTHS,
    "dataset_num_proc": "set data.filter_overlong_prompts_workers",
    "preprocessing_num_workers": "set data.filter_overlong_prompts_workers",
    "preprocessing_batch_size": "set data.filter_overlong_prompts_workers",
    "neftune_noise_alpha": "embeddings get no noise",
    "label_smoothing_factor": "the loss of a token is its own",
}


def set_training(made: Conversion, devices: int, name: str) -> None:
    """Set batch sizes, schedule, optimizer and trackers. `name` is the experiment's, unless it has one."""
    made.rename(KEYS)
    settings = made.settings
    settings |= {"trainer.n_gpus_per_node": devices, "worker.actor.micro_batch_size_per_device_for_experience": 1}
    settings.setdefault("trainer.experiment_name", name)
    sequences, accumulated = made.read("per_device_train_batch_size"), made.read("gradient_accumulation_steps")
    settings["worker.actor.global_batch_size"] = sequences * accumulated * devices
    for way in ("update", "experience"):
        settings[f"worker.actor.micro_batch_size_per_device_for_{way}"] = sequences
    made.read("per_device_eval_batch_size")
    settings["sft.epochs"] = max(1, ceil(made.read("num_train_epochs")))
    seed = made.read("seed")
    settings["data.seed"] = made.read("data_seed") or seed
    set_schedule(made)
    set_optimizer(made)
    set_reports(made)
    if devices == 1:
        made.remarks.append("batch sizes are those of one process: --devices N says how many trained")


def set_length(made: Conversion, name: str) -> None:
    limit = made.read(name)
    made.settings["data.truncation"] = "right"
    if limit is None:
        made.remarks.append(f"{name} is unlimited there: set data.max_length, in tokens of a conversation")
    else:
        made.settings["data.max_length"] = limit


def set_preference(made: Conversion, loss: str, smoothing: float) -> None:
    made.settings["sft.loss"] = "cdpo" if loss == "dpo" and smoothing else loss
    if loss == "dpo" and smoothing:
        made.settings["sft.label_smoothing"] = smoothing
    if loss == "ipo":
        made.remarks.append("the loss ipo compares sums of log-probs here; compare its beta with that of means")
