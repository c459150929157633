"""Special tokens of a model, read from its files: those that end a response, those that stand for media."""

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

# What configurations call the tokens that stand for media, and those around them: `image_token_id`,
# `vision_start_token_id`, in some `image_token_index`; `boi` begins an image, `eoa` ends audio.
_MEDIA_KEY = re.compile(r"^(image|video|vision|audio|[be]o[ia])_([a-z]+_)?token_(id|index)$")
# Those that some vocabularies have beside them.
_MEDIA_TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>")


def end_token_ids(
    generation_config: "GenerationConfig | None",
    config: "PreTrainedConfig",
    tokenizer: "PreTrainedTokenizerBase | None" = None,
) -> frozenset[int]:
    """Return the tokens that end a response: those of the generation settings and the tokenizer's.

    If the settings name none, those of the model's configuration are used.
    """
    named = _named(generation_config) or _named(config) or _named(config.get_text_config())
    return named | _named(tokenizer)


def read_end_token_ids(
    path: str, trust_remote_code: bool = False, tokenizer: "PreTrainedTokenizerBase | None" = None
) -> frozenset[int]:
    from transformers import AutoConfig, GenerationConfig

    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    try:
        return end_token_ids(GenerationConfig.from_pretrained(path), config, tokenizer)
    except OSError:
        return end_token_ids(None, config, tokenizer)


def media_token_ids(config: "PreTrainedConfig", tokenizer: "PreTrainedTokenizerBase | None" = None) -> frozenset[int]:
    """Return the tokens that stand for media or surround them: a response with one would ask for a picture."""
    ids = {value for name, value in config.to_dict().items() if _MEDIA_KEY.match(name) and isinstance(value, int)}
    if tokenizer is not None:
        vocabulary = tokenizer.get_vocab()
        ids |= {tokenizer.convert_tokens_to_ids(token) for token in _MEDIA_TOKENS if token in vocabulary}
    return frozenset(ids)


def setting(config: Any, name: str, default: Any = None) -> Any:
    return getattr(config, name, default)


def _named(source: Any) -> frozenset[int]:
    ids = setting(source, "eos_token_id")
    return frozenset(token for token in (ids if isinstance(ids, list | tuple) else [ids]) if token is not None)
