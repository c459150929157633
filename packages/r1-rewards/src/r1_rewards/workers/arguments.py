"""Fill the parameters of a user's reward function by its shape and its parameters' names. Runs in a worker.

The README lists the shapes and the parameters that are filled by name. Values are lists with one entry per response, or
single values in `sequential` and `text`; `step` is always one number. A parameter without a default that has no other
meaning is a column of the data row; `reward_function_kwargs` take precedence.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsFloat

from r1_rewards.types import RewardSpecError, suggest
from r1_rewards.workers.frames import WireSample, decode_picture
from r1_rewards.workers.shapes import (
    ACCEPTED,
    PLURAL,
    SINGULAR,
    TRUTHS,
    VERL_ARGUMENTS,
    VERL_RESPONSES,
    Shape,
    code_of,
    constants,
    function_signature,
    read_shape,
)

FIELDS: dict[str, Callable[[WireSample], object]] = {
    "prompt": lambda sample: sample["prompt"],
    "response": lambda sample: sample["response"],
    "ground_truth": lambda sample: sample["ground_truth"],
    "response_length": lambda sample: sample["response_length"],
    "messages": lambda sample: sample["messages"],
    "images": lambda sample: [decode_picture(picture) for picture in sample["images"]],
    "metadata": lambda sample: dict(sample["metadata"]),
    "query": lambda sample: sample["prompt"] + sample["response"],
    "step": lambda sample: sample["step"],
}
PLURALS = {f"{name}s": name for name in ("prompt", "response", "ground_truth", "response_length")} | {
    "queries": "query"
}
# What a column's parameter is given where the row has no such column.
FALLBACKS: dict[str, Callable[[WireSample], object]] = {
    **dict.fromkeys(TRUTHS, FIELDS["ground_truth"]),
    **dict.fromkeys((*SINGULAR, *PLURAL), FIELDS["response"]),
    "data_source": lambda sample: sample["source"],
    "extra_info": lambda sample: {},
}
VERL_COLUMNS = {"data_sources": "data_source", "extra_infos": "extra_info"}
NOT_SERVED = {
    "completion_ids": "r1 passes text; response_lengths has the token counts",
    "prompt_ids": "r1 passes text, in prompts",
    "trainer_state": "ask for step",
    "log_extra": "return a mapping with overall and further numbers",
    "log_metric": "return a mapping with overall and further numbers",
    "environments": "r1 has no environments",
}


@dataclass(frozen=True, slots=True)
class Signature:
    shape: Shape
    wants: tuple[str, ...]
    open_ended: bool  # takes any keyword
    as_messages: bool = False  # TRL: a completion is [{"role": "assistant", "content": …}], not a str

    @property
    def one_by_one(self) -> bool:
        return self.shape in ("sequential", "text")

    @property
    def is_verl(self) -> bool:
        return any(name in self.wants for names in VERL_RESPONSES.items() for name in names)


def read_signature(
    function: Callable[..., object],
    kwargs: Mapping[str, object],
    *,
    reward_type: str | None,
    completions: str | None = None,
    where: str,
) -> Signature:
    """Return how to call `function`, whose module has these REWARD_TYPE and COMPLETIONS (None if absent).

    Raises RewardSpecError for keywords that it does not accept, for parameters that cannot be filled, and if it may
    expect either mappings or texts.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise RewardSpecError(f"{where}: {error}; write a function with `def`") from error
    shape = read_shape(function, parameters, kwargs, reward_type, where)
    named = [p for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_input = shape in ("batch", "sequential")
    if takes_input and named and next(iter(parameters)) == named[0].name:
        del named[0]
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    accepted = [p.name for p in named if p.name not in ("prompts", "responses", "answers", "completions", "queries")]
    for key in kwargs:
        if key not in accepted and not open_ended:
            raise RewardSpecError(f"{where} does not accept reward_function_kwargs.{key}" + suggest(key, accepted))
    wants = [p.name for p in named if p.name not in kwargs and (p.default is p.empty or _is_known(p.name))]
    if shape in ("text", "texts"):
        wants = _wants_of_texts(named, shape, open_ended, kwargs)
    for name in wants:
        if name in NOT_SERVED:
            raise RewardSpecError(f"{where} asks for {name!r}, which there is not: {NOT_SERVED[name]}")
    _check_call(function, shape, {**dict.fromkeys(wants), **kwargs}, where)
    if completions not in (None, "text", "messages"):
        raise RewardSpecError(f"{where}: COMPLETIONS is {completions!r}; it must be 'text' or 'messages'")
    code = code_of(function)  # functions for TRL's message lists name the key "content"
    as_messages = (
        code is not None and "content" in constants(code) if completions is None else completions == "messages"
    )
    return Signature(shape, tuple(wants), open_ended, as_messages and shape == "completions")


def check_columns(wants: Iterable[str], columns: Iterable[str]) -> None:
    columns = list(columns)
    for name in (VERL_COLUMNS.get(name, name) for name in wants):
        if not (_is_known(name) or name in FALLBACKS or name == "completions" or name in columns):
            raise RewardSpecError(
                f"the reward function has a parameter {name!r}, which is no column of the data and not in "
                "reward_function_kwargs" + suggest(name, [*columns, *FIELDS, *PLURALS])
            )


def make_call(
    function: Callable[..., object], signature: Signature, kwargs: Mapping[str, object]
) -> Callable[[Sequence[WireSample]], object]:
    def named(samples: Sequence[WireSample]) -> dict[str, Any]:
        return {name: _values(name, samples, signature) for name in signature.wants}

    def call_batch(samples: Sequence[WireSample]) -> object:
        return function([_reward_input(sample) for sample in samples], **named(samples), **kwargs)

    def call_each(samples: Sequence[WireSample]) -> object:
        return [_call_one(sample) for sample in samples]

    def _call_one(sample: WireSample) -> object:
        single = {name: value if name == "step" else value[0] for name, value in named([sample]).items()}
        first = [_reward_input(sample)] if signature.shape == "sequential" else []
        score = function(*first, **single, **kwargs)
        return _read_verl(score) if signature.is_verl else score

    def call_texts(samples: Sequence[WireSample]) -> object:
        scores = function(**named(samples), **kwargs)
        return [_read_verl(score) for score in scores] if signature.is_verl and isinstance(scores, list) else scores

    def call_columns(samples: Sequence[WireSample]) -> object:
        return function(**named(samples), **kwargs)

    def call_completions(samples: Sequence[WireSample]) -> object:
        arguments = {**_row_columns(samples, signature), **named(samples)} if signature.open_ended else named(samples)
        scores = function(**{**arguments, **kwargs})
        return [0.0 if score is None else score for score in scores] if isinstance(scores, list) else scores

    calls = {"batch": call_batch, "sequential": call_each, "columns": call_columns, "completions": call_completions}
    return {**calls, "text": call_each, "texts": call_texts}[signature.shape]


def _wants_of_texts(
    named: Sequence[inspect.Parameter], shape: Shape, open_ended: bool, kwargs: Mapping[str, object]
) -> list[str]:
    """Return the parameters to fill in a function of texts; all of veRL's, if the response has veRL's name.

    Another library's ground truth that defaults to None or "" is filled, too.
    """
    names = {p.name for p in named}
    has_truth = not names.isdisjoint(("ground_truth", "ground_truths"))
    verl = {name if shape == "text" else f"{name}s" for name in VERL_ARGUMENTS}
    passed = {*SINGULAR, *PLURAL, *verl}
    if open_ended and not names.isdisjoint((*VERL_RESPONSES, *VERL_RESPONSES.values())):
        names |= verl
    defaults = {p.name: p.default for p in named}
    wants = [
        name
        for name, default in defaults.items()
        if default is inspect.Parameter.empty
        or _is_known(name)
        or name in passed
        or (name in TRUTHS and default in (None, "") and not has_truth)
    ]
    return [name for name in (*wants, *sorted(names - set(defaults))) if name not in kwargs]


def _is_known(name: str) -> bool:
    return name in FIELDS or name in PLURALS


def _values(name: str, samples: Sequence[WireSample], signature: Signature) -> object:
    if name == "step":
        return samples[0]["step"]
    if name == "completions":
        texts = [sample["response"] for sample in samples]
        return [[{"role": "assistant", "content": text}] for text in texts] if signature.as_messages else texts
    if name == "prompts" and signature.as_messages:
        return [sample["messages"] or [{"role": "user", "content": sample["prompt"]}] for sample in samples]
    if name == "answers" and signature.shape == "columns":
        return [sample["ground_truth"] for sample in samples]
    field = FIELDS.get(PLURALS.get(name, name))
    return [field(sample) if field else _column(name, sample) for sample in samples]


def _column(name: str, sample: WireSample) -> object:
    columns = sample["metadata"]
    name = VERL_COLUMNS.get(name, name)
    if name in columns:
        return columns[name]
    if name in FALLBACKS:
        return FALLBACKS[name](sample)
    raise LookupError(f"the parameter {name!r} asks for a column that the data row lacks" + suggest(name, columns))


def _row_columns(samples: Sequence[WireSample], signature: Signature) -> dict[str, object]:
    columns = {name: [sample["metadata"].get(name) for sample in samples] for name in samples[0]["metadata"]}
    truths = [sample["ground_truth"] for sample in samples]
    return {"ground_truth": truths, **columns, "prompts": _values("prompts", samples, signature)}


def _reward_input(sample: WireSample) -> dict[str, object]:
    return {
        **sample["metadata"],
        "response": sample["response"],
        "response_length": sample["response_length"],
        "ground_truth": sample["ground_truth"],
    }


def _check_call(function: Callable[..., object], shape: Shape, keywords: Mapping[str, object], where: str) -> None:
    first: list[list[object]] = [[]] if shape in ("batch", "sequential") else []
    try:
        inspect.signature(function).bind(*first, **keywords)
    except TypeError as error:
        called = "one list or mapping first" if first else "keywords only"
        raise RewardSpecError(
            f"{where}: {function_signature(function)} cannot be called with {called} and {sorted(keywords)}: {error}. "
            + ACCEPTED
        ) from error


def _read_verl(score: object) -> object:
    if not isinstance(score, Mapping) or "overall" in score or "score" not in score:
        return score
    numbers = {key: value for key, value in score.items() if isinstance(value, SupportsFloat)}
    return {**numbers, "overall": score["score"]}
