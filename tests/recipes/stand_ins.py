"""Tiny random models in place of published ones, with the special tokens of the real tokenizers.

Each has one token a byte, and of the special tokens those that matter: what begins, ends and pads a text, what takes
turns, what opens a thought.
"""

from pathlib import Path
from typing import Any

import transformers as hf
from families import make_config, make_model, save_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

LLAMA3 = {
    "begin": "<|begin_of_text|>", "end": "<|eot_id|>",
    "special": ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>",
                "<|eot_id|>"),
    "ends": ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
    "template": (
        "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content "
        "+ '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
}  # fmt: skip
DISTILL = {
    "begin": "<｜begin▁of▁sentence｜>", "end": "<｜end▁of▁sentence｜>", "pad": "<｜end▁of▁sentence｜>",
    "special": ("<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜begin▁of▁sentence｜>"),
    "plain": ("<think>", "</think>"),  # tokens of their own that no decoder leaves out
    "ends": ("<｜end▁of▁sentence｜>",),
    "template": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}{% else %}"
        "{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"
    ),
}  # fmt: skip
BASE = {"end": "<|endoftext|>", "pad": "<|endoftext|>", "special": ("<|endoftext|>",), "ends": ("<|endoftext|>",)}
KINDS = {"llama3": ("llama", LLAMA3), "distill": ("qwen2", DISTILL), "base": ("qwen2", BASE)}


def make_tokenizer(kind: dict[str, Any]) -> Any:
    """A tokenizer of bytes with the special tokens of `kind`; one with a begin token writes it before every text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in kind["special"]])
    bpe.add_tokens([AddedToken(one, special=False, normalized=False) for one in kind.get("plain", ())])
    if begin := kind.get("begin"):
        bpe.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, bpe.token_to_id(begin))]
        )
    names = {"bos_token": kind.get("begin"), "eos_token": kind["end"], "pad_token": kind.get("pad")}
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=bpe, **{name: token for name, token in names.items() if token is not None}
    )
    tokenizer.chat_template = kind.get("template")
    return tokenizer


def save_stand_in(name: str, folder: Path) -> str:
    """Write a model of `KINDS`, or of a family of `families.py`, as a Hugging Face folder; return its path."""
    if name not in KINDS:
        return save_model(name, folder)
    family, kind = KINDS[name]
    tokenizer = make_tokenizer(kind)
    config = make_config(family)
    ends = tokenizer.convert_tokens_to_ids(list(kind["ends"]))
    begin, pad = tokenizer.bos_token_id, tokenizer.pad_token_id
    config.update({"eos_token_id": ends, "bos_token_id": begin, "pad_token_id": pad})
    model = make_model(family, config=config)
    model.generation_config = hf.GenerationConfig(eos_token_id=ends, bos_token_id=begin)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
