"""The configuration's keys as a flat list, and the nearest key to a typo."""

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from r1_cli.config.root import RunConfig


@dataclass(frozen=True, slots=True)
class Schema:
    """Dotted keys by kind. An open mapping accepts any key below it."""

    values: dict[str, FieldInfo]
    sections: frozenset[str]
    open_mappings: frozenset[str]

    def open_mapping_above(self, key: str) -> str | None:
        return next((name for name in self.open_mappings if key.startswith(f"{name}.")), None)

    def has(self, key: str) -> bool:
        return key in self.values or key in self.open_mappings or self.open_mapping_above(key) is not None

    def is_text(self, key: str) -> bool:
        """Whether the key accepts free text: `007` and `yes` stay as written."""
        field = self.values.get(key)
        return field is not None and _takes_text(field.annotation)


def _takes_text(annotation: Any) -> bool:
    if get_origin(annotation) in (Annotated, Union, UnionType, list):
        return any(_takes_text(part) for part in get_args(annotation))
    return annotation is str


@cache
def schema() -> Schema:
    """Return the flat view of `RunConfig`.

    `RunConfig.model_json_schema()`, with its `$ref`s and `anyOf`s, would take a longer walk.
    """
    entries = list(_walk(RunConfig, ""))
    return Schema(
        values={key: field for key, field, kind in entries if kind == "value"},
        sections=frozenset(key for key, _, kind in entries if kind == "section"),
        open_mappings=frozenset(key for key, _, kind in entries if kind == "open"),
    )


def _walk(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo, Literal["value", "section", "open"]]]:
    for name, field in model.model_fields.items():
        key = prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield key, field, "section"
            yield from _walk(field.annotation, f"{key}.")
        else:
            yield key, field, "open" if get_origin(field.annotation) is dict else "value"


def choices(annotation: Any) -> list[str]:
    """Return the words that a key accepts, [] if it is free."""
    if get_origin(annotation) is Literal:
        return [str(word) for word in get_args(annotation)]
    return [word for part in get_args(annotation) for word in choices(part)]


OTHER_WORDS = {  # what other trainers call a key, by its last word
    "learning_rate": "lr",
    "num_generations": "n",
    "max_completion_length": "max_response_length",
    "max_new_tokens": "max_response_length",
    "train_batch_size": "rollout_batch_size",
    "model_name_or_path": "model_path",
    "num_train_epochs": "total_epochs",
    "epsilon": "clip_ratio_low",
    "epsilon_high": "clip_ratio_high",
    "beta": "kl_coef",
    "warmup_ratio": "lr_warmup_ratio",
    "warmup_steps": "lr_warmup_steps",
    "save_steps": "save_freq",
    "eval_steps": "val_freq",
}


LONGEST = 200  # characters of a key for which a similar one is named


def nearest_key(key: str) -> str | None:
    """Return the existing key most similar in its last word, then in its path."""
    flat = schema()
    if len(key) > LONGEST:  # no slip of the hand, and slow to compare
        return None
    *path, word = key.split(".")
    key = ".".join([*path, OTHER_WORDS.get(word, word)])
    candidates = [*flat.values, *flat.open_mappings, *flat.sections]
    best = max(candidates, key=lambda known: _likeness(key, known))
    return best if _likeness(key, best) >= 0.62 else None


def _likeness(typed: str, known: str) -> float:
    word, path = typed.rpartition(".")[2], typed.rpartition(".")[0]
    known_word, known_path = known.rpartition(".")[2], known.rpartition(".")[0]
    same_word = SequenceMatcher(None, word, known_word).ratio()
    critic = 0.05 if "critic" in known and "critic" not in typed else 0.0
    if not path:
        return same_word - critic
    return 0.75 * same_word + 0.25 * SequenceMatcher(None, path, known_path).ratio() - critic
