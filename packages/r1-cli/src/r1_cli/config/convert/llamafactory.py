"""Convert a configuration of LLaMA-Factory: a YAML file, or a command that names one, with its `dataset_info.json`."""

import json
import re
from os.path import isfile
from pathlib import Path
from typing import Any

import yaml

from r1_cli.config.convert.conversion import Conversion, OthersLoader
from r1_cli.config.convert.fine_tuning import set_length, set_preference, set_training
from r1_cli.config.convert.llamafactory_keys import DEFAULTS, HARMLESS, KEYS, NO_COUNTERPART
from r1_cli.config.convert.llamafactory_rows import read_source
from r1_cli.config.convert.shell import command_words, read_flags, read_value
from r1_cli.config.convert.trl_keys import HARMLESS as UNUSED
from r1_cli.config.section import Tree

PROGRAM = r"(.*/)?(llamafactory-cli|lmf|train(_bash)?\.py|launcher\.py)"
LOSSES = {"sigmoid": "dpo", "ipo": "ipo", "simpo": "simpo"}
STAGES = ("sft", "dpo", "kto", "rm")
OTHER_STAGES = {
    "pt": "text without questions is not trained",
    "ppo": "`r1 train` is the stage of reinforcement learning: start from its examples",
}


def convert_llamafactory(text: str, devices: int, folder: Path) -> Conversion:
    """Convert settings of LLaMA-Factory for `devices` processes.

    Args:
        text: YAML, or a command or shell script.
        folder: where its relative files are.

    Raises:
        ValueError: the text has no settings, or a stage or loss that r1 does not have.
    """
    made = Conversion("LLaMA-Factory's configuration", _read(text, folder), DEFAULTS)
    stage = made.read("stage")
    if stage in OTHER_STAGES:
        raise ValueError(f"stage={stage}: {OTHER_STAGES[stage]}")
    if stage not in STAGES:
        raise ValueError(f"stage={stage} is none of {', '.join(STAGES)}")
    set_training(made, devices, "llamafactory")
    made.rename({key: ours for key, ours in KEYS.items() if key in made.given or _has_media(made, key[:6])})
    _set_loss(made, stage)
    _set_length_and_turns(made)
    _set_weights(made)
    _set_precision(made)
    _set_rows(made, folder)
    for name in HARMLESS:
        made.read(name)
    made.report_lost({name: why for name, why in NO_COUNTERPART.items() if name not in HARMLESS})
    made.skip_defaults(UNUSED)
    return made


def _read(text: str, folder: Path) -> Tree:
    if re.search(rf"(?m)^[^#\n]*(?<!\S){PROGRAM}(?!\S)", text):
        words = command_words(text, PROGRAM)
        words = words[1:] if words[:1] == ["train"] else words
        first = next((index for index, word in enumerate(words) if word.startswith("--")), len(words))
        files = [word for word in words[:first] if "=" not in word]
        given: Tree = {}
        for file in files:
            given |= _read_yaml(_find(file, folder).read_text("utf-8"))
        overrides = [word.partition("=") for word in words[:first] if "=" in word]
        return given | {key: read_value(value) for key, _, value in overrides} | read_flags(words[first:])
    return _read_yaml(text)


def _find(name: str, folder: Path) -> Path:
    """Return a file by its name in the current folder or the given one. Raises ValueError."""
    for path in (Path(name), folder / name):
        if isfile(path):
            return path
    raise ValueError(f"{name}: no such file, here or in {folder}")


def _read_yaml(text: str) -> Tree:
    try:
        given = yaml.load(text, OthersLoader)
    except yaml.YAMLError as error:
        raise ValueError(
            f"the file is not YAML, and no command of LLaMA-Factory: {' '.join(str(error).split())}"
        ) from error
    if not isinstance(given, dict):
        raise ValueError("the file must hold keys of LLaMA-Factory, such as stage and dataset")
    return {name: "no" if name.endswith("_strategy") and value is False else value for name, value in given.items()}


def _set_loss(made: Conversion, stage: str) -> None:
    beta, loss, smoothing = made.read("pref_beta"), made.read("pref_loss"), made.read("dpo_label_smoothing")
    gamma, dynamic = made.read("simpo_gamma"), made.read("use_dft_loss")
    if stage == "sft":
        made.settings["sft.loss"] = "dft" if dynamic else "nll"
        return
    if stage == "rm":
        made.settings["sft.loss"] = "reward"
        return
    made.settings["sft.beta"] = beta
    if stage == "kto":
        made.settings["sft.loss"] = "kto"
        return
    if loss not in LOSSES:
        raise ValueError(f"pref_loss={loss}: r1 has {', '.join(LOSSES)} of it")
    set_preference(made, LOSSES[loss], smoothing)
    if loss == "simpo":
        made.settings["sft.margin"] = gamma


def _set_length_and_turns(made: Conversion) -> None:
    set_length(made, "cutoff_len")
    made.settings["sft.turns"] = "last" if made.read("mask_history") else "all"
    made.settings["sft.train_on_prompt"] = bool(made.read("train_on_prompt"))
    if (template := made.read("template")) is not None:
        made.remarks.append(f"template={template}: rows are rendered by the model's own chat template; `r1 data show`")
        made.remarks[-1] += " prints a row as the model sees it, data.override_chat_template replaces the template"


def _set_weights(made: Conversion) -> None:
    settings, kind, model = made.settings, made.read("finetuning_type"), "worker.actor.model"
    rank, alpha, target = (made.read(f"lora_{name}") for name in ("rank", "alpha", "target"))
    bits = made.read("quantization_bit")
    if kind == "lora" and settings["sft.loss"] == "reward":
        made.lost.append("finetuning_type=lora: every weight of a reward model is trained")
    elif kind == "lora":
        listed = target.split(",") if isinstance(target, str) else target
        modules = "all-linear" if target == "all" else [name.strip() for name in listed]
        chosen = {"rank": rank, "alpha": alpha or 2 * rank, "target_modules": modules}
        settings |= {f"{model}.lora.{name}": value for name, value in chosen.items()}
    elif kind != "full":
        made.lost.append(f"finetuning_type={kind}: set worker.actor.model.freeze, or lora")
    if bits == 4 and f"{model}.lora.rank" in settings:
        settings[f"{model}.quantization"] = "nf4"
    elif bits:
        made.lost.append(f"quantization_bit={bits}: the base of an adapter is kept in 4 bits or in full")
    settings[f"{model}.enable_gradient_checkpointing"] = not made.read("disable_gradient_checkpointing")
    frozen, projector = made.read("freeze_vision_tower"), made.read("freeze_multi_modal_projector")
    if kind == "full" and ("freeze_vision_tower" in made.given or _has_media(made, "image_", "video_")):
        settings[f"{model}.freeze_vision_tower"] = bool(frozen)
        if bool(frozen) != bool(projector):
            made.lost.append(f"freeze_multi_modal_projector={projector}: set worker.actor.model.freeze")


def _has_media(made: Conversion, *kinds: str) -> bool:
    """Whether settings of pictures (`image_`) or videos (`video_`) are given, so that their defaults count."""
    return any(name.startswith(kinds) for name in made.given if name.startswith(("image_", "video_")))


def _set_precision(made: Conversion) -> None:
    """Replace what `set_optimizer` reads of TRL, whose default is bf16."""
    bf16, pure, fp16 = (bool(made.read(name)) for name in ("bf16", "pure_bf16", "fp16"))
    made.settings["worker.actor.fsdp.mp_param_dtype"] = "bf16" if bf16 or pure else "fp32"
    if pure:
        made.settings |= {"worker.actor.fsdp.torch_dtype": "bf16", "worker.actor.optim.strategy": "adamw_bf16"}
    elif not (bf16 or fp16):
        made.remarks.append("neither bf16 nor fp16 is set: all is computed in float32, as there; bf16 is quicker")


def _set_rows(made: Conversion, folder: Path) -> None:
    home, shares = str(made.read("dataset_dir")), made.read("interleave_probs")
    strategy, most = made.read("mix_strategy"), made.read("max_samples")
    described, path = _read_descriptions(home, folder)
    for name, key in (("dataset", "train"), ("eval_dataset", "val")):
        names = made.read(name)
        listed = [part.strip() for part in names.split(",")] if isinstance(names, str) else names or []
        sources = [read_source(made, one, described, path, most) for one in listed]
        found = [source for source in sources if source]
        if len(found) == 1:
            made.settings |= _as_settings(found[0], key)
        elif found:
            if name == "dataset" and shares and strategy != "concat":
                weights = [float(share) for share in str(shares).split(",")] if isinstance(shares, str) else shares
                found = [{**source, "weight": weight} for source, weight in zip(found, weights, strict=False)]
            made.settings["data.sources" if key == "train" else "data.val_sources"] = found
    if not {"data.train_files", "data.sources"} & made.settings.keys():
        made.remarks.append("no rows are named that can be read: set data.train_files")


def _as_settings(source: Tree, key: str) -> Tree:
    """Return the settings of the only source. Training and validation share all but their files."""
    own = {f"data.{name}": value for name, value in source.items() if name not in ("files", "name")}
    flat = {
        f"{name}.{column}" if isinstance(value, dict) else name: inner
        for name, value in own.items()
        for column, inner in (value.items() if isinstance(value, dict) else [("", value)])
    }
    return {f"data.{key}_files": source["files"], **flat}


def _read_descriptions(home: str, folder: Path) -> tuple[dict[str, Any] | None, Path]:
    """Return the descriptions of data sets by name, None if there is no such file, and the folder of their files."""
    for base in (Path(home), folder / home, folder.parent / home, folder.parent.parent / home):
        if isfile(base / "dataset_info.json"):
            try:
                found = json.loads((base / "dataset_info.json").read_text("utf-8"))
            except ValueError as error:
                raise ValueError(f"{base / 'dataset_info.json'} is no JSON: {error}") from error
            return found, base
    return None, Path(home)
