"""What a chat template does with turns, tools and pictures, as `probe_template` found it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Results = Literal["message", "call", "user"]


@dataclass(frozen=True, slots=True)
class TemplateInfo:
    """What the chat template of a run does behind an assistant's turn."""

    # What ends a turn, per role of the message behind it. They differ where the next role's token ends a turn (GLM-4).
    end_tokens: tuple[str, ...]
    end_token_ids: tuple[int, ...]
    before_user: str  # from the end of a turn to a user's text
    before_tool: str  # from the end of a turn to the text of a tool's result; "" if `results` is "user"
    # How a tool's result is written: as the template's tool message; behind the call that it belongs to, by the
    # difference of two renderings; or as a user message in <tool_response>, because the template ignores tool messages.
    results: Results
    call_end: str  # with `results` "call": what ends a call in the template, up to where the result begins
    shows_tools: bool  # whether the template writes the schemas that it is given
    reads_tools_later: bool  # whether what it writes behind a turn depends on the schemas
    call_format: str  # the format of `r1_data.turns.calls` that reads a call as the template writes it; "" if none does
    writes_calls: bool
    tool_pictures: bool  # whether a picture in a tool message leaves one placeholder
    user_pictures: bool
    content_parts: bool  # texts must be given as parts; the template ignores a content that is a string
    reads_system: bool  # whether it writes a system message
    prefill: str  # what the generation prompt begins of the turn: "<think>\n", or ""
    keeps_tool: bool  # whether a turn stays as it was sampled when a tool's result follows
    keeps_user: bool  # … when a user's message follows
    keeps_thoughts: bool  # … when a user's message follows a turn with <think>

    def lines(self) -> list[str]:
        """Return one line a fact, for `r1 check`."""
        return list(self._lines())

    def describe_forks(self, *, after_user: bool) -> str:
        """Return when the template changes a turn that was sampled: behind users' messages, or else results."""
        if not after_user:
            return "no turn forks" if self.keeps_tool else "every turn forks, as the template changes it"
        if not self.keeps_user:
            return "every turn forks, as the template changes it"
        return "no turn forks" if self.keeps_thoughts else "every turn with <think> forks, as the template changes it"

    def _lines(self) -> Iterator[str]:
        yield f"a turn ends with {' or '.join(self.end_tokens)}; before a user's text stands {self.before_user!r}"
        if self.results == "message":
            yield f"tool results are the template's tool messages; before one's text stands {self.before_tool!r}"
        elif self.results == "call":
            yield f"tool results are written behind their calls; before one's text stands {self.before_tool!r}"
        else:
            yield "the template ignores tool messages: results are user messages in <tool_response>"
        if self.shows_tools:
            yield "the template shows the tools' schemas"
        else:
            where = "system message" if self.reads_system else "first user message"
            yield f"the template ignores tools: r1 writes their schemas into the {where}"
        if self.call_format:
            yield f"calls are written as {self.call_format}"
        elif self.writes_calls:
            yield "no format of r1 reads the calls that the template writes: multi_turn.format must name one"
        else:
            yield "the template writes no calls: hermes is used unless multi_turn.format names another"
        if self.user_pictures or self.tool_pictures:
            where = "tool messages" if self.tool_pictures else "user messages in <tool_response>"
            yield f"pictures of tools stand in {where}"
        if self.prefill:
            yield f"the generation prompt begins each turn with {self.prefill!r}"
        kept = {"a tool": self.keeps_tool, "a user": self.keeps_user, "a user, after <think>,": self.keeps_thoughts}
        lost = [who for who, stays in kept.items() if not stays]
        if lost:
            yield (
                f"when {' or '.join(lost)} answers, the template changes the turn before; multi_turn.history decides "
                "whether the policy sees it as sampled (sampled) or changed (template, a new sample)"
            )
        else:
            yield "the template keeps turns as they were sampled"
