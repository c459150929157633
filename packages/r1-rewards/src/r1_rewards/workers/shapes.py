"""Detect the shape of a user's reward function: mapping or text first, one response or many.

A signature that fits both is refused: a text function that is given a mapping would score 0 without an error.
"""

import dis
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from types import CodeType, FunctionType
from typing import Literal

from r1_rewards.types import RewardSpecError

Shape = Literal["batch", "sequential", "columns", "completions", "text", "texts"]

# Names of the response's text, with those of EasyR1 before 0.3.1 and of veRL, and of lists of them.
RESPONSES = {"response": "responses", "predict": "predicts", "predict_str": "predict_strs"}
VERL_RESPONSES = {"solution_str": "solution_strs"}
VERL_ARGUMENTS = ("data_source", "ground_truth", "extra_info")  # which veRL passes beside the response, by name
SINGULAR = {*RESPONSES, *VERL_RESPONSES}
PLURAL = {*RESPONSES.values(), *VERL_RESPONSES.values()}
FIELD_NAMES = ("prompt", "response", "ground_truth", "response_length", "messages", "images", "metadata", "step")
# Names that functions of other libraries give the ground truth; a column of that name comes first.
TRUTHS = ("answer", "answers", "solution", "label", "labels", "target", "gt", "truth")
# First parameters that can only be reward inputs, and names that a text could have.
_INPUTS = {"reward_input", "item", "row", "example", "record"}
_TEXTS = {
    *SINGULAR,
    *FIELD_NAMES,
    *TRUTHS,
    "text",
    "output",
    "completion",
    "prediction",
    "pred",
    "generation",
    "string",
}

ACCEPTED = (
    "r1 calls f(reward_inputs), and f(reward_input) with REWARD_TYPE = 'sequential', with mappings (EasyR1); "
    "f(response, ground_truth) and f(responses, ground_truths) with texts; "
    "f(data_source, solution_str, ground_truth, extra_info=None) (veRL); f(completions, **columns) (TRL); "
    "f(queries, prompts, labels) (OpenRLHF); f(prompts, responses, answers)"
)


def read_shape(
    function: Callable[..., object],
    parameters: Mapping[str, inspect.Parameter],
    kwargs: Mapping[str, object],
    reward_type: str | None,
    where: str,
) -> Shape:
    """Return the shape of a function whose module has REWARD_TYPE `reward_type` (None if absent).

    Raises RewardSpecError for a function that never sees the response, for one that may expect either a mapping or a
    text, and for one whose parameters contradict `reward_type`.
    """
    if "completions" in parameters:
        return "completions"
    if "queries" in parameters or all(name in parameters for name in ("prompts", "responses", "answers")):
        return "columns"
    text = _text_parameter(function, parameters, kwargs, where)
    if text is None:
        return "sequential" if reward_type == "sequential" else "batch"
    many = "list" in _annotated(text) if _annotated(text) else text.name in PLURAL
    if reward_type not in (None, "batch" if many else "sequential"):
        raise RewardSpecError(
            f"{where}: REWARD_TYPE is {reward_type!r}, but {text} is {'a list' if many else 'one text'}; "
            f"leave REWARD_TYPE out, or make it {'batch' if many else 'sequential'!r}"
        )
    return "texts" if many else "text"


def _text_parameter(
    function: Callable[..., object],
    parameters: Mapping[str, inspect.Parameter],
    kwargs: Mapping[str, object],
    where: str,
) -> inspect.Parameter | None:
    named = [p for p in parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if verl := [p for p in named if _is(p.name, VERL_RESPONSES)]:
        return verl[0]
    first = next((p for p in named if p.kind is not p.KEYWORD_ONLY), None)
    if first and (_annotated(first) == "mapping" or _is(first.name, _INPUTS)):
        return None
    others = [p for p in named if p is not first and p.name not in kwargs]
    required = [p for p in others if p.default is p.empty]
    for parameter in required:
        if _is(parameter.name, RESPONSES):
            return parameter
    if first is None:
        return None  # nothing to call it with, unless it is f(*args): said where the call is checked
    if _is(first.name, RESPONSES) and (_annotated(first) or required or any(_is(p.name, _TEXTS) for p in others)):
        return first
    if not (_annotated(first) or required or _is(first.name, _TEXTS)) or _reads_fields(function):
        return None
    raise RewardSpecError(
        f"{where}: the signature {function_signature(function)} does not tell whether {first.name!r} is the response's "
        "text or a reward input, a mapping. If it is the text, call it 'response', with the annotation ': str' if no "
        "'ground_truth' follows; if it is the mapping, call it 'reward_input', or 'reward_inputs' for a list. "
        + ACCEPTED
    )


def function_signature(function: Callable[..., object]) -> str:
    return f"{getattr(function, '__name__', type(function).__name__)}{inspect.signature(function)}"


def code_of(function: Callable[..., object]) -> CodeType | None:
    """Return the code object that a call runs first."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    call = function if hasattr(function, "__code__") or inspect.isclass(function) else type(function).__call__
    code = getattr(call, "__code__", None)
    return code if isinstance(code, CodeType) else None


def constants(code: CodeType) -> Iterable[object]:
    for constant in code.co_consts:
        yield from constants(constant) if isinstance(constant, CodeType) else (constant,)


def _is(name: str, known: Iterable[str]) -> bool:
    return any(name in (one, f"{one}s") for one in known)


def _annotated(parameter: inspect.Parameter) -> Literal["mapping", "text", "list of texts", ""]:
    if parameter.annotation is parameter.empty:
        return ""
    note = parameter.annotation
    words = set(re.findall(r"\w+", note if isinstance(note, str) else inspect.formatannotation(note)))
    if words & {"dict", "Dict", "Mapping", "RewardInput", "TypedDict"}:
        return "mapping"
    if "str" not in words:
        return ""
    return "list of texts" if words & {"list", "List", "Sequence", "Iterable", "tuple", "Tuple"} else "text"


def _reads_fields(function: Callable[..., object]) -> bool:
    code, surroundings = code_of(function), getattr(inspect.unwrap(function), "__globals__", {})
    waiting, seen = [code] if code else [], set()
    while waiting:
        code = waiting.pop()
        if code in seen:
            continue
        seen.add(code)
        if _reads_field(code):
            return True
        called = [surroundings.get(name) for name in code.co_names]
        waiting += [one.__code__ for one in called if isinstance(one, FunctionType) and one.__globals__ is surroundings]
        waiting += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return False


def _reads_field(code: CodeType) -> bool:
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "PUSH_NULL", "EXTENDED_ARG")]
    return any(
        key.argval in ("response", "ground_truth", "response_length")
        and (before.argval == "get" or after.opname == "BINARY_SUBSCR" or after.argrepr == "[]")
        for before, key, after in zip(steps, steps[1:], steps[2:], strict=False)
    )
