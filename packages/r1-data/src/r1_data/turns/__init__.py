"""Turns behind a prompt: what a chat template does with them, tool calls, and the tokens that an environment adds."""

from r1_data.positions import append_positions
from r1_data.turns.calls.types import ParsedCall
from r1_data.turns.continuation import Continuation
from r1_data.turns.info import TemplateInfo
from r1_data.turns.probe import probe_template
from r1_data.turns.tool_prompt import SourceToolPrompts, ToolPrompt
from r1_data.turns.turn_renderer import TurnRenderer

__all__ = [
    "Continuation",
    "ParsedCall",
    "SourceToolPrompts",
    "TemplateInfo",
    "ToolPrompt",
    "TurnRenderer",
    "append_positions",
    "probe_template",
]
