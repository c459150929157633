"""Preference rows: split two answers from the messages that both follow."""

import re
from typing import NamedTuple

from r1_data.cells import brief
from r1_data.conversations.turns import require_answers
from r1_data.markers import Cells, count_markers
from r1_data.types import BadPair, Message

_TRANSCRIPT = re.compile(r"(?:^|\n\n)(Human|Assistant):")  # of Anthropic's HH-RLHF


class Ending(NamedTuple):
    messages: list[Message]
    embedded: Cells  # the media of its parts

    @property
    def whole(self) -> bool:
        """Whether the messages begin before the answer."""
        return bool(self.messages) and self.messages[0]["role"] != "assistant"


def join_ending(prompt: list[Message], embedded: Cells, ending: Ending) -> tuple[list[Message], Cells, list[Message]]:
    """Return prompt, media and answer. The answer's column may hold the prompt, too. Raises BadPair if they differ."""
    if not ending.whole:
        return prompt, {marker: cells + ending.embedded[marker] for marker, cells in embedded.items()}, ending.messages
    _require_same(prompt, ending.messages)
    first = next((i for i, message in enumerate(ending.messages) if message["role"] == "assistant"), None)
    return ending.messages[:first], ending.embedded, ending.messages[first:] if first else []


def split_pair(
    prompt: list[Message], embedded: Cells, chosen: Ending, rejected: Ending
) -> tuple[list[Message], Cells, list[Message], list[Message]]:
    """Return the messages before the answers, their media, and both answers.

    If the two hold the prompt, too, it is what both begin with. Raises BadPair, and NoAnswer if one is empty.
    """
    for name, ending in (("chosen", chosen), ("rejected", rejected)):
        require_answers(ending.messages, name)
    if chosen.messages == rejected.messages and chosen.embedded == rejected.embedded:
        raise BadPair("chosen and rejected are equal, so that there is nothing to prefer; remove the row")
    if chosen.whole != rejected.whole:
        raise BadPair("one of chosen and rejected begins with the prompt, the other does not; write both alike")
    if chosen.whole:
        prompt, embedded, chosen, rejected = _split_common(prompt, chosen, rejected)
    elif not prompt:
        raise BadPair("chosen and rejected are answers, but the row has no prompt; data.prompt_key names its column")
    for name, ending in (("chosen", chosen), ("rejected", rejected)):
        if any(ending.embedded.values()):
            raise BadPair(f"{name} holds pictures or videos; in a pair they can only stand in the prompt")
    return prompt, embedded, chosen.messages, rejected.messages


def _split_common(
    prompt: list[Message], chosen: Ending, rejected: Ending
) -> tuple[list[Message], Cells, Ending, Ending]:
    both = enumerate(zip(chosen.messages, rejected.messages, strict=False))
    length = next((index for index, (one, other) in both if one != other), len(chosen.messages))
    common, endings = chosen.messages[:length], (chosen.messages[length:], rejected.messages[length:])
    if not common or not all(ending and ending[0]["role"] == "assistant" for ending in endings):
        raise BadPair("chosen and rejected have different prompts: both must answer the same messages")
    _require_same(prompt, common)
    (embedded, chosen_cells), (other, rejected_cells) = (
        _split_media(ending.embedded, common) for ending in (chosen, rejected)
    )
    if embedded != other:
        raise BadPair("chosen and rejected have different pictures or videos in their prompts; they must have the same")
    return common, embedded, Ending(endings[0], chosen_cells), Ending(endings[1], rejected_cells)


def _split_media(embedded: Cells, common: list[Message]) -> tuple[Cells, Cells]:
    counts = count_markers(common)
    first = {marker: cells[: counts.get(marker, len(cells))] for marker, cells in embedded.items()}
    return first, {marker: cells[counts.get(marker, len(cells)) :] for marker, cells in embedded.items()}


def _require_same(prompt: list[Message], messages: list[Message]) -> None:
    texts = [message["content"].strip() for message in messages]
    if other := next((message for message in prompt if message["content"].strip() not in texts), None):
        raise BadPair(
            f"the prompt's column says {brief(other['content'])}, but the answer's column begins with another prompt; "
            "remove one of the two"
        )


def split_texts(chosen: str, rejected: str) -> tuple[str | list[Message], str | list[Message], str]:
    """Return chosen, rejected and prompt of two texts without a prompt of its own.

    Transcripts of `Human:` and `Assistant:` become messages. Of other texts the prompt is their common beginning, to
    the last space. Raises BadPair if they have none.
    """
    if all(_TRANSCRIPT.match(text) for text in (chosen, rejected)):
        return _read_transcript(chosen), _read_transcript(rejected), ""
    pairs = zip(chosen, rejected, strict=False)
    shortest = min(len(chosen), len(rejected))
    length = next((index for index, (one, other) in enumerate(pairs) if one != other), shortest)
    prompt = re.sub(r"\S*$", "", chosen[:length])
    if not prompt.strip():
        raise BadPair("chosen and rejected are texts without a common beginning, and the row has no prompt")
    return chosen[len(prompt) :], rejected[len(prompt) :], prompt.rstrip()


def _read_transcript(text: str) -> list[Message]:
    roles = {"Human": "user", "Assistant": "assistant"}
    parts = _TRANSCRIPT.split(text)[1:]
    return [
        {"role": roles[name], "content": content.strip()} for name, content in zip(parts[::2], parts[1::2], strict=True)
    ]
