"""What published chat templates write around an assistant's message, as read in the templates of TRL 1.16.

With these, `cut` finds the trained text of a rendering of transformers without `r1_data`: messages have words of their
own, a message begins behind the header before its first word, and ends with the ending behind its last.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase
from turn_templates import special_tokenizer

Message = dict[str, Any]


def _call(number: int) -> dict[str, Any]:
    return {
        "type": "function",
        "id": f"call{number:05}",
        "function": {"name": "look", "arguments": {"x": f"value{number}"}},
    }


def _user(number: int) -> Message:
    return {"role": "user", "content": f"Question {number}?"}


def _answer(number: int, **more: Any) -> Message:
    return {"role": "assistant", "content": f"Answer {number}.", **more}


def _calls(*numbers: int, content: str = "") -> Message:
    return {"role": "assistant", "content": content, "tool_calls": [_call(number) for number in numbers]}


def _result(number: int) -> Message:
    return {"role": "tool", "name": "look", "tool_call_id": f"call{number:05}", "content": f"Result {number}."}


_TALK = [_user(1), _answer(1), _user(2)]
CONVERSATIONS: dict[str, list[Message]] = {
    "plain": [*_TALK, _answer(2)],
    "system": [{"role": "system", "content": "Be short."}, *_TALK, _answer(2)],
    **{
        key: [_user(1), _answer(1, **{key: "Thought 1."}), _user(2), _answer(2, **{key: "Thought 2."})]
        for key in ("reasoning_content", "thinking")
    },
    "call": [_user(1), _calls(1), _result(1), _answer(1), _user(2), _answer(2)],
    "late call": [*_TALK, _calls(1), _result(1), _answer(2)],
    "last call": [*_TALK, _calls(1)],
    "two calls": [_user(1), _calls(1), _result(1), _calls(2), _result(2), _answer(2)],
    "parallel calls": [_user(1), _calls(1, 2), _result(1), _result(2), _answer(2)],
    "text and call": [_user(1), _calls(1, content="I look."), _result(1), _answer(1), _user(2), _answer(2)],
}
NO_CALLS = frozenset(name for name in CONVERSATIONS if "call" in name)


@dataclass(frozen=True)
class Markers:
    """How a template writes an assistant's message."""

    header: str  # what a generation prompt ends with
    endings: Sequence[str]
    opens: str = ""  # what a generation prompt writes behind its header; a message may begin alike
    behind_result: str = ""  # what a generation prompt ends with behind a tool's result, if it is not the header
    refused: frozenset[str] = frozenset()  # conversations that it cannot write, or of which it drops a call
    parts: bool = False  # reads contents as lists of parts only
    arguments_as_text: bool = False  # and no content beside calls


_HEADER, _IM_END, _THINK = "<|im_start|>assistant\n", ("<|im_end|>",), "<think>\n"
_IM, _IM_NO_CALLS = Markers(_HEADER, _IM_END), Markers(_HEADER, _IM_END, refused=NO_CALLS)
_IM_THINK = Markers(_HEADER, _IM_END, _THINK)
_GEMMA = "<start_of_turn>model\n", ("<end_of_turn>",)
# A call and its results are one turn, which the next message goes on with. A text beside a call stands behind the
# results, where no model wrote it.
_GEMMA4 = Markers(
    "<|turn>model\n",
    ("<turn|>", "<|tool_response>"),
    behind_result="<tool_response|>",
    refused=frozenset({"text and call"}),
)
_LLAMA = "<|start_header_id|>assistant<|end_header_id|>\n\n", ("<|eot_id|>",)
_PARTS = Markers("Assistant:", ("<end_of_utterance>",), refused=NO_CALLS, parts=True)
_PHI = Markers("<|assistant|>\n", ("<|end|>",), refused=NO_CALLS)
_DEEPSEEK = "<｜Assistant｜>", "<｜end▁of▁sentence｜>"
_DEEPSEEK_RESULT = {"behind_result": "<｜tool▁outputs▁end｜>", "arguments_as_text": True}

MARKERS: dict[str, Markers] = {
    "cohere": Markers("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", ("<|END_OF_TURN_TOKEN|>",), refused=NO_CALLS),
    "cohere2": Markers(
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>",
        ("<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",),
        refused=NO_CALLS,
    ),
    "deepseek_r1_distill": Markers(
        _DEEPSEEK[0],
        # Only behind the second call of a message it writes what ends a turn.
        (_DEEPSEEK[1], "<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>", "<｜tool▁call▁end｜>"),
        _THINK,
        refused=frozenset({"two calls", "text and call"}),
        **_DEEPSEEK_RESULT,
    ),
    "deepseekv3": Markers(_DEEPSEEK[0], (_DEEPSEEK[1],), _THINK, refused=frozenset({"two calls"}), **_DEEPSEEK_RESULT),
    "diffusion_gemma": _GEMMA4,
    "gemma": Markers(*_GEMMA, refused=NO_CALLS | {"system"}),
    "gemma3": Markers(*_GEMMA, refused=NO_CALLS),
    "gemma4": _GEMMA4,
    "gemma4_v2": Markers("<|turn>model\n", ("<turn|>",)),
    "gemma4_v3": _GEMMA4,
    "gemma4_v4": _GEMMA4,
    "gemma4_v5": _GEMMA4,
    # What ends a turn is the next one's role. Behind the last there is none.
    "glm4moe": Markers("<|assistant|>", ("<|user|>", "<|observation|>")),
    "gptoss": Markers(
        "<|start|>assistant", ("<|end|>", "<|return|>", "<|call|>"), refused=frozenset({"parallel calls"})
    ),
    "idefics3": _PARTS,
    "lfm2": _IM_NO_CALLS,
    "lfm2_2_5": _IM,
    "lfm2_2_5_v2": _IM,
    "lfm2_2_5_vl": _IM,
    "lfm2_v2": _IM,
    "llama3": Markers(*_LLAMA, refused=NO_CALLS),
    "llama3_1": Markers(*_LLAMA, refused=frozenset({"parallel calls"})),
    "llama3_2": Markers(*_LLAMA, refused=frozenset({"parallel calls"})),
    "llava_next": Markers(" [/INST]", ("</s>",), refused=NO_CALLS, parts=True),  # it has no generation prompt
    "muse_glimmer": Markers("<|start|>assistant", ("<|eot|>", "<|eom|>")),
    "nemotron_3_5_lightning": _IM_THINK,
    "nemotron_3_nano": _IM_THINK,
    "nemotron_3_super": _IM_THINK,
    "nemotron_3_ultra": _IM_THINK,
    "phi3": _PHI,
    "phi3_5": _PHI,
    "qwen2_5": _IM,
    "qwen2_5_vl": _IM_NO_CALLS,
    "qwen3": _IM,
    "qwen3_5_nothink": Markers(_HEADER, _IM_END, "<think>\n\n</think>\n\n"),
    "qwen3_5_think": _IM_THINK,
    "qwen3_6": _IM_THINK,
    "qwen3_8": _IM_THINK,
    "qwen3_instruct_2507": _IM,
    "qwen3_vl": _IM,
    "smolvlm": _PARTS,
}


def render(tokenizer: PreTrainedTokenizerBase, template: str, messages: Sequence[Message], markers: Markers) -> str:
    """Render with transformers alone, each message in the form that the template reads."""
    written = [_in_form(message, markers) for message in messages]
    text = tokenizer.apply_chat_template(written, chat_template=template, tokenize=False)
    assert isinstance(text, str)
    return text


def _in_form(message: Message, markers: Markers) -> Message:
    if markers.parts:
        return {**message, "content": [{"type": "text", "text": message["content"]}]}
    if not markers.arguments_as_text or "tool_calls" not in message:
        return message
    functions = [
        {"name": "look", "arguments": f'{{"x": "{call["function"]["arguments"]["x"]}"}}'}
        for call in message["tool_calls"]
    ]
    calls = [{**call, "function": function} for call, function in zip(message["tool_calls"], functions, strict=True)]
    return {**message, "content": message["content"] or None, "tool_calls": calls}


def cut(text: str, messages: Sequence[Message], markers: Markers) -> Iterator[tuple[str, bool]]:
    """Yield the trained text of each of the assistant's messages, and whether an ending stands behind it."""
    behind = 0
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        calls = [call["function"]["arguments"]["x"] for call in message.get("tool_calls", ())]
        words = [message.get("reasoning_content"), message.get("thinking"), message["content"], *calls]
        places = {word: text.index(word, behind) for word in words if word and word in text[behind:]}
        last = places[(calls or [message["content"]])[-1]]
        header = (index and messages[index - 1]["role"] == "tool" and markers.behind_result) or markers.header
        start = text.rindex(header, 0, min(places.values())) + len(header)
        for unit in re.findall(r"<[^>]+>|\n", markers.opens):
            if not text.startswith(unit, start):
                break
            start += len(unit)
        ends = [(place, len(one)) for one in markers.endings if (place := text.find(one, last)) >= 0]
        place, length = min(ends, key=lambda end: (end[0], -end[1]), default=(len(text.rstrip()), 0))
        behind = place + length
        yield text[start:behind], bool(length)


# --- the templates --------------------------------------------------------------------------------------------------

# Tags that structure a text, but are no special tokens.
_TAG = re.compile(
    r"</?(think|tools?|tool_call|tool_response|available_tools|arg_key|arg_value|IMPORTANT)>|<.*[=|]join.*>"
)
_TOKEN = re.compile(r"<\|?[^<>\s'\"{}%+=]+\|?>|\[/?[A-Z_]+\]|<｜[^｜]+｜>")


def templates() -> dict[str, str]:
    spec = find_spec("trl")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "chat_templates"
    texts = {path.stem: path.read_text() for path in sorted(folder.glob("*.jinja"))}
    return {name: text for name, text in texts.items() if not name.endswith("_training")}


def tokenizer_of(template: str) -> PreTrainedTokenizerBase:
    tokens = {token for token in _TOKEN.findall(template) if not _TAG.fullmatch(token)}
    return special_tokenizer({*tokens, "<s>", "</s>"})
