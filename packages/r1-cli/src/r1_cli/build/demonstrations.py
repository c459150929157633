"""Build the demonstrations of a fine-tuning run: check and mix all sources, and order them."""

import logging
from collections.abc import Sequence
from typing import cast

from r1_cli.build.prompts import Counter
from r1_cli.build.rendering import GIGABYTE
from r1_cli.build.rows import OpenSource
from r1_cli.config import RunConfig
from r1_cli.train.demonstrations import MOST_LEFT_OUT, Demonstrations
from r1_data.dataset import Mixture, PromptDataset, Summary
from r1_data.demonstrations import ConversationDataset, ConversationRenderer
from r1_data.prefetch import PromptMemory
from r1_data.render import Renderer
from r1_data.types import DataError
from r1_data.workers import Workers

log = logging.getLogger("r1")


def build_conversation_renderer(config: RunConfig, renderer: Renderer) -> ConversationRenderer:
    return ConversationRenderer(
        renderer,
        turns=config.sft.turns,
        train_on_prompt=config.sft.train_on_prompt,
        max_length=config.data.max_length,
        truncation=config.data.truncation,
    )


def build_demonstrations(
    config: RunConfig,
    opened: Sequence[OpenSource],
    renderer: ConversationRenderer,
    workers: Workers | None,
    counter: Counter,
) -> Mixture:
    """Check every row, and log how many are left out or cut, and why. `workers` hold `renderer`.

    Raises:
        DataError: names the source: no row can be used, more than 5 % cannot, or rows are too long.
    """
    parts, data = list[PromptDataset](), config.data
    memory = PromptMemory(int(data.media_memory_gb * GIGABYTE))
    for one in opened:
        try:
            part = ConversationDataset(
                one.rows,
                renderer,
                one.conversation_reader,
                bad_rows="skip",
                progress=counter(f"checking {one.source.name}"),
                memory=memory,
                workers=workers,
                known_lengths=data.cache_dir,
            )
        except DataError as error:
            raise DataError(f"{one.source.label}: {error}") from error
        _require_usable(one.source.label, part.summary)
        _log_long(one.source.label, part.summary, data.max_length)
        parts.append(cast(PromptDataset, part))
    return Mixture(parts)


def _log_long(label: str, summary: Summary, limit: int) -> None:
    over = f"of {summary.read} rows are over data.max_length={limit} tokens and"
    if summary.overlong:
        log.warning("%s: %d %s are left out", label, summary.overlong, over)
    if summary.cut:
        log.warning("%s: %d %s are cut: the last answer of each loses its end", label, summary.cut, over)


def as_demonstrations(rows: Mixture | PromptDataset) -> Demonstrations:
    return cast(Demonstrations, rows)


def _require_usable(label: str, summary: Summary) -> None:
    bad = summary.bad
    if not bad:
        return
    message = f"{label}: {len(bad)} of {summary.read} rows cannot be used: {'; '.join(bad[:3])}"
    if not summary.kept or len(bad) > MOST_LEFT_OUT * summary.read:
        raise DataError(f"{message}\n  more than {MOST_LEFT_OUT:.0%}: correct or remove them; r1 data check lists all")
    log.warning("%s; they are left out", message)
