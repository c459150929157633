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
from r1_data.workers import Workers

Write = Callable[[dict[str, str]], object]


def run_check(
    config: RunConfig,
    inspector: Inspector,
    workers: Workers | None,
    progress: Progress,
    *,
    conversations: bool,
    strict: bool,
    write: Write | None,
) -> tuple[Report, ShowRow]:
    if not conversations:
        report = check(config, inspector, workers, progress, strict=strict, write=write)
        return report, prompt_rows(inspector.renderer, workers)
    renderer = build_conversation_renderer(config, inspector.renderer)
    report = check_conversations(config, renderer, progress, strict=strict, write=write)
    return report, conversation_rows(renderer)
