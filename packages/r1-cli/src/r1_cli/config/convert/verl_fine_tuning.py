"""Convert a configuration of veRL's trainers of SFT: `verl.trainer.sft_trainer` and the older `fsdp_sft_trainer`."""

import re

from r1_cli.config.convert.conversion import Conversion
from r1_cli.config.section import Tree

PROGRAM = r"(.*[./])?\w*sft_trainer\w*(\.py)?"
DEFAULTS: Tree = {
    "data.train_batch_size": 256,
    "data.micro_batch_size_per_gpu": 4,
    "data.max_length": 1024,
    "data.truncation": "error",
    "data.messages_key": "messages",
    "data.tools_key": "tools",
    "data.enable_thinking_key": "enable_thinking",
    "data.pad_mode": "no_padding",
    "data.train_max_samples": -1,
    "data.val_max_samples": -1,
    "data.balance_dp_token": False,
    "data.ignore_input_ids_mismatch": False,
    "data.use_shm": False,
    "model.use_remove_padding": False,
    "model.lora_rank": 0,
    "model.lora_alpha": 16,
    "model.target_modules": "all-linear",
    "optim.clip_grad": 1.0,
    "optim.weight_decay": 0.01,
    "trainer.total_epochs": 4,
    "trainer.project_name": "gsm8k-sft",
    "trainer.experiment_name": "test",
    "trainer.logger": ["console", "wandb"],
    "trainer.seed": 1,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.device": "cuda",
    "trainer.resume_mode": "auto",
}
# Of the older trainer, which reads a question and an answer where `data.multiturn.enable` is false.
OLD_DEFAULTS: Tree = {
    "data.prompt_key": "question",
    "data.response_key": "answer",
    "data.multiturn.enable": False,
    "optim.lr": 1e-5,
    "optim.betas": [0.9, 0.95],
    "optim.warmup_steps_ratio": 0.1,
    "optim.lr_scheduler": "cosine",
    "model.enable_gradient_checkpointing": False,
}
NEW_DEFAULTS: Tree = {
    "data.use_dynamic_bsz": True,
    "data.max_token_len_per_gpu": 8192,
    "optim.lr": 1e-3,
    "optim.betas": [0.9, 0.999],
    "optim.lr_scheduler_type": "constant",
    "model.enable_gradient_checkpointing": True,
}
ACTOR = "worker.actor."
KEYS = {
    "data.train_files": "data.train_files",
    "data.val_files": "data.val_files",
    "data.max_length": "data.max_length",
    "data.image_key": "data.image_key",
    "data.video_key": "data.video_key",
    "data.tools_key": "data.tools_key",
    "data.chat_template": "data.override_chat_template",
    "data.train_batch_size": f"{ACTOR}global_batch_size",
    "model.path": f"{ACTOR}model.model_path",
    "model.partial_pretrain": f"{ACTOR}model.model_path",
    "model.tokenizer_path": f"{ACTOR}model.tokenizer_path",
    "model.trust_remote_code": f"{ACTOR}model.trust_remote_code",
    "model.custom_chat_template": "data.override_chat_template",
    "model.enable_gradient_checkpointing": f"{ACTOR}model.enable_gradient_checkpointing",
    "model.enable_activation_offload": f"{ACTOR}model.enable_activation_offload",
    "model.fsdp_config.model_dtype": f"{ACTOR}fsdp.torch_dtype",
    "model.fsdp_config.cpu_offload": f"{ACTOR}fsdp.enable_cpu_offload",
    "model.strategy": f"{ACTOR}strategy",
    "engine.strategy": f"{ACTOR}strategy",
    "engine.model_dtype": f"{ACTOR}fsdp.torch_dtype",
    "engine.fsdp_size": f"{ACTOR}fsdp.fsdp_size",
    "engine.offload_policy": f"{ACTOR}fsdp.enable_cpu_offload",
    "engine.param_offload": f"{ACTOR}offload.offload_params",
    "engine.optimizer_offload": f"{ACTOR}offload.offload_optimizer",
    "engine.ulysses_sequence_parallel_size": f"{ACTOR}ulysses_size",
    "ulysses_sequence_parallel_size": f"{ACTOR}ulysses_size",
    "optim.lr": f"{ACTOR}optim.lr",
    "optim.betas": f"{ACTOR}optim.betas",
    "optim.weight_decay": f"{ACTOR}optim.weight_decay",
    "optim.clip_grad": f"{ACTOR}max_grad_norm",
    "optim.warmup_steps_ratio": f"{ACTOR}optim.lr_warmup_ratio",
    "optim.lr_warmup_steps_ratio": f"{ACTOR}optim.lr_warmup_ratio",
    "optim.min_lr_ratio": f"{ACTOR}optim.min_lr_ratio",
    "optim.num_cycles": f"{ACTOR}optim.num_cycles",
    "trainer.total_epochs": "sft.epochs",
    "trainer.total_training_steps": "trainer.max_steps",
    "trainer.project_name": "trainer.project_name",
    "trainer.experiment_name": "trainer.experiment_name",
    "trainer.logger": "trainer.logger",
    "trainer.seed": "data.seed",
    "trainer.test_freq": "trainer.val_freq",
    "trainer.save_freq": "trainer.save_freq",
    "trainer.default_local_dir": "trainer.save_checkpoint_path",
    "trainer.nnodes": "trainer.nnodes",
    "trainer.n_gpus_per_node": "trainer.n_gpus_per_node",
}
PACK = "rows are packed into micro-batches by tokens, and none sees another; worker.actor.padding_free"
RESUME = "run the same command again to resume"
ENGINE = "weights are sharded by FSDP2"
NO_COUNTERPART = {  # by the beginnings of keys
    "data.pad_mode": PACK,
    "data.balance_dp_token": PACK,
    "data.custom_cls": "rows are read by data.row_format and the keys of columns",
    "data.train_max_samples": "write the slice behind the files, as in data.train_files=rows.parquet[:1000]",
    "data.val_max_samples": "write the slice behind the files, as in data.val_files=rows.parquet[:1000]",
    "data.ignore_input_ids_mismatch": "a conversation is rendered as a whole, so that nothing can mismatch",
    "data.use_shm": "rows are read from their files",
    "data.num_workers": "set data.filter_overlong_prompts_workers",
    "model.use_liger": "log-probs are always computed in chunks",
    "model.use_fused_kernels": "log-probs are always computed in chunks",
    "model.fused_kernel_options": "log-probs are always computed in chunks",
    "model.use_shm": "models are read from their folder",
    "model.external_lib": "models come from transformers",
    "model.override_config": "set worker.actor.model.override_config",
    "model.hf_config_path": "a model's configuration is in its folder",
    "model.fsdp_config": ENGINE,
    "engine": ENGINE,
    "optim": "worker.actor.optim.strategy is adamw or adamw_bf16",
    "checkpoint": "a checkpoint has weights, optimizer and position; trainer.save_model_only leaves out states",
    "trainer.resume": RESUME,
    "trainer.default_hdfs_dir": "checkpoints are folders",
    "trainer.device": "a GPU where there is one",
    "trainer.checkpoint": "a checkpoint has weights, optimizer and position; trainer.save_model_only leaves out states",
    "trainer.profile": "trainer.ray_timeline and timing_s/* show where time goes",
    "profiler": "trainer.ray_timeline and timing_s/* show where time goes",
}


def is_fine_tuning(text: str, given: Tree) -> bool:
    started = re.search(rf"(?m)^[^#\n]*(?<![\w/]){PROGRAM}(?!\S)", text) is not None
    of_sft = any(key.startswith(("optim.", "engine.")) or key == "model.partial_pretrain" for key in given)
    return started or (of_sft and not any(key.startswith("actor_rollout_ref.") for key in given))


def convert_fine_tuning(given: Tree, processes: int | None) -> Conversion:
    """Convert resolved settings. `processes`: of the launcher, on a node; None: unknown."""
    old = "model.partial_pretrain" in given or any(key.startswith(("data.multiturn", "data.prompt_")) for key in given)
    made = Conversion("veRL's configuration of SFT", given, DEFAULTS | (OLD_DEFAULTS if old else NEW_DEFAULTS))
    settings = made.settings
    made.rename(KEYS)
    if processes is not None:
        settings["trainer.n_gpus_per_node"] = processes
    for key in ("trainer.save_freq", "trainer.val_freq"):
        if not isinstance(settings[key], int):
            made.lost.append(f"{key.replace('val_', 'test_')}={settings.pop(key)}: set {key}, in steps")
    keep = made.read("trainer.max_ckpt_to_keep")
    settings["trainer.save_limit"] = -1 if keep is None else keep
    _set_rows(made, old)
    _set_sizes(made)
    _set_rest(made)
    return made


def _set_rows(made: Conversion, old: bool) -> None:
    settings = made.settings
    if options := made.read_section("data.apply_chat_template_kwargs"):
        settings["data.chat_template_kwargs"] = options
    if "data.train_files" not in settings:
        made.remarks.append("data.train_files is not in it")
    truncation = made.read("data.truncation")
    settings["data.truncation"] = "right" if truncation == "left" else truncation
    if truncation == "left":
        made.lost.append("data.truncation=left: a conversation over data.max_length is cut on the right")
    thinking = made.read("data.enable_thinking_key")
    if thinking != "enable_thinking":
        settings["data.columns.enable_thinking"] = thinking
    turns = made.read("data.multiturn.enable")
    messages = made.read("data.messages_key"), made.read("data.multiturn.messages_key")
    keys = [_column(made, name) for name in ("prompt", "response")]
    if old and not turns:
        settings |= {"data.prompt_key": keys[0], "data.answer_key": keys[1]}
    elif (name := messages[1] or messages[0]) != "messages":
        settings["data.messages_key"] = name


def _column(made: Conversion, name: str) -> str:
    """Return the column of prompt or response; of an entry in a mapping, `column.entry`."""
    column, entries = made.read(f"data.{name}_key"), made.read(f"data.{name}_dict_keys") or []
    inside = [entry for entry in ([entries] if isinstance(entries, str) else entries) if entry != column]
    return ".".join([str(column), *map(str, inside)])


def _set_sizes(made: Conversion) -> None:
    settings, size, dynamic = (
        made.settings,
        made.read("data.micro_batch_size_per_gpu"),
        made.read("data.use_dynamic_bsz"),
    )
    tokens = made.read("data.max_token_len_per_gpu")
    size = made.read("data.micro_batch_size") or size
    if dynamic and tokens:
        size = tokens // settings["data.max_length"]
    settings[f"{ACTOR}dynamic_batching"] = bool(dynamic)
    for way in ("update", "experience"):
        settings[f"{ACTOR}micro_batch_size_per_device_for_{way}"] = max(1, size)
    settings[f"{ACTOR}padding_free"] = bool(made.read("model.use_remove_padding") or made.read("use_remove_padding"))
    if rank := made.read("model.lora_rank"):
        chosen = {"rank": rank, "alpha": made.read("model.lora_alpha")}
        chosen["target_modules"] = made.read("model.target_modules")
        if excluded := made.read("model.exclude_modules"):
            chosen["exclude_modules"] = excluded
        settings |= {f"{ACTOR}model.lora.{name}": value for name, value in chosen.items()}
    for name in ("lora_alpha", "target_modules", "exclude_modules"):
        made.read(f"model.{name}")


def _set_rest(made: Conversion) -> None:
    names = ("optim.lr_scheduler", "optim.lr_scheduler_type", "optim.warmup_style")
    kind = next((value for name in names if name in made.given and (value := made.read(name))), None)
    kind = kind or next((value for name in names if (value := made.read(name))), "constant")
    if kind not in ("constant", "cosine", "linear"):
        made.lost.append(f"optim.lr_scheduler={kind}: there are constant, cosine and linear")
        kind = "cosine"
    made.settings[f"{ACTOR}optim.lr_scheduler_type"] = kind
    if (steps := made.read("optim.lr_warmup_steps")) is not None and steps >= 0:
        made.settings[f"{ACTOR}optim.lr_warmup_steps"] = steps
    for key in made.unread():
        why = next((why for start, why in NO_COUNTERPART.items() if key == start or key.startswith(start)), None)
        if why is not None:
            made.report_lost({key: why})
