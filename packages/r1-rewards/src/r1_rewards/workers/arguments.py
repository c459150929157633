"""What a user's function is called with, decided by its shape and its parameters' names. Used in a worker only.

Shapes: `batch` and `sequential` take reward inputs first, `columns` is `f(prompts, responses, answers)` or OpenRLHF's
`f(queries, prompts, labels)`, `completions` is TRL's `f(completions, **columns)`. In all of them further parameters are
filled by name:

- `prompt(s)`, `response(s)`, `ground_truth(s)`, `response_length(s)` (tokens), `messages`, `images` (PIL), `metadata`
  (the row's other columns as a mapping), `queries` (prompt and response), `step`: a list with one entry per
  response, one value where `sequential`; `step` is one number always;
- any other parameter without a default is a column of the data row of that name.

What `reward_function_kwargs` names comes from there.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, Literal

from r1_rewards.spec import RewardSpecError, describe
from r1_rewards.workers.pictures import decode

Shape = Literal["batch", "sequential", "columns", "completions"]
Sample = Mapping[str, Any]  # as it comes over the wire

FIELDS: dict[str, Callable[[Sample], Any]] = {
    "prompt": lambda sample: sample["prompt"],
    "response": lambda sample: sample["response"],
    "ground_truth": lambda sample: sample["ground_truth"],
    "response_length": lambda sample: sample["response_length"],
    "messages": lambda sample: sample["messages"],
    "images": lambda sample: [decode(picture) for picture in sample["images"]],
    "metadata": lambda sample: dict(sample["metadata"]),
    "query": lambda sample: sample["prompt"] + sample["response"],
    "step": lambda sample: sample["step"],
}
PLURALS = {f"{name}s": name for name in ("prompt", "response", "ground_truth", "response_length")} | {
    "queries": "query"
}
# Names that functions of other libraries give the ground truth; a column of that name comes first.
TRUTHS = ("answer", "answers", "solution", "label", "labels", "target")
NOT_SERVED = {
    "completion_ids": "r1 passes text; response_lengths has the token counts",
    "prompt_ids": "r1 passes text, in prompts",
    "trainer_state": "ask for step",
    "log_extra": "return a mapping with overall and further numbers",
    "log_metric": "return a mapping with overall and further numbers",
    "environments": "r1 has no environments",
}
WIRE_KEYS = ("response", "response_length", "ground_truth")


@dataclass(frozen=True, slots=True)
class Signature:
    """How a function wants to be called; `wants` are the parameters that are filled by name."""

    shape: Shape
    wants: tuple[str, ...]
    open_ended: bool  # takes any keyword
    as_messages: bool = False  # TRL: a completion is [{"role": "assistant", "content": …}], not a str


def read_signature(
    function: Callable[..., Any],
    kwargs: Mapping[str, Any],
    *,
    sequential: bool,
    completions: str | None = None,
    where: str,
) -> Signature:
    """Find out how to call `function`; `completions` is the module's COMPLETIONS ("text" or "messages"), if it has one.

    Raises RewardSpecError for keywords that it does not take, and for parameters that nothing can fill.
    """
    parameters = inspect.signature(function).parameters
    shape = _shape(parameters, sequential)
    named = [p for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    rest = named if shape in ("columns", "completions") else named[1:]
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    accepted = [p.name for p in rest if p.name not in ("prompts", "responses", "answers", "completions", "queries")]
    for key in kwargs:
        if key not in accepted and not open_ended:
            raise RewardSpecError(f"{where} does not accept reward_function_kwargs.{key}" + describe(key, accepted))
    wants = [p.name for p in rest if p.name not in kwargs and (p.default is p.empty or _is_known(p.name))]
    for name in wants:
        if name in NOT_SERVED:
            raise RewardSpecError(f"{where} asks for {name!r}, which there is not: {NOT_SERVED[name]}")
    _check_call(function, shape, {**dict.fromkeys(wants), **kwargs}, where)
    if completions not in (None, "text", "messages"):
        raise RewardSpecError(f"{where}: COMPLETIONS is {completions!r}; it must be 'text' or 'messages'")
    as_messages = _reads_content(function) if completions is None else completions == "messages"
    return Signature(shape, tuple(wants), open_ended, as_messages and shape == "completions")


def check_columns(wants: Iterable[str], columns: Iterable[str]) -> None:
    """Raise RewardSpecError, with the nearest name, if a function wants what rows with these columns do not have."""
    columns = list(columns)
    for name in wants:
        if not (_is_known(name) or name in TRUTHS or name == "completions" or name in columns):
            raise RewardSpecError(
                f"the reward function has a parameter {name!r}, which is no column of the data and not in "
                "reward_function_kwargs" + describe(name, [*columns, *FIELDS, *PLURALS])
            )


def make_call(
    function: Callable[..., Any], signature: Signature, kwargs: Mapping[str, Any]
) -> Callable[[Sequence[Sample]], Any]:
    """Return what turns samples into the function's raw scores."""

    def named(samples: Sequence[Sample]) -> dict[str, Any]:
        return {name: _values(name, samples, signature) for name in signature.wants}

    def call_batch(samples: Sequence[Sample]) -> Any:
        return function([_reward_input(sample) for sample in samples], **named(samples), **kwargs)

    def call_each(samples: Sequence[Sample]) -> Any:
        return [_call_one(sample) for sample in samples]

    def _call_one(sample: Sample) -> Any:
        single = {name: value if name == "step" else value[0] for name, value in named([sample]).items()}
        return function(_reward_input(sample), **single, **kwargs)

    def call_columns(samples: Sequence[Sample]) -> Any:
        return function(**named(samples), **kwargs)

    def call_completions(samples: Sequence[Sample]) -> Any:
        arguments = {**_row_columns(samples, signature), **named(samples)} if signature.open_ended else named(samples)
        scores = function(**{**arguments, **kwargs})
        return [0.0 if score is None else score for score in scores] if isinstance(scores, list) else scores

    calls = {"batch": call_batch, "sequential": call_each, "columns": call_columns, "completions": call_completions}
    return calls[signature.shape]


def _shape(parameters: Mapping[str, inspect.Parameter], sequential: bool) -> Shape:
    if "completions" in parameters:
        return "completions"
    if "queries" in parameters or all(name in parameters for name in ("prompts", "responses", "answers")):
        return "columns"
    return "sequential" if sequential else "batch"


def _is_known(name: str) -> bool:
    return name in FIELDS or name in PLURALS


def _values(name: str, samples: Sequence[Sample], signature: Signature) -> Any:
    """Return what the parameter `name` gets: one entry per sample, except the step."""
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


def _column(name: str, sample: Sample) -> Any:
    columns = sample["metadata"]
    if name in columns:
        return columns[name]
    if name in TRUTHS:
        return sample["ground_truth"]
    raise LookupError(f"the parameter {name!r} asks for a column that the data row lacks" + describe(name, columns))


def _row_columns(samples: Sequence[Sample], signature: Signature) -> dict[str, Any]:
    """Return what TRL passes to every function, asked for or not: the prompts and all columns."""
    columns = {name: [sample["metadata"].get(name) for sample in samples] for name in samples[0]["metadata"]}
    truths = [sample["ground_truth"] for sample in samples]
    return {"ground_truth": truths, **columns, "prompts": _values("prompts", samples, signature)}


def _reward_input(sample: Sample) -> dict[str, Any]:
    return {**sample["metadata"], **{key: sample[key] for key in WIRE_KEYS}}


def _check_call(function: Callable[..., Any], shape: Shape, keywords: Mapping[str, Any], where: str) -> None:
    first: list[list[Any]] = [[]] if shape in ("batch", "sequential") else []
    try:
        inspect.signature(function).bind(*first, **keywords)
    except TypeError as error:
        called = "one list or mapping first" if first else "keywords only"
        raise RewardSpecError(f"{where}: {error}; it is called with {called} and {sorted(keywords)}") from error


def _reads_content(function: Callable[..., Any]) -> bool:
    """Whether the function's code names the key "content", as functions for TRL's message lists do."""

    def constants(code: CodeType) -> Iterable[Any]:
        for constant in code.co_consts:
            yield from constants(constant) if isinstance(constant, CodeType) else (constant,)

    code = getattr(inspect.unwrap(function), "__code__", None)
    return code is not None and "content" in constants(code)
