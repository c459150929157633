"""Score only the form of a response: think and answer tags, a box, a regular expression, or a JSON schema."""

import json
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Literal

from r1_rewards.reading import extract
from r1_rewards.types import Score

TRUTH_IS_ANSWER = False  # it is not looked at

Mode = Literal["r1", "r1_nothink", "r1v", "think", "think_box", "box"]
MISSING = "a JSON schema needs jsonschema: install it with `pip install 'r1-rewards[json]'`"
MAX_JSON = 200_000  # characters

_SPACED_TAG = re.compile(r"<\s{0,8}(/?)\s{0,8}(think|answer)\s{0,8}>")
_FENCE = re.compile(r"```(?:json)?[ \t]{0,8}\n")


def score(
    response: str,
    ground_truth: str = "",
    *,
    mode: Mode | None = None,
    pattern: str | None = None,
    schema: Mapping[str, object] | None = None,
) -> Score:
    r"""Return 1 if the response has the required form, else 0; the ground truth is not read.

    Give one of:

    - `mode` (default "r1"): `r1` is `<think>…</think>…<answer>…</answer>…` with each tag once, from the first character
      on (RLPR, arXiv 2506.18254); `r1_nothink` the same without think tags and with any text before; `r1v` only a think
      block, blanks and an answer block; `think` starts with its only `<think>` and closes it (TRL); `think_box` starts
      with a thought and has a `\boxed{…}` after it (EasyR1; blanks in tags are ignored); `box` is a `\boxed{…}`
      anywhere;
    - `pattern`: a regular expression for the whole response, in which a dot matches a newline. One that backtracks for
      ever runs into the deadline of `load`;
    - `schema`: a JSON schema (extra `json`) for the response, its last fenced block, or its `<answer>`.

    Example: `score("<think>1+1</think> <answer>2</answer>").value` is 1.0. Raises ValueError for an unknown mode, an
    invalid pattern or schema, and more than one of the three; ImportError without jsonschema.
    """
    if sum(option is not None for option in (mode, pattern, schema)) > 1:
        raise ValueError("give one of mode, pattern and schema")
    if pattern is not None:
        good = _compiled(pattern).fullmatch(response) is not None
    elif schema is not None:
        good = fits_schema(response, schema)
    else:
        good = _check(mode or "r1")(response)
    return Score(float(good), {"overall": float(good), "format": float(good)})


def has_r1(response: str) -> bool:
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    return response.startswith("<think>") and _once_in_order(response, tags)


def has_r1_nothink(response: str) -> bool:
    return _once_in_order(response, ("<answer>", "</answer>"))


def has_r1v(response: str) -> bool:
    """Whether the whole response is a think block, optional blanks and an answer block.

    Nothing may precede or follow, not even a newline; the blocks may repeat inside. Linear in the length.
    """
    if not response.startswith("<think>") or not response.endswith("</answer>"):
        return False
    position = len("<think>")
    last_start = len(response) - len("<answer></answer>")
    while (close := response.find("</think>", position)) >= 0:
        position = close + len("</think>")
        while position <= last_start and response[position].isspace():
            position += 1
        if response.startswith("<answer>", position) and position <= last_start:
            return True
    return False


def has_think(response: str) -> bool:
    """Whether a response starts with its only `<think>` and closes it (TRL's `think_format_reward`)."""
    return response.startswith("<think>") and response.count("<think>") == 1 and "</think>" in response


def has_think_box(response: str) -> bool:
    thought_end = response.find("</think>", len("<think>")) if response.startswith("<think>") else -1
    box = response.find(r"\boxed{", thought_end) if thought_end >= 0 else -1
    return box >= 0 and response.find("}", box) >= 0


def has_box(response: str) -> bool:
    return extract.boxed(response) is not None


def unspaced_tags(response: str) -> str:
    return _SPACED_TAG.sub(r"<\1\2>", response)


def fits_schema(response: str, schema: Mapping[str, object]) -> bool:
    """Whether the response, its `<answer>` or its last fenced block is JSON of this schema; NaN is not JSON."""
    try:
        value = json.loads(_json_text(response), parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return bool(_validator(json.dumps(schema, sort_keys=True)).is_valid(value))


def _json_text(response: str) -> str:
    text = response[-MAX_JSON:]
    extracted = extract.tagged(text)
    text = text if extracted is None else extracted
    fences = [match.end() for match in _FENCE.finditer(text)]
    end = text.rfind("```")
    starts = [start for start in fences if start <= end]
    return text[starts[-1] : end] if starts else text


def _refuse(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _once_in_order(text: str, tags: tuple[str, ...]) -> bool:
    places = [text.find(tag) for tag in tags]
    return all(text.count(tag) == 1 for tag in tags) and places == sorted(places)


def _check(mode: str) -> Callable[[str], bool]:
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}; it must be one of {', '.join(MODES)}")
    return MODES[mode]


@lru_cache(maxsize=16)
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"pattern {pattern!r} is not a regular expression: {error}") from error


@lru_cache(maxsize=16)
def _validator(schema: str) -> Any:
    try:
        import jsonschema
    except ModuleNotFoundError as error:
        raise ImportError(MISSING) from error
    parsed = json.loads(schema)
    validator = jsonschema.validators.validator_for(parsed)
    try:
        validator.check_schema(parsed)
    except jsonschema.SchemaError as error:
        raise ValueError(f"schema: {error.message}") from error
    return validator(parsed)


MODES: dict[str, Callable[[str], bool]] = {
    "r1": has_r1,
    "r1_nothink": has_r1_nothink,
    "r1v": has_r1v,
    "think": has_think,
    "think_box": lambda response: has_think_box(unspaced_tags(response)),
    "box": has_box,
}
