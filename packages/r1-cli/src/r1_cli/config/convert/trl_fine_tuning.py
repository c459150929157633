"""Convert an SFTConfig, DPOConfig, KTOConfig or RewardConfig of TRL."""

from typing import Literal

from r1_cli.config.convert import fine_tuning, trl_keys
from r1_cli.config.convert.conversion import Conversion
from r1_cli.config.convert.fine_tuning import set_length, set_preference, set_training
from r1_cli.config.convert.training_arguments import set_adapter
from r1_cli.config.section import Tree

Kind = Literal["sft", "dpo", "kto", "reward"]
NAMES = {"sft": "SFTConfig", "dpo": "DPOConfig", "kto": "KTOConfig", "reward": "RewardConfig"}
DEFAULTS: Tree = fine_tuning.DEFAULTS | {
    "dataset_train_split": "train",
    "dataset_test_split": "test",
    "gradient_checkpointing": True,
    "bf16": True,
    "lora_r": 16,
    "lora_alpha": 32,
    "max_length": 1024,
    "output_dir": "trainer_output",
    "packing_strategy": "bfd",
    "truncation_mode": "keep_start",
    "dataset_text_field": "text",
    "disable_dropout": True,
    "label_smoothing": 0.0,
    "desirable_weight": 1.0,
    "undesirable_weight": 1.0,
    "f_divergence_type": "reverse_kl",
    "f_alpha_divergence_coef": 0.5,
    "label_pad_token_id": -100,
    "ref_model_mixup_alpha": 0.6,
    "ref_model_sync_steps": 512,
}
OWN: dict[Kind, Tree] = {
    "sft": {"learning_rate": 2e-5, "loss_type": "nll"},
    "dpo": {"learning_rate": 1e-6, "loss_type": "sigmoid", "beta": 0.1},
    "kto": {"learning_rate": 1e-6, "loss_type": "kto", "beta": 0.1},
    "reward": {"learning_rate": 1e-4},
}
LOSSES: dict[Kind, dict[str, str]] = {
    "sft": {"nll": "nll", "chunked_nll": "nll", "dft": "dft"},
    "dpo": {"sigmoid": "dpo", "ipo": "ipo"},
    "kto": {"kto": "kto"},
}
KEYS = {
    "chat_template_kwargs": "data.chat_template_kwargs",
    "gradient_checkpointing": "worker.actor.model.enable_gradient_checkpointing",
    "activation_offloading": "worker.actor.model.enable_activation_offload",
}
REFERENCE = "the reference is the model as it starts; its log-probs are computed in each step"
WEIGHTS = "both answers have the weight 1"
NO_COUNTERPART = fine_tuning.NO_COUNTERPART | trl_keys.NO_COUNTERPART | {
    "shuffle_dataset": "the rows of each epoch are shuffled: data.shuffle",
    "dataset_text_field": "rows are conversations; text without a question is not trained",
    "dataset_kwargs": "rows are rendered by the chat template",
    "eos_token": "an answer ends with the chat template's end of turn",
    "pad_token": "nothing is padded in a pack",
    "padding_value": "nothing is padded in a pack",
    "label_pad_token_id": "nothing is padded in a pack",
    "max_prompt_length": "set data.max_length, of prompt and answer together",
    "max_completion_length": "set data.max_length, of prompt and answer together",
    "precompute_ref_log_probs": REFERENCE,
    "precompute_ref_batch_size": REFERENCE,
    "ref_model_init_kwargs": REFERENCE,
    "model_adapter_name": REFERENCE,
    "ref_adapter_name": REFERENCE,
    "force_use_ref_model": REFERENCE,
    "reference_free": "sft.loss=simpo needs no reference",
    "f_divergence_type": "the divergence is the reverse KL",
    "f_alpha_divergence_coef": "the divergence is the reverse KL",
    "rpo_alpha": "a preference loss has no further term",
    "ld_alpha": "every token of an answer has the same weight",
    "use_weighting": "every pair has the same weight",
    "discopop_tau": "there are dpo, cdpo, ipo, simpo and kto",
    "loss_weights": "there is one loss",
    "use_logits_to_keep": "log-probs are computed of trained tokens only",
    "generate_during_eval": "set sft.val_generations=true and a reward",
    "desirable_weight": WEIGHTS,
    "undesirable_weight": WEIGHTS,
}  # fmt: skip


def convert_fine_tuning(kind: Kind, given: Tree, unread: list[str], devices: int) -> Conversion:
    """Convert the settings of one of TRL's trainers. Raises ValueError for a loss that r1 does not have."""
    if "max_seq_length" in given:  # before TRL 0.16
        given = {"max_length": given["max_seq_length"]} | {k: v for k, v in given.items() if k != "max_seq_length"}
    made = Conversion(f"TRL's {NAMES[kind]}", given, DEFAULTS | OWN[kind])
    made.remarks += [f"not a literal in the script, set it by hand: {code}" for code in unread]
    made.rename(KEYS)
    set_training(made, devices, "trl")
    _set_rows(made)
    if kind == "reward":
        _set_reward(made)
    else:
        _set_loss(made, kind)
        set_adapter(made)
    made.report_lost(NO_COUNTERPART)
    made.skip_defaults(trl_keys.HARMLESS)
    return made


def _set_rows(made: Conversion) -> None:
    name, config = made.read("dataset_name"), made.read("dataset_config")
    splits = {"train_files": made.read("dataset_train_split"), "val_files": made.read("dataset_test_split")}
    if made.read("eval_strategy") == "no":
        del splits["val_files"]
    for key, split in splits.items():
        if name:
            made.settings[f"data.{key}"] = f"{name}{f':{config}' if config else ''}@{split}"
    if not name:
        made.remarks.append("the configuration names no rows: set data.train_files")
    set_length(made, "max_length")
    if (mode := made.read("truncation_mode")) != "keep_start":
        made.lost.append(f"truncation_mode={mode}: a conversation over data.max_length is cut on the right")
    if (path := made.read("chat_template_path")) is not None:
        if str(path).endswith((".jinja", ".jinja2")):
            made.settings["data.override_chat_template"] = path
        else:
            made.lost.append(f"chat_template_path={path}: data.override_chat_template takes a Jinja file")


def _set_reward(made: Conversion) -> None:
    made.settings["sft.loss"] = "reward"
    made.settings["sft.center"] = made.read("center_rewards_coefficient") or 0.0
    if made.given.get("use_peft") or any(name.startswith("lora_") for name in made.given):
        made.lost.append("use_peft: every weight of a reward model is trained")
        for name in [name for name in made.given if name.startswith("lora_") or name == "use_peft"]:
            made.read(name)


def _set_loss(made: Conversion, kind: Kind) -> None:
    losses = made.read("loss_type")
    name = losses[0] if isinstance(losses, list) and len(losses) == 1 else losses
    if not isinstance(name, str) or name not in LOSSES[kind]:
        raise ValueError(f"loss_type={losses}: r1 has {', '.join(LOSSES[kind])} of {NAMES[kind]}")
    loss, smoothing = LOSSES[kind][name], made.read("label_smoothing")
    if kind != "sft":
        set_preference(made, loss, smoothing)
        made.settings["sft.beta"] = made.read("beta")
        return
    made.settings["sft.loss"] = loss
    answers, assistant = made.read("completion_only_loss"), made.read("assistant_only_loss")
    made.settings["sft.train_on_prompt"] = answers is False and not assistant
    if answers is None and not assistant:
        made.remarks.append(
            "TRL trains whole conversations of `messages` rows, and answers of `completion` rows alone;"
        )
        made.remarks[-1] += " r1 trains answers of both, sft.train_on_prompt=true trains all"
