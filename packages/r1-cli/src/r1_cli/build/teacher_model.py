"""A teacher that the run loads: its files, and whether it reads the policy's tokens."""

import logging
from typing import Any

from r1_cli.config.distillation import PATH, TeacherConfig
from r1_cli.models import load as models
from r1_cli.models.families import is_vision_language
from r1_cli.models.files import ModelFiles, resolve_model_path

log = logging.getLogger("r1")

# Texts on which tokenizers with equal vocabularies may still differ: merges, spaces, digits, scripts, control tokens.
PROBES = (
    "The quick brown fox jumps over the lazy dog.", "  two  spaces   and\ttabs\n\n\nlines \n",
    "don't I'll we've They'RE", "0123456789 3.14159 1,000,000 1e-9", "x^2 + y_1 = \\frac{a}{b} \\boxed{42}",
    "def f(x):\n    return x ** 2  # é", "ÄÖÜ naïve café — “quoted” … ½ €", "你好，世界。今天是星期三",
    "こんにちは カタカナ", "안녕하세요", "Привет, мир", "\u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627",
    "\U0001f44d\U0001f3fd\U0001f1e9\U0001f1ea", "e\u0301 \u00e9 \ufb01 \u200b\ufeff",
    "<think>\nso\n</think>\n\n<answer>7</answer>", '{"a": [1, 2.5, null]}', "https://example.org/a?b=c&d=%20e",
    "AAAAaaaa BBBB_bbbb camelCaseWord snake_case_word", "!!!???...;;;:::---===+++***", "The answer is (B).",
    " leading", "trailing ", "\n", "\r\n", "I", " I", "\u3000 wide", "A\u0000B", "1/2 2/3 \u2153", "¿Cómo estás?",
    "\u222b_0^1 x² dx ≈ 0.333 ≤ ∞ ∀ε>0", "Qu'est-ce que c'est ?", "100%", "$5.00", "#1", "a\nb", "a\n\nb", "a \n b",
    "\t\tif x:", "</s>", "<|im_start|>user", "<|im_end|>", "<|endoftext|>", "[INST]", "<bos>", "```py\n",
    "let's", "LET'S", "2024-01-31", "12:30", "1000000", "0x1F", "-7", "- 7", "a-b", "a - b", "The", "THE",
    "antidisestablishmentarianism", "xxxxxxxxxxxxxxxxxxxxxxxx", "      ", "\\", "'\"`", "©®™",
)  # fmt: skip


OTHER = (
    "A teacher on policy reads the policy's tokens, so it needs the same tokenizer. With another one, distil off "
    "policy: r1 sample TEACHER …, then r1 sft"
)


def open_teacher(settings: TeacherConfig, policy: ModelFiles) -> ModelFiles:
    """Return the teacher's files. Raises ModelError if it is of another family or has other tokens than the policy."""
    path = resolve_model_path(settings.in_learner or "", PATH)
    config = models.load_config(path, trust_remote_code=settings.model.trust_remote_code, key=PATH)
    if config.model_type != policy.config.model_type:
        raise models.ModelError(
            f"{PATH}={path}: its family is {config.model_type}, the policy's {policy.config.model_type}; it is given "
            "the policy's tokens, positions and pictures, so name a model of the same family"
        )
    tokenizer, processor = models.load_tokenizer(
        path, vision_language=is_vision_language(config), trust_remote_code=settings.model.trust_remote_code, key=PATH
    )
    require_same_tokenizer(f"{PATH}={path}", policy.tokenizer, tokenizer)
    rows = config.get_text_config().vocab_size
    if rows < len(policy.tokenizer):
        raise models.ModelError(
            f"{PATH}={path}: it has {rows} rows of tokens, the policy's tokenizer {len(policy.tokenizer)}"
        )
    return ModelFiles(path, config, tokenizer, processor)


def require_same_tokenizer(owner: str, own: Any, other: Any) -> None:
    """Raise ModelError unless two tokenizers give the same ids to the same text. `owner` names the other one.

    Sizes may differ: the other may know more tokens. Different end tokens are a warning.
    """
    if problem := find_difference(own, other):
        raise models.ModelError(f"{owner}: {problem}. {OTHER}")
    if own.eos_token != other.eos_token:
        log.warning(
            "%s: it ends answers with %r, the policy with %r, which the teacher may find unlikely",
            owner, other.eos_token, own.eos_token,
        )  # fmt: skip


def find_difference(own: Any, other: Any) -> str | None:
    """Return the first difference between a tokenizer and another one that is to read its tokens; None without one."""
    vocabulary, others = own.get_vocab(), other.get_vocab()
    different = {token: number for token, number in vocabulary.items() if others.get(token) != number}
    if different:
        token, number = min(different.items(), key=lambda pair: pair[1])
        found = others.get(token)
        where = "is unknown to it" if found is None else f"is its {found}"
        return (
            f"{len(different)} of the policy's {len(vocabulary)} tokens are others there: {token!r}, {number}, {where}"
        )
    for text in (*PROBES, *map(str, own.all_special_tokens)):
        mine, theirs = (one.encode(text, add_special_tokens=False) for one in (own, other))
        if mine != theirs:
            return f"it splits {text!r} into {theirs}, the policy's tokenizer into {mine}"
    return None
