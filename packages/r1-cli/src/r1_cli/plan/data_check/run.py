"""The check of prompts or of fine-tuning rows, from a configuration to its report."""

import json
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from r1_cli.build.demonstrations import build_conversation_renderer
from r1_cli.build.rendering import build_renderer, open_workers
from r1_cli.config import RunConfig
from r1_cli.models.files import open_model
from r1_cli.plan.data_check.conversations import check_conversations
from r1_cli.plan.data_check.examine import check
from r1_cli.plan.data_check.findings import Report
from r1_cli.plan.data_check.page import conversation_rows, prompt_rows, write_page
from r1_cli.plan.data_check.tables import show
from r1_cli.runs.track.console import ConsoleReporter
from r1_data.check import Inspector
from r1_data.conversations.check import ConversationInspector
from r1_data.render import Renderer


def run_check(
    config: RunConfig, console: Console, *, conversations: bool, strict: bool, rows: Path | None, with_page: bool
) -> tuple[Report, str]:
    """Check all rows and print the tables.

    Args:
        conversations: rows are those of `r1 sft`.
        rows: the file that bad rows are written to, one a line.

    Returns:
        The report, and with `with_page` its HTML.

    Raises:
        DataError, ModelError, RewardSpecError: rows, model or reward cannot be read.
    """
    inspector = build_inspector(config, build_renderer(config, open_model(config)), conversations=conversations)
    with ExitStack() as stack:
        reporter = stack.enter_context(ConsoleReporter(console, step_lines=False))
        workers = stack.enter_context(open_workers(config, inspector))
        file = stack.enter_context(rows.open("w", encoding="utf-8")) if rows else None
        write = (lambda found: print(json.dumps(found, ensure_ascii=False), file=file)) if file else None
        if isinstance(inspector, Inspector):
            report = check(config, inspector, workers, reporter.progress, strict=strict, write=write)
            show_row = prompt_rows(inspector.renderer, workers)
        else:
            report = check_conversations(config, inspector, workers, reporter.progress, strict=strict, write=write)
            show_row = conversation_rows(inspector.renderer, workers)
        show(console, report)
        return report, write_page(report, show_row) if with_page else ""


def build_inspector(config: RunConfig, renderer: Renderer, *, conversations: bool) -> Inspector | ConversationInspector:
    if conversations:
        return ConversationInspector(build_conversation_renderer(config, renderer))
    return Inspector(renderer, config.data.max_prompt_length)
