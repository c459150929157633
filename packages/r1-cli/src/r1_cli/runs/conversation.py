"""An episode's record as a conversation: turns with their texts, pictures and calls."""

import json
from collections.abc import Iterator

from r1_cli.runs.history import JsonObject
from r1_cli.runs.reader import Row
from r1_cli.runs.rendered import place_media, split_messages


def read_turns(row: Row) -> list[JsonObject] | None:
    """Return the turns of an episode, or None for a single answer.

    A turn has `role`, `begin`, `end`, `reward`, `calls` as recorded, `speaker`: the role of its first message, and
    `parts`: {"text": TEXT}, or {"media": NAME} for a picture, whose name is None if the policy has not seen it or it
    was not recorded.
    """
    if not row.get("turns"):
        return None
    messages = [json.loads(turn["messages"]) for turn in row["turns"]]
    names = iter(_split_media(row)[1])
    return [
        {
            **{name: turn[name] for name in ("role", "begin", "end", "reward")},
            "calls": turn["calls"] or [],
            "speaker": told[0]["role"] if told else turn["role"],
            "parts": [
                {"text": text} if text is not None else {"media": next(names, None) if _was_read(turn) else None}
                for text in _texts(told)
            ],
        }
        for turn, told in zip(row["turns"], messages, strict=True)
    ]


def seen_messages(row: Row) -> tuple[list[JsonObject], list[str]]:
    """Return the messages of an episode that the policy wrote or read, and the files of their pictures, in order."""
    turns = [turn for turn in row.get("turns") or () if turn["role"] == "assistant" or _was_read(turn)]
    return [message for turn in turns for message in json.loads(turn["messages"])], _split_media(row)[1]


def read_prompt(row: Row) -> list[JsonObject]:
    """Return the rendered prompt of a row as messages {"role", "parts"}, with pictures where they stand."""
    return place_media(split_messages(row["prompt"] or ""), prompt_media(row))


def prompt_media(row: Row) -> list[str]:
    """Return the files of the pictures that stand in the prompt."""
    return _split_media(row)[0]


def write_turns(row: Row) -> list[tuple[str, str]]:
    """Return an episode as (role, text) pairs: calls with arguments and seconds, pictures as `[picture]`."""
    found = []
    for turn in read_turns(row) or ():
        lines = [describe_call(call) for call in turn["calls"]]
        lines += [part.get("text") or "[picture]" for part in turn["parts"] if part.get("text") != ""]
        lines += [f"[reward {turn['reward']:g}]"] if turn["reward"] else []
        found.append((turn["role"], "\n".join(lines)))
    return found


def describe_call(call: JsonObject) -> str:
    """Return a call in one line: tool, arguments, seconds, error."""
    arguments = "" if call["arguments"] in ("", "{}") else f" {call['arguments']}"
    left_out = f", {call['truncated']:,} characters left out" if call["truncated"] else ""
    cause = f" ({call['cause']})" if call.get("cause") else ""  # which older records lack
    error = f", failed{cause}: {call['error']}" if call["error"] else ""
    return f"[{call['tool']}{arguments}: {call['seconds']:.3g} s{left_out}{error}]"


def _split_media(row: Row) -> tuple[list[str], list[str]]:
    """Return the media of the prompt, and the pictures behind it, which come last."""
    media = list(row.get("media") or ())
    later = sum(
        text is None
        for turn in row.get("turns") or ()
        if _was_read(turn)
        for text in _texts(json.loads(turn["messages"]))
    )
    start = len(media) - later
    return (media[:start], media[start:]) if start >= 0 else (media, [])


def _was_read(turn: JsonObject) -> bool:
    """Whether a turn's tokens are in the context; an episode's last answer may have none."""
    return bool(turn["end"] > turn["begin"])


def _texts(messages: list[JsonObject]) -> Iterator[str | None]:
    """Yield the texts of messages in order, None for a picture."""
    for message in messages:
        content = message.get("content") or ""
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            yield None if part["type"] == "image" else str(part.get("text", ""))
