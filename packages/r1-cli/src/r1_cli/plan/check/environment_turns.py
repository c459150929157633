"""Turns that `r1 env test` plays in the policy's place: scripted, random and hostile ones."""

import random
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from r1_rewards.environments.types import JsonObject, PolicyTurn, ToolCall

Kind = Literal["scripted", "random", "hostile"]
KINDS: tuple[Kind, ...] = ("scripted", "random", "hostile")
_KINDS_IN_TURN: tuple[Kind, ...] = (
    "scripted", "random", "hostile", "scripted", "random",
    "scripted", "random", "hostile", "scripted", "hostile",
)  # fmt: skip

# Texts that chat templates and parsers give a meaning.
CONTROL_TOKENS = (
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|start_header_id|>", "<|image_pad|>",
    "<|vision_start|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>",
    "<start_of_turn>", "<end_of_turn>", "<image>", "[INST]", "</s>",
)  # fmt: skip
HOSTILE: dict[str, str] = {
    "empty": "",
    "blank": " \n\t ",
    "100,000 characters": "x" * 100_000,
    "100,000 digits": "7" * 100_000,
    "100,000 brackets": "[" * 100_000,
    "control tokens": "".join(CONTROL_TOKENS),
    "control characters": "\x00\x1b[2J\r\x7f",
    "lone surrogate": "a\ud800b",
    "unicode": "½٣Ⅳ😀\u202e\u0301\ufeff∞",
    "half JSON": '{"name": "x", "arguments": {"a": ',
    "code": "__import__('os')._exit(1)",
    "template": "{0.__class__} {{7*7}} %(x)s ${x}",
    "path": "../../../../etc/passwd",
    "not a number": "nan",
    "infinity": "1e999",
    "tower of powers": "9**9**9**9",
}


@dataclass(frozen=True, slots=True)
class EpisodePlan:
    """An episode's row, pictures and turns; the last turn is played again until the episode is over."""

    kind: Kind
    row: Mapping[str, object]
    pictures: Sequence[object]
    turns: Sequence[PolicyTurn]
    name: str  # of a hostile text


def example_rows() -> list[tuple[dict[str, object], list[object]]]:
    """Return four sums, each with a picture of stripes."""
    import PIL.Image

    picture = PIL.Image.new("RGB", (64, 48), (255, 255, 255))
    for left in range(0, 64, 16):
        picture.paste((left * 3, 80, 160), (left, 0, left + 8, 48))
    sums = [("What is 2 + 3?", "5"), ("What is 3 · 4?", "12"), ("Half of 5?", "2.5"), ("What is 2 - 9?", "-7")]
    return [({"question": text, "answer": truth, "ground_truth": truth}, [picture]) for text, truth in sums]


def make_plans(
    rows: Sequence[tuple[Mapping[str, object], Sequence[object]]], tools: Sequence[JsonObject], count: int, turns: int
) -> list[EpisodePlan]:
    """Return plans for `count` episodes of at most `turns` turns: two fifths scripted, the rest random and hostile."""
    plans = []
    for number in range(count):
        choose = random.Random(number)
        kind = _KINDS_IN_TURN[number % len(_KINDS_IN_TURN)]
        row, pictures = rows[number % len(rows)]
        name = list(HOSTILE)[(number // 2) % len(HOSTILE)] if kind == "hostile" else ""
        make = _make_calls(tools, choose) if tools else _make_text(row, choose)
        plans.append(EpisodePlan(kind, row, pictures, [make(kind, HOSTILE.get(name, "")) for _ in range(turns)], name))
    return plans


def _make_text(row: Mapping[str, object], choose: random.Random) -> Callable[[Kind, str], PolicyTurn]:
    answer = str(row.get("answer", ""))
    scripted = [answer, f"The answer is \\boxed{{{answer}}}.", f"<answer>{answer}</answer>", "yes", "A"]

    def make(kind: Kind, hostile: str) -> PolicyTurn:
        if kind == "scripted":
            return PolicyTurn(choose.choice([*scripted, str(choose.randint(-10, 100))]))
        return PolicyTurn(hostile if kind == "hostile" else _random_text(choose))

    return make


def _make_calls(tools: Sequence[JsonObject], choose: random.Random) -> Callable[[Kind, str], PolicyTurn]:
    def make(kind: Kind, hostile: str) -> PolicyTurn:
        calls = []
        for number in range(choose.choice((1, 1, 1, 2, 3))):
            function = choose.choice(tools)["function"]
            known = function["parameters"]["properties"]
            needed = function["parameters"].get("required", [])
            names = [name for name in known if name in needed or choose.random() < 0.5]
            if kind == "hostile":
                arguments = {name: _hostile_value(known[name], hostile, choose) for name in names}
                if choose.random() < 0.2:
                    arguments[hostile[:50]] = hostile
            else:
                arguments = {name: _value(known[name], choose, wild=kind == "random") for name in names}
            name = hostile[:50] if kind == "hostile" and choose.random() < 0.1 else function["name"]
            calls.append(ToolCall(name, arguments, str(number)))
        return PolicyTurn(hostile if kind == "hostile" else "", tuple(calls))

    return make


def _value(schema: Mapping[str, Any], choose: random.Random, *, wild: bool) -> Any:
    if "enum" in schema:
        return choose.choice(schema["enum"])
    if "anyOf" in schema:
        return _value(choose.choice(schema["anyOf"]), choose, wild=wild)
    kind = schema.get("type", "string")
    match choose.choice(kind) if isinstance(kind, list) else kind:
        case "integer":
            return choose.randint(-(10**12), 10**12) if wild else choose.randint(0, 10)
        case "number":
            return choose.uniform(-1e9, 1e9) if wild else round(choose.random(), 3)
        case "boolean":
            return choose.random() < 0.5
        case "array":
            items = schema.get("items", {})
            return [_value(items, choose, wild=wild) for _ in range(choose.randint(0, 4))]
        case "object":
            fields = schema.get("properties", {})
            return {name: _value(field, choose, wild=wild) for name, field in fields.items()}
        case "null":
            return None
    return _random_text(choose) if wild else choose.choice(("1 + 1", "tea", "3", "hello world"))


def _hostile_value(schema: Mapping[str, Any], hostile: str, choose: random.Random) -> Any:
    if schema.get("type") == "string":
        return hostile
    return choose.choice([hostile, 10**400, -1, 0, float("nan"), None, [], {}, [[[hostile]]], {"a": hostile}, True])


def _random_text(choose: random.Random) -> str:
    return "".join(choose.choices(string.printable + "éß漢字😀", k=choose.randint(0, 60)))
