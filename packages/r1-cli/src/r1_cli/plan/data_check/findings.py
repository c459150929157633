"""Results of a data check, by source and by kind."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from rich.text import Text

from r1_cli.build.rows import OpenSource
from r1_cli.config import ConfigError, RunConfig
from r1_cli.plan.batches import count_steps
from r1_data.check import Examined
from r1_data.conversations.check import ExaminedConversation

Level = Literal["error", "warning"]
AnyExamined = Examined | ExaminedConversation

SHOWN = 3  # rows that a finding names
BINS = 12  # of the histogram

TITLES = {
    "unreadable": "rows that cannot be read",
    "missing column": "rows without a prompt or answer column",
    "empty": "rows whose prompt or answer is null",
    "blank": "prompts that show nothing",
    "blank answer": "answers of no text",
    "markup": "texts that spell a control token of the model",
    "unread": "columns that are not read, because another is",
    "markers": "markers and media not equal in number",
    "row": "rows that make no prompt",
    "media": "media missing, broken or refused",
    "damage": "media that do not decode, behind a sound header",
    "prompt": "prompts that cannot be rendered",
    "crash": "rows on which a worker process died",
    "overlong": "prompts over data.max_prompt_length",
    "duplicate": "rows that ask what another row of their set asks",
    "contradiction": "rows that ask what another asks, with another answer",
    "leak": "validation rows that are training rows, too",
    "reward": "answers that their own reward gives no credit",
    "no answer": "rows without an answer to train on",
    "roles": "rows whose messages are out of order",
    "pair": "preference rows whose answers cannot be compared",
    "long": "conversations over data.max_length",
    "cut": "conversations over data.max_length, of which the end is cut off (data.truncation=right)",
    "hidden": "conversations of which the chat template drops earlier reasoning; sft.turns=each trains all of it",
    "many": "sources of which too many rows cannot be used",
    "no rows": "sources without rows",
    "batch": "usable rows too few for one batch",
}
REMARKS = {"blank answer", "markup", "unread"}  # what is odd about rows that are usable
WARNINGS = {"duplicate", "contradiction", "leak", "cut", "hidden", *REMARKS}
USED = {*WARNINGS, "reward"}  # rows that a run takes as they are
OF_MEDIA = {"media", "crash", "damage"}  # what `data.bad_rows=skip_media` leaves out
REFUSED = "a run would not start"


@dataclass(slots=True)
class RowIssue:
    """All rows with one kind of problem; the first few are stored."""

    kind: str
    level: Level
    consequence: str  # what a run does with them, "" if it takes them as they are
    count: int = 0
    examples: list[tuple[str, AnyExamined | None]] = field(default_factory=list)  # (what is said, the row)

    def add(self, reason: str, row: AnyExamined | None = None) -> None:
        self.count += 1
        if len(self.examples) < SHOWN:
            self.examples.append((reason, row))


@dataclass(slots=True)
class SourceTally:
    opened: OpenSource
    validation: bool
    usable: int = 0
    left_out: int = 0  # what a run would go without
    media: int = 0
    tokens: Counter[int] = field(default_factory=Counter)  # prompt length -> rows, of all that can be rendered
    usable_tokens: int = 0
    answers: int = 0  # of fine-tuning rows
    trained: int = 0  # tokens of fine-tuning rows

    @property
    def name(self) -> str:
        return self.opened.source.name

    @property
    def mean_tokens(self) -> float:
        return self.usable_tokens / max(1, self.usable)


class Report:
    lengths = "prompt tokens"  # what the histogram counts

    def __init__(
        self,
        config: RunConfig,
        opened: list[OpenSource],
        training: int,
        *,
        strict: bool = False,
        write: Callable[[dict[str, str]], object] | None = None,
    ) -> None:
        """`training` sources come first; `strict`: omitted rows are errors; `write` is called with every bad row."""
        self._write = write
        self.config, self._strict = config, strict
        self.sources = [SourceTally(one, validation=index >= training) for index, one in enumerate(opened)]
        self.findings: dict[str, RowIssue] = {}
        self.ground_truths: dict[tuple[int, str], Examined] = {}  # (source, answer) -> the first such row
        # For training and validation: what is asked -> id and answer of the first such row. Not the rows, which would
        # take twice the memory.
        self._asked: dict[bool, dict[bytes, tuple[str, str | None]]] = {False: {}, True: {}}

    def add(self, kind: str, reason: str, row: AnyExamined | None = None, level: Level | None = None) -> None:
        consequence = self.consequence(kind)
        strict = self._strict or (kind == "damage" and self.config.data.bad_rows == "refuse")
        mild = kind in WARNINGS or (consequence not in ("", REFUSED) and not strict)
        level = level or ("warning" if mild else "error")
        self.findings.setdefault(kind, RowIssue(kind, level, consequence)).add(reason, row)
        if self._write is not None:
            self._write({"level": level, "kind": kind, "row": row.id if row else "", "reason": reason})

    def consequence(self, kind: str) -> str:
        """Return what a run does with rows of a kind, "" if it uses them."""
        data = self.config.data
        if kind in USED:
            return ""
        if kind == "overlong":
            return "left out (data.filter_overlong_prompts=true)" if data.filter_overlong_prompts else REFUSED
        if kind == "damage":  # not seen when a run starts
            return "left out of the steps that they come in"
        left_out = data.bad_rows == "skip" or (data.bad_rows == "skip_media" and kind in OF_MEDIA)
        return f"left out (data.bad_rows={data.bad_rows})" if left_out and kind not in ("no rows", "batch") else REFUSED

    def close(self, *, whole: bool = True) -> None:
        """Add sources without usable rows and, after all rows (`whole`), too few rows for a batch."""
        for tally in self.sources:
            if tally.left_out == len(tally.opened.rows):
                reason = "every row of it would be left out" if tally.left_out else "holds no rows"
                self.add("no rows", f"{tally.opened.source.label}: {reason}")
        usable = [tally.usable for tally in self.sources if not tally.validation]
        if whole and usable and all(usable):
            try:
                count_steps(self.config, usable)
            except ConfigError as error:
                self.add("batch", str(error.problems[-1]))

    def add_row(self, row: Examined) -> None:
        tally = self.sources[row.source]
        if row.tokens is not None:
            tally.tokens[row.tokens] += 1
        tally.media += row.media
        if row.kind:
            self.add(row.kind, row.reason, row)
            tally.left_out += self.consequence(row.kind) not in ("", REFUSED)
        if row.kind and row.kind not in REMARKS:
            return
        tally.usable += 1
        tally.usable_tokens += row.tokens or 0
        self.ground_truths.setdefault((row.source, row.ground_truth or ""), row)
        self._compare(row, tally.validation)

    def _compare(self, row: Examined, validation: bool) -> None:
        own = (row.id, row.ground_truth)
        first, answer = earlier = self._asked[validation].setdefault(row.digest, own)
        if earlier is not own:
            same = answer == row.ground_truth
            also = "" if same else f", but answers {_brief(row.ground_truth)}, not {_brief(answer)}"
            self.add("duplicate" if same else "contradiction", f"{row.id}: asks what {first} asks{also}", row)
        elif validation and (trained := self._asked[False].get(row.digest)):
            self.add("leak", f"{row.id}: is training row {trained[0]}", row)

    @property
    def failed(self) -> bool:
        return any(finding.level == "error" for finding in self.findings.values())

    def ordered(self) -> list[RowIssue]:
        return sorted(self.findings.values(), key=lambda finding: (finding.level != "error", -finding.count))

    def histogram(self) -> list[tuple[int, int, int]]:
        """Return (from, below, rows) for equal ranges of the training prompts' tokens."""
        lengths = sum((tally.tokens for tally in self.sources if not tally.validation), Counter[int]())
        lengths = lengths or sum((tally.tokens for tally in self.sources), Counter[int]())
        if not lengths:
            return []
        low, high = min(lengths), max(lengths) + 1
        width = -(-(high - low) // BINS)
        bins = Counter((length - low) // width for length in lengths.elements())
        return [(low + i * width, low + (i + 1) * width, bins[i]) for i in range(-(-(high - low) // width))]

    def examples(self) -> Iterator[tuple[str, Text]]:
        """Yield titles and texts of rows to print. Prompts are shown by `r1 data show`."""
        yield from ()

    def tokens_per_step(self) -> tuple[int, int] | None:
        """Return the mean prompt tokens and the maximal answer tokens of a training step."""
        trained = [tally for tally in self.sources if not tally.validation and tally.usable]
        if not trained:
            return None
        shares = [tally.opened.source.weight or tally.usable for tally in trained]
        mean = sum(s * tally.mean_tokens for s, tally in zip(shares, trained, strict=True)) / sum(shares)
        sequences = self.config.data.rollout_batch_size * self.config.worker.rollout.n
        return round(sequences * mean), sequences * self.config.data.max_response_length

    def step_line(self) -> str:
        """Return how many tokens a training step has, "" if no row is usable."""
        if (found := self.tokens_per_step()) is None:
            return ""
        return f"a step has about {found[0]:,} prompt tokens and at most {found[1]:,} answer tokens"


def _brief(text: str | None) -> str:
    shown = repr(text)
    return shown if len(shown) <= 40 else f"{shown[:37]}..."
