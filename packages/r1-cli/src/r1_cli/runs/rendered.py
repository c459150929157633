"""A rendered prompt as messages: the roles that a chat template wrote, and the places of pictures."""

import os
import re
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise

from r1_cli.runs.history import JsonObject

# How chat templates begin a message; the group that matched is its role. Every form is listed once, by its shape.
_BEGINS = re.compile(
    r"<\|im_start\|>[ ]*(\w+)[^\S\n]*\n?"
    r"|<\|(?:start_header_id|header_start)\|>(\w+)<\|(?:end_header_id|header_end)\|>\s*"
    r"|<start_of_turn>(\w+)\n?"
    r"|<\|turn>(\w+)\n?"
    r"|<\|start\|>(\w+)(?:<\|channel\|>\w+)?<\|message\|>"
    r"|<\|START_OF_TURN_TOKEN\|><\|(\w+)_TOKEN\|>"
    r"|<\|im_(system|user|assistant|tool)\|>[^<]*<\|im_middle\|>"
    r"|<\|(system|user|assistant|tool|observation|developer)\|>\n?"
    r"|<[|\uff5c](System|User|Assistant)[|\uff5c]>"
    r"|\[(INST|SYSTEM_PROMPT|TOOL_RESULTS)\] ?"
)
_ENDS = re.compile(
    r"<\|im_end\|>|<\|eot_id\|>|<\|eot\|>|<end_of_turn>|<turn\|>|<\|end\|>|<\|END_OF_TURN_TOKEN\|>"
    r"| ?\[/(?:INST|SYSTEM_PROMPT|TOOL_RESULTS)\]|</s>|<\|endoftext\|>|<\uff5cend\u2581of\u2581sentence\uff5c>"
)
_FIRST = re.compile(
    r"\s*(?:<s>|<bos>|<\|begin_of_text\|>|<\uff5cbegin\u2581of\u2581sentence\uff5c>|\[gMASK\]|<sop>)+\s*"
)
# Templates of base models, which have words instead of tokens. They count if both sides are named.
_WORDS = re.compile(r"(?:^|(?<=[\s.]))(System|SYSTEM|Human|USER|User|ASSISTANT|Assistant):[^\S\n]*")
_ROLES = {
    "model": "assistant", "chatbot": "assistant", "inst": "user", "human": "user", "system_prompt": "system",
    "developer": "system", "tool_results": "tool", "observation": "tool", "ipython": "tool", "function": "tool",
}  # fmt: skip
_MEDIUM = r"<\|?/?[\w-]*(?:image|img|vision|video|media)[\w-]*\|?>|\[IMG(?:_BREAK|_END)?\]"
_MEDIA = re.compile(rf"(?:{_MEDIUM})+", re.IGNORECASE)
_SINGLE = re.compile(_MEDIUM, re.IGNORECASE)
_SPECIAL = re.compile(r"<\||\[IMG")  # no text of a row looks like this, so it stands for a picture that was not kept
_BOUNDARY = re.compile(r"[.!?:]\s+|\n\s*")


def split_messages(prompt: str) -> list[tuple[str, str]]:
    """Return the (role, text) of a rendered prompt; without the empty message that the answer continues.

    A prompt in no known form is one message of the role "prompt".
    """
    prompt = prompt[first.end() :] if (first := _FIRST.match(prompt)) else prompt
    begins = [*_BEGINS.finditer(prompt)]
    if not begins:
        words = [*_WORDS.finditer(prompt)]
        begins = words if len({_role(one) for one in words} & {"user", "assistant"}) == 2 else []
    if not begins:
        return [("prompt", prompt)]
    found = [("system", prompt[: begins[0].start()])]
    for begin, end in zip(begins, [*(one.start() for one in begins[1:]), len(prompt)], strict=True):
        text, *behind = _ENDS.split(prompt[begin.end() : end])
        found += [(_role(begin), text), *(("assistant", one) for one in behind)]
    return [(role, text.strip("\n")) for role, text in found if text.strip()]


def _role(begin: re.Match[str]) -> str:
    name = next(group for group in begin.groups() if group).lower()
    return _ROLES.get(name, name)


def place_media(messages: Sequence[tuple[str, str]], media: Sequence[str]) -> list[JsonObject]:
    """Return messages as {"role", "parts"}, with each picture where its placeholder stands.

    Parts are {"text": TEXT} or {"media": NAME}; NAME is None for a placeholder without a file. Files without a
    placeholder stand before the first message of the user.
    """
    unit = _unit([text for _, text in messages], len(media))
    pictures, videos = deque(n for n in media if not n.endswith(".webp")), deque(n for n in media if ".webp" in n)
    found: list[JsonObject] = []
    for role, text in messages:
        parts: list[JsonObject] = []
        end = 0
        for begin, stop, name in unit(text):
            parts += [{"text": text[end:begin]}] if text[end:begin].strip() else []
            files = [videos, pictures] if "video" in name.lower() else [pictures, videos]
            kept = files[0] or files[1]
            parts.append({"media": kept.popleft() if kept else None})
            end = stop
        parts += [{"text": text[end:].lstrip("\n") if end else text[end:]}] if text[end:].strip() or not parts else []
        found.append({"role": role, "parts": parts})
    if left := [{"media": name} for name in (*pictures, *videos)]:
        first = next((one for one in found if one["role"] == "user"), found[0])
        first["parts"] = left + first["parts"]
    return found


class _Runs:
    """Find placeholders: a run of their tokens is one picture, or as many as it has tokens that begin one."""

    def __init__(self, each: bool, plain: bool) -> None:
        self.each, self.plain = each, plain

    def __call__(self, text: str) -> Iterator[tuple[int, int, str]]:
        for run in _MEDIA.finditer(text):
            if not self.plain and not _SPECIAL.match(run[0]):
                continue
            tokens = [*_SINGLE.finditer(run[0])]
            begins = [one for one in tokens if re.search("start|begin", one[0], re.IGNORECASE)] or tokens
            marks = begins if self.each else begins[:1]
            edges = [0, *(one.start() for one in marks[1:]), len(run[0])]
            for begin, end in pairwise(edges):
                yield run.start() + begin, run.start() + end, run[0][begin:end]


def _unit(texts: Sequence[str], count: int) -> _Runs:
    """Return how placeholders are counted, so that there are as many as files if that is possible."""
    for each in (True, False):
        if sum(len([*_Runs(each, True)(text)]) for text in texts) == count:
            return _Runs(each, True)
    return _Runs(each=False, plain=count > 0)


def question(messages: Sequence[tuple[str, str]]) -> str:
    """Return the text of the user's last message, without placeholders of pictures."""
    texts = [text for role, text in messages if role in ("user", "prompt")]
    return _MEDIA.sub(" ", texts[-1] if texts else messages[-1][1] if messages else "").strip()


def common_ends(questions: Sequence[str]) -> tuple[int, int]:
    """Return how many characters all questions begin and end with alike, in whole sentences: a template's words."""
    different = sorted(set(questions))
    if len(different) < 2:
        return 0, 0
    begin = os.path.commonprefix([different[0], different[-1]])
    before = max((one.end() for one in _BOUNDARY.finditer(begin)), default=0)
    end = os.path.commonprefix([one[before:][::-1] for one in different])[::-1]
    boundary = _BOUNDARY.search(end)
    after = len(end) - boundary.end() if boundary else 0
    after = len(end[len(end) - after :].rpartition("?")[2])  # a question that all rows end with is no template's
    if any(not one[before : len(one) - after].strip() for one in different):
        return 0, 0
    return before, after
