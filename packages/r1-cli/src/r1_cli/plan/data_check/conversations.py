"""Check all rows of a fine-tuning run: what cannot be used, what is trained, and which rows validation shares."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

from rich.text import Text

from r1_cli.build.rows import OpenSource
from r1_cli.config import RunConfig
from r1_cli.plan.data_check.examine import SpacedRows, open_all
from r1_cli.plan.data_check.findings import REFUSED, USED, Report
from r1_cli.plan.data_check.page import mark_trained
from r1_cli.train.demonstrations import MOST_LEFT_OUT
from r1_cli.train.types import Progress
from r1_data.conversations.check import (
    ConversationInspector,
    ConversationSource,
    ExaminedConversation,
    examine_conversations,
)
from r1_data.demonstrations import ConversationRenderer
from r1_data.types import DataError
from r1_data.workers import Workers

BEGIN, END = "\x02", "\x03"  # of what is trained, in a text that is to be coloured


class ConversationReport(Report):
    """Results for fine-tuning rows."""

    lengths = "tokens of conversations"

    def __init__(
        self,
        config: RunConfig,
        opened: list[OpenSource],
        training: int,
        renderer: ConversationRenderer,
        *,
        strict: bool = False,
        write: Callable[[dict[str, str]], object] | None = None,
    ) -> None:
        super().__init__(config, opened, training, strict=strict, write=write)
        self.renderer = renderer
        self.bad = Counter[int]()  # rows by source that cannot be used, whatever their length

    def consequence(self, kind: str) -> str:
        if kind in USED or kind in ("cut", "hidden"):
            return ""
        if kind in ("many", "no rows", "unreadable") or (kind == "long" and self.config.data.truncation == "error"):
            return REFUSED
        return "left out (data.truncation=drop)" if kind == "long" else "left out"

    def close(self, *, whole: bool = True) -> None:
        for index, tally in enumerate(self.sources):
            rows, bad = len(tally.opened.rows), self.bad[index]
            if not tally.usable:
                self.add("no rows", f"{tally.opened.source.label}: no row of it can be used")
            elif bad > MOST_LEFT_OUT * rows:
                reason = f"{bad:,} of {rows:,} rows cannot be used, which is more than {MOST_LEFT_OUT:.0%}"
                self.add("many", f"{tally.opened.source.label}: {reason}")

    def add_conversation(self, row: ExaminedConversation) -> None:
        tally, limit = self.sources[row.source], self.config.data.max_length
        if row.tokens:
            tally.tokens[row.tokens] += 1
        kind, reason = row.kind, row.reason
        if not kind and row.tokens > limit:
            kind = "cut" if self.config.data.truncation == "right" else "long"
            reason = f"{row.id}: {row.tokens:,} tokens, data.max_length is {limit:,}"
        if kind:
            self.add(kind, reason, row)
        if kind not in ("", "cut"):
            tally.left_out += self.consequence(kind) != REFUSED
            self.bad[row.source] += kind != "long"
            return
        if row.hidden:
            self.add("hidden", f"{row.id}: the reasoning of {row.hidden} of {row.answers} answers is not shown", row)
        tally.usable += 1
        tally.usable_tokens += min(row.tokens, limit)
        tally.media += row.media
        tally.answers += row.answers
        tally.trained += row.trained
        self._find_twins(row, tally.validation)

    def _find_twins(self, row: ExaminedConversation, validation: bool) -> None:
        earlier = self._asked[validation].setdefault(row.whole, (row.id, None))[0]
        if earlier != row.id:
            self.add("duplicate", f"{row.id}: says what {earlier} says", row)
        if not validation:
            self._asked[False].setdefault(row.prompt, (row.id, None))
        elif trained := self._asked[False].get(row.whole):
            self.add("leak", f"{row.id}: is training row {trained[0]}", row)
        elif trained := self._asked[False].get(row.prompt):
            self.add("leak", f"{row.id}: asks what training row {trained[0]} asks, with another answer", row)

    def examples(self) -> Iterator[tuple[str, Text]]:
        for tally in self.sources:
            for row_id, row in (tally.opened.rows[index] for index in range(len(tally.opened.rows))):
                try:
                    part = self.renderer.survey(tally.opened.conversation_reader(row_id, row))[0]
                except DataError:
                    continue
                yield f"{row_id}, trained text in green", colour(mark_trained(part, str, BEGIN, END))
                break

    def step_line(self) -> str:
        trained = [tally for tally in self.sources if not tally.validation and tally.usable]
        if not trained:
            return ""
        rows = sum(tally.usable for tally in trained)
        size = self.config.worker.actor.global_batch_size
        tokens, own = (
            round(size * sum(counts) / rows)
            for counts in ([tally.usable_tokens for tally in trained], [tally.trained for tally in trained])
        )
        return f"a step of {size:,} rows has about {tokens:,} tokens, of which {own:,} are trained"


def check_conversations(
    config: RunConfig,
    inspector: ConversationInspector,
    workers: Workers | None,
    progress: Progress,
    *,
    strict: bool = False,
    write: Callable[[dict[str, str]], object] | None = None,
    most: int | None = None,
) -> ConversationReport:
    """Examine rows of every source. The arguments are those of `check`."""
    opened, training = open_all(config, config.sft.wanted)
    if most is not None:
        opened = [replace(one, rows=SpacedRows(one.rows, most)) for one in opened]
    report = ConversationReport(config, opened, training, inspector.renderer, strict=strict, write=write)
    sources = [ConversationSource(one.source.label, one.rows, one.conversation_reader) for one in opened]
    total = sum(len(one.rows) for one in opened)
    for row in progress(examine_conversations(sources, inspector, workers), "rows", total):
        report.add_conversation(row)
    report.close()
    return report


def colour(marked: str) -> Text:
    text = Text()
    for piece in marked.split(BEGIN):
        trained, _, rest = piece.rpartition(END)
        text.append(trained, style="green")
        text.append(rest)
    return text
