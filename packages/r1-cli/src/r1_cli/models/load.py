"""Load Hugging Face models: class, dtype, attention, adapters, tokenizers."""

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoProcessor,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
)

from r1_cli.checkpoint.damage import find_cut
from r1_cli.models.activation_offload import ActivationOffload, CopyStreams
from r1_cli.models.adapters import AdapterError, Adapters, merge_adapter
from r1_cli.models.attention import PACKED_ATTENTION, attend_packed
from r1_cli.models.families import configure_experts, find_value
from r1_cli.models.frozen_base import Base, dequantize, quantization_options, read_base, use_training_kernels
from r1_cli.models.quantized_files import find_fault, plain_options, read_whole
from r1_cli.models.sharded_loading import ShardedLoadingError, load_sharded, move_to_device
from r1_cli.models.value_head import Head, initialize_head, quiet_loading, with_one_output
from r1_core.learner.parallel import Parallel, Shard
from r1_rollout.loading import model_family
from r1_rollout.routing import Routing
from r1_rollout.token_kinds import prepare_media


class ModelError(ValueError):
    """A model folder or hub name that cannot be used; the message says why and what to do."""


def load_config(
    path: str,
    *,
    trust_remote_code: bool = False,
    overrides: Mapping[str, object] | None = None,
    key: str = "worker.actor.model.model_path",
) -> PreTrainedConfig:
    """Return the model's configuration from a folder or the hub, the value of `key`.

    Raises:
        ModelError: no folder with a `config.json` and no reachable hub name, transformers does not know the model, or
            text attends in both directions (PaliGemma, EmbeddingGemma), so that tokens have no log-probs.
    """
    folder = Path(path)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ModelError(f"{key}={path}: the folder has no config.json")
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, **(overrides or {}))
    except OSError as error:
        raise ModelError(
            f"{key}={path}: no such folder in {Path.cwd()}, and the hub did not give it ({str(error).splitlines()[0]})"
        ) from error
    except Exception as error:  # families refuse what is not theirs with exceptions of any kind
        raise ModelError(f"{key}={path}: {_explain_config(error)}") from error
    if find_value(config.get_text_config(), "use_bidirectional_attention") in (True, "all"):
        raise ModelError(
            f"{key}={path}: text of {config.model_type} attends in both directions "
            "(use_bidirectional_attention), r1 trains causal language models"
        )
    return config


def _explain_config(error: Exception) -> str:
    message = " ".join(str(error).split()) or type(error).__name__
    if "trust_remote_code" in message:
        return (
            "the model is code of its own, which runs only with trust_remote_code=true; or name a checkpoint of it in "
            f"the form of transformers {transformers.__version__}, often called …-hf"
        )
    return f"transformers {transformers.__version__} cannot read its config.json ({message[:200]})"


def load_model(
    path: str,
    *,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool = False,
    parallel: Parallel | None = None,
    shard: Shard = Shard(),  # noqa: B008 (frozen)
    adapters: Adapters | None = None,
    quantization: str | None = None,
    head: Head | None = None,
) -> transformers.PreTrainedModel:
    """Return the model with its language-model head, in `dtype` on `device`, without dropout.

    An adapter's checkpoint is merged into its base.

    Args:
        head: replace that of the vocabulary by one of one output, see `models.value_head`.
        parallel: ranks that share the model, all of which must call this.
        quantization: of linear layers under the adapters; dequantized without adapters. Not for ranks.
        adapters: injected with initial factors; the rest is frozen.

    Raises:
        ModelError: there are no weights, they do not fit the configuration, they are quantized in a form that cannot be
            trained, or they cannot be read in shards.
    """
    choices = {"config": without_dropout(config), "dtype": dtype, "trust_remote_code": trust_remote_code}
    try:
        base = _find_base(path, adapters)
        bits = quantization if base is None else base.quantization
        if fault := find_fault(config, bits):
            raise ModelError(f"{path}: {fault}")
        choices |= plain_options(config) if bits is None else quantization_options(dtype, device)
        model = _read(path if base is None else base.name, choices, parallel, shard, adapters, head)
        if bits is not None:
            use_training_kernels(model)
            model = dequantize(model, dtype) if adapters is None else model
        if adapters is not None:
            adapters.fill(model)
        if base is not None:
            merge_adapter(model, Path(path), base.torch_dtype)
    except OSError as error:
        raise ModelError(f"{path}: its weights cannot be read ({str(error).splitlines()[0]})") from error
    except (ShardedLoadingError, AdapterError) as error:
        raise ModelError(str(error)) from error
    configure_modules(model, shard.param_dtype or dtype, device)
    on_device = bits is not None and adapters is not None  # 4 bits cannot be moved as weights are
    return (model if on_device else move_to_device(model, device, offload=shard.offload)).eval()


def configure_modules(model: transformers.PreTrainedModel, dtype: torch.dtype, device: torch.device) -> None:
    """Replace patch convolutions, attention and experts by r1's, for `dtype` on `device`; prepare pictures' inputs."""
    replace_patch_convolutions(model)
    prepare_media(model)
    attend_packed(model)
    configure_experts(model, dtype, device)


def _find_base(path: str, adapters: Adapters | None) -> Base | None:
    base = read_base(path)
    if base is not None and adapters is not None:
        raise ModelError(f"{path} holds an adapter: merge it, or set lora.path to it and model_path to {base.name}")
    if base is not None:
        base.require_there()
    return base


def _read(
    path: str,
    choices: Mapping[str, Any],
    parallel: Parallel | None,
    shard: Shard,
    adapters: Adapters | None,
    head: Head | None,
) -> Any:
    config = choices["config"]
    family = model_family(config)
    if head is not None:
        trust = choices["trust_remote_code"]
        try:
            family, config = with_one_output(head, family, config, trust_remote_code=trust)
        except ValueError as error:
            known = "transformers has no token classifier of this family, and a reward model needs one"
            raise ModelError(f"{path}: {config.model_type}: {known}") from error
    choices = {
        **choices,
        "config": config,
        "attn_implementation": PACKED_ATTENTION,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # else Hugging Face raises, and names them in the log alone
    }
    with nullcontext() if head is None else quiet_loading():
        try:
            model, info = _read_weights(family, path, choices, parallel, shard, adapters)
        except KeyError as error:
            if error.args != (PACKED_ATTENTION,):
                raise
            # Falcon, GPT-J and GPT-Neo choose among attention classes of their own, by a name that they must know.
            own = {**choices, "attn_implementation": "eager"}
            model, info = _read_weights(family, path, own, parallel, shard, adapters)
    info = info if head is None else initialize_head(head, model, info)
    if info["missing_keys"] or info["mismatched_keys"]:
        missing = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
        raise ModelError(f"{path}: {len(missing)} weights are missing or of another shape: {', '.join(missing[:5])}")
    return model


def _read_weights(
    family: Any,
    path: str,
    choices: Mapping[str, object],
    parallel: Parallel | None,
    shard: Shard,
    adapters: Adapters | None,
) -> tuple[Any, Any]:
    try:
        if parallel is not None and parallel.mesh is not None:
            return load_sharded(family, path, parallel, shard, choices, adapters)
        model, info = read_whole(family, path, choices)
    except SafetensorError as error:
        cut = (f"{file.name}: {told}" for file in sorted(Path(path).glob("*.safetensors")) if (told := find_cut(file)))
        raise ModelError(f"{path} is damaged ({next(cut, error)}): copy it again, or name another") from error
    if adapters is not None:
        adapters.inject(model)
    return model, info


def without_dropout(config: PreTrainedConfig) -> Any:
    """Return a copy without dropout, with which the first importance ratios would differ from 1.

    Engines change theirs.
    """
    config = copy.deepcopy(config)
    parts = [config]
    for part in parts:
        parts += [held for key in part.sub_configs if isinstance(held := find_value(part, key), PreTrainedConfig)]
        for name, value in part.to_dict().items():
            if "drop" in name and isinstance(value, float):  # dropout, attn_pdrop, layerdrop, drop_path_rate, …
                setattr(part, name, 0.0)
    return config


def freeze_vision(model: nn.Module, key: str = "worker.actor.model.freeze_vision_tower") -> int:
    """Freeze the vision tower; return how many parameters that froze.

    Raises:
        ModelError: no module is named as a vision tower.
    """
    frozen = [p for name, p in model.named_parameters() if "visual." in name or "vision_tower." in name]
    if not frozen:
        raise ModelError(f"{key}=true: this model has no vision tower to freeze")
    for parameter in frozen:
        parameter.requires_grad_(False)
    return sum(p.numel() for p in frozen)


def enable_gradient_checkpointing(model: transformers.PreTrainedModel, *, on_host: bool = False) -> None:
    """Recompute activations in the backward pass. Hugging Face does so only for modules in training mode.

    Args:
        on_host: keep layer inputs in host memory. A GPU copies them while it computes other layers. NOT RUN ON A GPU.
    """
    options: dict[str, Any] = {"use_reentrant": False}
    if (routing := Routing.of(model)) is not None:
        options["context_fn"] = routing.keep  # the backward pass has to compute with the same experts
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    if on_host:
        on_gpu = model.device.type == "cuda"
        call = ActivationOffload(CopyStreams(model.device)).call if on_gpu else _checkpoint_with_copies
        for module in model.modules():
            if (checkpoint := find_value(module, "_gradient_checkpointing_func")) is not None:
                module._gradient_checkpointing_func = partial(call, checkpoint)
    model.train()


def _checkpoint_with_copies(checkpoint: Callable[..., object], layer: nn.Module, *inputs: object) -> object:
    with torch.autograd.graph.save_on_cpu():
        return checkpoint(layer, *inputs)


def load_tokenizer(
    path: str,
    *,
    vision_language: bool,
    trust_remote_code: bool = False,
    key: str = "worker.actor.model.model_path",
) -> tuple[Any, Any]:
    """Return (tokenizer, processor) of `path`, the value of `key`; text models have the tokenizer twice.

    Raises ModelError: a file is missing or cannot be read.
    """
    family = AutoProcessor if vision_language else AutoTokenizer
    try:
        processor: Any = _read_cached_if_away(family, path, trust_remote_code=trust_remote_code)
    except Exception as error:  # families refuse files with exceptions of any kind
        files = "tokenizer.json and tokenizer_config.json"
        files = f"preprocessor_config.json or processor_config.json, and {files}" if vision_language else files
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"{key}={path}: its {'processor' if vision_language else 'tokenizer'} cannot be read ({why}); copy {files} "
            "of the published model into the folder"
        ) from error
    return (processor.tokenizer, processor) if vision_language else (processor, processor)


def _read_cached_if_away(family: Any, path: str, **choices: object) -> Any:
    """Return `family.from_pretrained`, from the hub's cache if a request fails as transformers does not expect."""
    try:
        return family.from_pretrained(path, **choices)
    except Exception:
        if not Path(path).is_dir():
            with suppress(Exception):
                return family.from_pretrained(path, local_files_only=True, **choices)
        raise


def load_generation_config(path: str, config: PreTrainedConfig) -> Any:
    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:
        return GenerationConfig.from_model_config(config)


def find_rope_fault(path: str, text: PreTrainedConfig, longest: int) -> str | None:
    """Return why samples of up to `longest` tokens cannot be batched: RoPE depends on the longest sample.

    Args:
        text: the model's text configuration.

    Raises:
        ModelError: RoPE also depends on earlier forward passes.
    """
    given: dict[str, Any] = find_value(text, "rope_parameters") or {}
    for rope in given.values() if all(isinstance(one, dict) for one in given.values()) else [given]:
        kind, known = rope.get("rope_type"), rope.get("original_max_position_embeddings")
        known = known or find_value(text, "max_position_embeddings")
        if known is None or longest <= known:
            continue
        if kind == "longrope":
            return f"rotates all samples of a micro-batch by the longest (longrope, beyond {known} tokens)"
        if kind == "dynamic":
            raise ModelError(
                f"{path}: beyond {known} tokens its dynamic rotary embedding depends on the longest sequence that it "
                "has seen before, so log-probs could not be computed again: lower data.max_prompt_length and "
                f"data.max_response_length to {known} together, or set another rope_type"
            )
    return None


# --- patch embeddings ------------------------------------------------------------------------------------------------


class PatchEmbedding(nn.Conv3d):
    """A patch embedding as one matrix product, several times faster than torch's convolution."""

    def forward(self, patches: Tensor) -> Tensor:
        """From [N, channels, *kernel] to [N, out, 1, 1, 1]; other inputs go to the parent."""
        if patches.ndim != 5 or tuple(patches.shape[2:]) != self.kernel_size:
            return super().forward(patches)
        return F.linear(patches.flatten(1), self.weight.flatten(1), self.bias)[..., None, None, None]


def replace_patch_convolutions(model: nn.Module) -> None:
    for module in model.modules():
        if type(module) is nn.Conv3d and _is_plain(module):
            module.__class__ = PatchEmbedding


def _is_plain(module: Any) -> bool:
    return module.groups == 1 and set(module.dilation) == {1} and module.padding == (0, 0, 0)
