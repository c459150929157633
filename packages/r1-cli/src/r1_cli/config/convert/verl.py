"""Convert a configuration of veRL (PPO or SFT): a YAML file, or Hydra overrides in a script."""

import re
from os.path import expanduser, isfile
from pathlib import Path
from typing import Any, get_args

import yaml

from r1_cli.config.convert import verl_fine_tuning
from r1_cli.config.convert.conversion import Conversion, OthersLoader
from r1_cli.config.convert.shell import command_words, read_value
from r1_cli.config.convert.verl_keys import (
    ACTOR,
    AGENT_LOOPS,
    DEFAULTS,
    KEYS,
    LOSSES,
    MODEL,
    NO_COUNTERPART,
    ROLLOUT,
    TURN_KEYS,
    VERDICTS,
)
from r1_cli.config.legacy import Translated, translate
from r1_cli.config.multi_turn import MultiTurnSettings, read_tool_entries, replace_tool_class
from r1_cli.config.schema import schema
from r1_cli.config.section import Tree, flatten
from r1_cli.config.settings import COMMAND_LINE, Setting

PROGRAM = r"(.*[./])?main_\w+(\.py)?"


def convert_verl(text: str, overrides: list[str]) -> Conversion:
    """Convert YAML, or a script that starts veRL, with further `key=value` overrides. Raises ValueError."""
    given = _read(text) | dict(_override(word) for word in overrides)
    given = {key: value for key, value in given.items() if key.rpartition(".")[2] != "_target_" and value != "???"}
    given = {key: _resolved(value, given) for key, value in given.items()}
    given = {key: expanduser(value) if isinstance(value, str) else value for key, value in given.items()}
    if verl_fine_tuning.is_fine_tuning(text, given):
        return verl_fine_tuning.convert_fine_tuning(given, _processes(text))
    made = Conversion("veRL's configuration", given, DEFAULTS)
    _algorithm(made)
    _reward(made)
    _data(made)
    made.rename(KEYS)
    _experts(made)
    _sizes(made)
    _turns(made)
    _rest(made)
    return made


def _read(text: str) -> Tree:
    try:
        found = yaml.load(text, OthersLoader)
    except yaml.YAMLError:
        found = None  # a script, then
    if isinstance(found, dict) and not re.search(r"(?m)^[^#]*\b(main_ppo|\w*sft_trainer)\b", text):
        return dict(flatten(found))
    program = rf"{PROGRAM}|{verl_fine_tuning.PROGRAM}"
    words = [word for word in command_words(text, program) if "=" in word and not word.startswith("--")]
    if not words:
        raise ValueError("the file is neither a configuration of veRL in YAML nor a script that starts it")
    return dict(_override(word) for word in words)


def _processes(text: str) -> int | None:
    """Return how many processes torchrun starts on a node, None if it does not say."""
    found = re.search(r"--nproc[-_]per[-_]node[= ](?:\$\{\w+:-)?(\d+)", text)
    return int(found[1]) if found else None


def _override(word: str) -> tuple[str, Any]:
    key, equals, value = word.lstrip("+~").partition("=")
    if not equals:
        raise ValueError(f"{word!r}: an override is written key=value")
    return key, read_value(value)


def _resolved(value: object, given: Tree) -> object:
    """Resolve OmegaConf's `${a.b}` and `${oc.select:a.b,default}`; None if not given."""
    if not isinstance(value, str):
        return value
    whole = re.fullmatch(r"\$\{(?:oc\.select:)?([\w.]+)(?:,([^}]*))?\}", value)
    if whole:
        other = given.get(whole[1], DEFAULTS.get(whole[1]))
        return _resolved(other, given) if other is not None and other != value else read_value(whole[2] or "null")
    return re.sub(r"\$\{([\w.]+)\}", lambda m: str(given.get(m[1], DEFAULTS.get(m[1], m[0]))), value)


def _algorithm(made: Conversion) -> None:
    settings, estimator = made.settings, made.read("algorithm.adv_estimator")
    settings["algorithm.adv_estimator"] = estimator
    if estimator == "grpo" and made.read("algorithm.norm_adv_by_std_in_grpo") is False:
        settings["algorithm.norm_adv_by_std"] = False
    made.read("algorithm.norm_adv_by_std_in_grpo")
    in_reward, in_loss = made.read("algorithm.use_kl_in_reward"), made.read(f"{ACTOR}use_kl_loss")
    of_reward = {key: made.read(f"algorithm.{key}") for key in ("kl_penalty", "kl_ctrl.kl_coef", "kl_ctrl.type")}
    horizon, target = made.read("algorithm.kl_ctrl.horizon"), made.read("algorithm.kl_ctrl.target_kl")
    of_loss = {key: made.read(f"{ACTOR}{key}") for key in ("kl_loss_type", "kl_loss_coef")}
    if in_loss:
        chosen = {"kl_penalty": of_loss["kl_loss_type"], "kl_coef": of_loss["kl_loss_coef"]}
        if in_reward:
            made.lost.append("algorithm.use_kl_in_reward=true: the KL is in the loss or in the reward, not in both")
    elif in_reward:
        chosen = {"use_kl_loss": False, "kl_penalty": of_reward["kl_penalty"], "kl_coef": of_reward["kl_ctrl.kl_coef"]}
        if of_reward["kl_ctrl.type"] == "adaptive":
            chosen |= {"kl_type": "adaptive", "kl_horizon": float(horizon or 10000), "kl_target": target or 0.1}
    else:
        chosen = {"disable_kl": True}
    settings |= {f"algorithm.{key}": value for key, value in chosen.items()}
    loss = made.read(f"{ACTOR}policy_loss.loss_mode")
    settings["worker.actor.loss_type"] = LOSSES.get(loss, loss)
    clip, dual = made.read(f"{ACTOR}clip_ratio"), made.read(f"{ACTOR}clip_ratio_c")
    for end in ("low", "high"):
        own = made.read(f"{ACTOR}clip_ratio_{end}")
        settings[f"worker.actor.clip_ratio_{end}"] = clip if own is None else own
    if loss == "vanilla":
        settings["worker.actor.clip_ratio_dual"] = dual
    if metric := made.read("algorithm.filter_groups.metric"):
        settings["algorithm.filter_mode"] = "zero_variance"
        settings["algorithm.filter_key"] = "accuracy" if metric == "acc" else "overall"


def _reward(made: Conversion) -> None:
    path, name = made.read("custom_reward_function.path"), made.read("custom_reward_function.name")
    files = str(made.read("data.train_files") or "").lower()
    options = made.read_section("custom_reward_function.reward_kwargs")
    if path:
        made.settings["worker.reward.reward_function"] = f"{path}:{name}"
        if options:
            made.settings["worker.reward.reward_function_kwargs"] = options
    else:
        chosen = next(ours for word, ours in VERDICTS if word in files)
        made.settings["worker.reward.reward_function"] = chosen
        made.remarks.append("veRL chooses the verdict by each row's data_source, r1 by the configuration: by the")
        made.remarks[-1] += f" files' names {chosen} is chosen; data.sources gives each source its own"
    model = made.read("reward_model.model.path")
    if made.read("reward_model.enable"):
        made.lost.append(f"reward_model.model.path={model}: set reward_function=reward_model and its path as a keyword")


def _data(made: Conversion) -> None:
    rows = made.read("data.train_files")
    if rows is None:
        made.remarks.append("data.train_files is not in it")
    seed = made.read("data.seed")
    if seed is not None:
        made.settings["data.seed"] = seed
    made.settings["data.row_format"] = "verl"
    size = made.read("data.val_batch_size")
    made.settings["data.val_batch_size"] = -1 if size is None else size
    for name in ("train_files", "val_files"):
        if (files := made.read(f"data.{name}")) is not None:
            made.settings[f"data.{name}"] = files
    if options := made.read_section("data.apply_chat_template_kwargs"):
        made.settings["data.chat_template_kwargs"] = options
    prompt = made.read("data.prompt_key")
    if prompt != "prompt":
        made.settings |= {"data.prompt_key": prompt, "data.answer_key": "reward_model.ground_truth"}
        made.settings["data.row_format"] = None


def _experts(made: Conversion) -> None:
    mode, recorded = made.read(f"{ACTOR}router_replay.mode"), made.read(f"{ROLLOUT}enable_rollout_routing_replay")
    if mode == "R3" or (recorded and mode is None):
        made.settings["worker.actor.router_replay"] = True
    elif mode not in (None, "disabled"):
        made.lost.append(
            f"{ACTOR}router_replay.mode={mode}: worker.actor.router_replay=true replays the engine's choice, R3"
        )


def _sizes(made: Conversion) -> None:
    settings = made.settings
    prompts, draw = made.read("data.train_batch_size"), settings.get("data.mini_rollout_batch_size")
    settings["data.rollout_batch_size"] = prompts
    if draw is not None and prompts % draw:
        made.lost.append(f"data.gen_batch_size={draw}: a sampling round must divide the {prompts} prompts of a step")
        del settings["data.mini_rollout_batch_size"]
    if not made.read(f"{MODEL}lora_rank"):
        for key in [key for key in settings if key.startswith("worker.actor.model.lora.")]:
            del settings[key]
    else:
        settings["worker.actor.model.lora.alpha"] = made.read(f"{MODEL}lora_alpha")
    tokens, longest = made.read(f"{ACTOR}ppo_max_token_len_per_gpu"), made.read("data.max_prompt_length")
    longest += made.read("data.max_response_length")
    if made.read(f"{ACTOR}use_dynamic_bsz") and tokens:
        settings["worker.actor.micro_batch_size_per_device_for_update"] = max(1, tokens // longest)
        settings["worker.actor.micro_batch_size_per_device_for_experience"] = max(1, tokens // longest)
    settings["worker.actor.dynamic_batching"] = bool(made.read(f"{ACTOR}use_dynamic_bsz"))
    settings["data.max_prompt_length"] = made.read("data.max_prompt_length")
    settings["data.max_response_length"] = made.read("data.max_response_length")
    if not made.read(f"{ROLLOUT}val_kwargs.do_sample"):
        settings["worker.rollout.val_override_config.temperature"] = 0.0
    engine = made.read(f"{ROLLOUT}name")
    if engine not in (None, "vllm", "hf"):
        made.lost.append(f"{ROLLOUT}name={engine}: worker.rollout.name=auto takes vLLM where it is installed")
    keep = made.read("trainer.max_actor_ckpt_to_keep")
    settings["trainer.save_limit"] = -1 if keep is None else keep


def _turns(made: Conversion) -> None:
    there, ours = f"{ROLLOUT}multi_turn.", "worker.rollout.multi_turn."
    chosen: Tree = {name: made.read(there + name) for name in TURN_KEYS}
    path = made.read(f"{there}tool_config_path") or made.read("data.tool_config_path")
    made.read("data.tool_config_path")
    chosen["num_workers"] = made.read(f"{ROLLOUT}agent.num_workers")
    loop = made.read(f"{ROLLOUT}agent.default_agent_loop")
    shown, checked = (made.read(there + n) for n in ("use_inference_chat_template", "tokenization_sanity_check_mode"))
    if not made.read(f"{there}enable"):
        return
    if shown:
        chosen["history"] = "template"
    if checked != "disable":
        made.remarks.append("multi_turn.tokenization_sanity_check_mode: turns keep the tokens that were sampled, and")
        made.remarks[-1] += " the start of a run says what the chat template does with them (multi_turn.history)"
    if chosen["format"] not in get_args(MultiTurnSettings.model_fields["format"].annotation):
        made.lost.append(f"{there}format={chosen['format']}: the format is read off the chat template")
        chosen["format"] = "auto"
    if loop not in AGENT_LOOPS:
        made.lost.append(f"{ROLLOUT}agent.default_agent_loop={loop}: an agent loop becomes {ours}agent")
    chosen |= _tools(made, path)
    if chosen["function_tool_path"] or chosen.get("tools") or chosen.get("tool_config_path"):
        chosen["enable"] = True
    else:
        made.lost.append(f"{there}enable=true: set {ours}tools, environment or agent, and its enable")
    made.settings |= {ours + name: value for name, value in chosen.items() if value is not None}


def _tools(made: Conversion, path: str | None) -> Tree:
    """Return the settings in the place of veRL's file of tools, whose classes are replaced or reported as lost."""
    if path is None or not isfile(path):
        return {"tool_config_path": path}
    found = [replace_tool_class(entry) for entry in read_tool_entries(Path(path)) if "class_name" in entry]
    made.lost += [f"{ROLLOUT}multi_turn.tool_config_path={path}: {message}" for _, message in found if message]
    return {"tools": [name for name, _ in found if name]} if found else {"tool_config_path": path}


def _rest(made: Conversion) -> None:
    has_critic = made.settings["algorithm.adv_estimator"] == "gae"
    has_model = bool(made.given.get("reward_model.enable"))
    for key in made.unread():
        of_none = (key.startswith("critic.") and not has_critic) or (key.startswith("reward_model.") and not has_model)
        if of_none and key != "reward_model.reward_manager":
            made.read(key)
            continue
        why, today = _reason(key), _today(key, made.given.get(key, DEFAULTS.get(key)))
        if today is None:
            made.report_lost({key: why} if why else {})
            continue
        value = made.read(key)
        for setting in today.settings:
            if setting.value is not None and not (setting.key.endswith("lr_warmup_steps") and setting.value < 0):
                made.settings.setdefault(setting.key, setting.value)
        if not today.settings and key in made.given and value not in (None, False, "", [], -1):
            made.lost.append(f"{key}={value}: {why or today.notices[0].partition('any more: ')[2]}")


def _today(key: str, value: object) -> Translated | None:
    """Return the current settings for a key, none if it is obsolete; None if `r1 train` does not know it."""
    made = translate([Setting(key, value, str(value), COMMAND_LINE)])
    return made if all(schema().has(setting.key) for setting in made.settings) else None


def _reason(key: str) -> str | None:
    return next((why for start, why in NO_COUNTERPART.items() if key == start or key.startswith(start)), None)
