"""What the tests of turns share: messages, and renderers of turns for text and for pictures."""

from typing import Any

from r1_data.render import Renderer
from r1_data.turns import TurnRenderer, probe_template

LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look closer.",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
    },
}
QUESTION = {"role": "user", "content": "How many rows?"}
RESULT = {"role": "tool", "name": "look", "tool_call_id": "call00000", "content": "\nA row.\n"}
ANSWER = {"role": "user", "content": "And now?\n\nA row."}
TURN = "There are 12.\n"
THOUGHT = "I see.\n</think>\n\nThere are 12."
FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]


def turns_of(tokenizer: Any, template: str, **options: Any) -> TurnRenderer:
    renderer = Renderer(tokenizer, chat_template=template)
    return TurnRenderer(renderer, probe_template(renderer), **options)


def plain(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def sampled(turns: TurnRenderer, text: str, end: int = 0) -> list[int]:
    return [*plain(turns.renderer.tokenizer, text), turns.info.end_token_ids[end]]


def picture_turns(processor: Any, template: str, **options: Any) -> TurnRenderer:
    renderer = Renderer(processor, chat_template=template, min_pixels=28 * 28, max_pixels=112 * 112)
    return TurnRenderer(renderer, probe_template(renderer), **options)


def with_pictures(*pictures: Any, role: str = "tool", text: str = "zoomed") -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "image", "image": picture} for picture in pictures]
    return {"role": role, "content": [*parts, {"type": "text", "text": text}]}
