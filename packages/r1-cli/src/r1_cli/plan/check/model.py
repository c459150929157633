"""Check the model's folder (files, tokenizer, chat template, special tokens), and the teachers'."""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from r1_cli.checkpoint.damage import find_cut
from r1_cli.config import ConfigError
from r1_cli.config.distillation import TEACHER
from r1_cli.models.families import find_value
from r1_cli.plan.announce import describe_distillation
from r1_cli.plan.check.findings import Finding, Subject


def check_files(subject: Subject) -> Iterator[Finding]:
    folder = Path(subject.model.path)
    if not folder.is_dir():
        yield Finding("model.hub", "note", f"{folder} is a name of the hub: its files were not looked at")
        return
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        named = set(json.loads(index.read_text())["weight_map"].values())
        for name in sorted(named - {path.name for path in folder.iterdir()}):
            yield Finding(
                "model.files", "error", f"{folder}/{name} is missing, which {index.name} names", "copy it again"
            )
    files = [path for path in sorted(folder.glob("*.safetensors")) if not path.name.startswith("optimizer")]
    if not files and not (folder / "adapter_config.json").is_file():
        yield Finding("model.files", "error", f"{folder} has no *.safetensors", "copy or convert the weights")
    for path in files:
        if (message := find_cut(path)) is not None:
            yield Finding("model.files", "error", f"{path}: {message}", "copy it again")


def check_tokenizer(subject: Subject) -> Iterator[Finding]:
    model = subject.model
    tokenizer, text = model.tokenizer, model.config.get_text_config()
    fix = "name the folder that the model's own tokenizer is in"
    if len(tokenizer) > text.vocab_size:
        message = f"the tokenizer has {len(tokenizer):,} tokens, the model {text.vocab_size:,}"
        yield Finding("model.tokenizer", "error", message, fix)
    for name in ("image_token_id", "video_token_id"):
        token = find_value(model.config, name)
        if token is not None and token >= len(tokenizer):
            yield Finding("model.tokenizer", "error", f"config.json says {name}={token}, which no token is", fix)
    if tokenizer.eos_token_id is None:
        yield Finding("model.eos", "error", "the tokenizer names no token that ends an answer", "set its eos_token")
    elif tokenizer.pad_token_id == tokenizer.eos_token_id:
        yield Finding("model.pad", "note", "padding and end of answers are one token; r1 masks padding by position")
    own = find_value(model.processor, "chat_template") or tokenizer.chat_template
    if not own and not subject.config.data.override_chat_template:
        yield Finding(
            "model.chat template", "error", "the tokenizer has no chat template", "set data.override_chat_template"
        )


def check_template(subject: Subject) -> Iterator[Finding]:
    """Say what the chat template makes of an assistant's answers, which `r1 sft` trains."""
    from r1_cli.build.rendering import build_renderer
    from r1_cli.models.load import load_generation_config
    from r1_data.assistant import TemplateAnswers
    from r1_data.types import DataError
    from r1_rollout.tokens import end_token_ids

    key, model, another = "model.answers", subject.model, "give another template (data.override_chat_template)"
    try:
        renderer = build_renderer(subject.config, model)
        found = TemplateAnswers.probe(renderer)
    except DataError as error:  # no template at all is an error of its own
        yield Finding(key, "note", f"r1 sft cannot train with the chat template: {error}")
        return
    stops = end_token_ids(load_generation_config(model.path, model.config), model.config, model.tokenizer)
    ends = renderer.tokenizer(found.end, add_special_tokens=False)["input_ids"] if found.end else []
    opens = f"; the generation prompt opens {found.opens!r}" if found.opens else ""
    if stops & {*ends}:
        yield Finding(key, "note", f"chat template: an answer ends with {found.end}{opens}")
    else:
        end = f"ends with {found.end}, at which sampling does not stop" if found.end else "ends with no special token"
        yield Finding(key, "warning", f"chat template: an answer {end}: trained on it, a model does not stop", another)
    if found.forgets:
        whose = "any reasoning_content" if found.forgets == "all" else "the reasoning_content of earlier answers"
        fix = "" if found.forgets == "all" else "sft.turns=each trains every answer with its reasoning"
        yield Finding(f"{key}.reasoning", "note", f"chat template: it does not show {whose} to r1 sft", fix)


def check_lengths(subject: Subject) -> Iterator[Finding]:
    data, text = subject.config.data, subject.model.config.get_text_config()
    longest, known = data.max_prompt_length + data.max_response_length, find_value(text, "max_position_embeddings")
    if known and longest > known:
        message = f"prompt and response may have {longest:,} tokens, the model knows {known:,} positions"
        yield Finding("model.lengths", "error", message, "lower data.max_prompt_length or data.max_response_length")


def check_dtype(subject: Subject) -> Iterator[Finding]:
    actor = subject.config.worker.actor
    if "fp16" in (actor.fsdp.torch_dtype, actor.fsdp.mp_param_dtype):
        yield Finding("model.dtype", "warning", "fp16 overflows in training where nothing scales the loss", "take bf16")


def check_teacher(subject: Subject) -> Iterator[Finding]:
    teacher = subject.config.worker.teacher
    if subject.tunes or not teacher.used:
        return
    from r1_cli.build.rewards.frozen_model import require_same_tokens
    from r1_cli.build.teacher import open_servers
    from r1_cli.build.teacher_model import open_teacher
    from r1_cli.models.load import ModelError

    yield Finding("model.teacher", "note", describe_distillation(subject.config))
    topk = subject.config.algorithm.distillation.topk or 0
    for key, one in teacher.every.items():
        path = one.loaded
        if path and not Path(path).is_dir():
            yield Finding("model.teacher", "note", f"{key}: {path} is a name of the hub: its files were not looked at")
            continue
        try:
            if one.urls:
                open_servers(one, key, subject.model, topk)
            elif path and path == teacher.in_learner:
                open_teacher(teacher, subject.model)
            elif path:
                vision, name = subject.model.vision_language, f"{key}.model.model_path"
                require_same_tokens(path, name, subject.model, vision_language=vision, trust_remote_code=False)
        except (ConfigError, ModelError) as error:
            yield Finding("model.teacher", "error", str(error), f"correct {TEACHER}, or start its servers")
    yield from check_teacher_rows(subject)


def check_teacher_rows(subject: Subject) -> Iterator[Finding]:
    """Read some rows of each source as its teacher sees them."""
    from r1_cli.build.rendering import build_renderer
    from r1_cli.build.rows import open_local
    from r1_cli.build.teacher_prompts import open_teacher_rows
    from r1_cli.config.sources import training_sources
    from r1_cli.models.load import ModelError
    from r1_cli.plan.check.data import ROWS
    from r1_cli.plan.data_check.examine import SpacedRows
    from r1_data.dataset import Mixture, PromptDataset
    from r1_data.types import DataError

    renderer, most = build_renderer(subject.config, subject.model), subject.config.data.max_prompt_length
    parts = []
    for one in open_local(training_sources(subject.config.data)):
        with suppress(DataError):  # of the policy's own rows, which `check_rows` reports
            if one is not None:
                rows = SpacedRows(one.rows, ROWS)
                parts.append(PromptDataset(rows, renderer, max_prompt_length=most, reader=one.reader, bad_rows="skip"))
    try:
        open_teacher_rows(subject.config, subject.model, Mixture(parts))
    except (ConfigError, DataError, ModelError) as error:
        yield Finding("model.teacher.rows", "error", str(error), f"correct {TEACHER}, or the rows")


_PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"


def examine_layouts(path: str, precision: str = "fp32") -> Iterator[tuple[str, str]]:
    """Yield the questions of `build.packing` about a model, with answers. Raises ModelError."""
    import torch

    from r1_cli.build.packing import examine_model
    from r1_cli.build.rendering import build_renderer
    from r1_cli.config import RunConfig
    from r1_cli.hardware import dtype, find_hardware
    from r1_cli.models.files import load_weights, open_model
    from r1_core.learner import Learner

    fsdp = {"torch_dtype": precision, "mp_param_dtype": precision}
    config = RunConfig.model_validate({"worker": {"actor": {"model": {"model_path": path}, "fsdp": fsdp}}})
    model, hardware, own = open_model(config), find_hardware(), list[str]()
    templates = [one.chat_template for one in (model.processor, model.tokenizer)]
    if not any(templates):  # as of base models; the questions need none
        config = config.model_copy(update={"data": config.data.model_copy(update={"override_chat_template": _PLAIN})})
    weights = load_weights(config, model, dtype(precision), hardware.device)
    learner = Learner(weights, torch.optim.SGD(weights.parameters(), lr=0.0), lambda step: 0.0)

    def attend_by_itself(fault: str) -> None:
        own.append(fault)
        learner.set_layout("padded", own_attention=True)

    renderer = build_renderer(config, model)
    faults = examine_model(config, hardware, model, renderer, learner, attend_by_itself)
    yield "a sequence alone", f"{own[0]}; right by its own eager attention" if own else "right"
    yield "a padded batch", faults.padded or "right"
    yield "a packed row", faults.packed or "right"
    yield "shared prompts", faults.shared or "right"
    single = "one sample a micro-batch" if faults.padded else "padded micro-batches"
    packed = "packed micro-batches" + ("" if faults.shared else " that share prompts")
    yield "a run takes", single if faults.packed else packed
    if model.vision_language:
        yield "pictures", renderer.describe_media()
    if not any(templates):
        yield "chat template", "none: a run needs data.override_chat_template"
