"""The check of prompts or of fine-tuning rows, with its report and how its page shows a row."""

from collections.abc import Callable

from r1_cli.build.demonstrations import build_conversation_renderer
from r1_cli.config import RunConfig
from r1_cli.plan.data_check.conversations import check_conversations
from r1_cli.plan.data_check.examine import check
from r1_cli.plan.data_check.findings import Report
from r1_cli.plan.data_check.page import ShowRow, conversation_rows, prompt_rows
from r1_cli.train.types import Progress
from r1_data.check import Inspector
from r1_data.conversations.check import ConversationInspector
from r1_data.render import Renderer
from r1_data.workers import Workers

Write = Callable[[dict[str, str]], object]


def build_inspector(config: RunConfig, renderer: Renderer, *, conversations: bool) -> Inspector | ConversationInspector:
    if conversations:
        return ConversationInspector(build_conversation_renderer(config, renderer))
    return Inspector(renderer, config.data.max_prompt_length)


def run_check(
    config: RunConfig,
    inspector: Inspector | ConversationInspector,
    workers: Workers | None,
    progress: Progress,
    *,
    strict: bool,
    write: Write | None,
) -> tuple[Report, ShowRow]:
    """Check what the inspector is for. `workers` hold it."""
    if isinstance(inspector, Inspector):
        report = check(config, inspector, workers, progress, strict=strict, write=write)
        return report, prompt_rows(inspector.renderer, workers)
    found = check_conversations(config, inspector, workers, progress, strict=strict, write=write)
    return found, conversation_rows(inspector.renderer, workers)
