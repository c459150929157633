"""The recorded answers of a phase, group by group: filtered, searched and paged, one group in full, one prompt's."""

import threading
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from r1_cli.runs.conversation import prompt_media, read_prompt, read_turns
from r1_cli.runs.history import JsonObject
from r1_cli.runs.reader import Phase, Row, RunReader
from r1_cli.runs.schema import SCHEMA
from r1_cli.runs.view.index import Column, Columns, Index, Indexer
from r1_cli.runs.view.pieces import TokenTexts
from r1_cli.runs.view.texts import Texts

LONGEST = 20_000  # characters of a text, unless all of it is asked for
MOST_TOKENS = 5_000  # likewise
MOST_SQUARES = 256  # answers of a group in a list
SORTS = ("step", "score", "spread", "length")
FILTERS = ("flat", "truncated", "failed")
HIDDEN = ("prompt_tokens", "sampled")  # columns that a page does not show; the teacher's top ones are hundreds a token
OF_TOKENS = ("tokens", "rollout_logprobs", "old_logprobs", "entropies", "ref_logprobs", "teacher_logprobs",
             "advantages", "pieces")  # fmt: skip


@dataclass(frozen=True)
class Wanted:
    """Which groups: an answer of the group meets all conditions at once.

    `step` None: all. `search`: in prompt or answer, ignoring case. `filters` of FILTERS. `low` and `high` bound the
    score. `sort` of SORTS, `down` puts the highest first.
    """

    step: int | None = None
    source: str | None = None
    search: str = ""
    filters: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    sort: str = "step"
    down: bool = False


class Samples:
    def __init__(self, run: RunReader, phase: Phase) -> None:
        self._run, self._phase, self._lock = run, phase, threading.RLock()
        self._token_texts, self._indexer = TokenTexts(run), Indexer(run, phase)
        self._texts = Texts(run, phase, self._indexer)

    def steps(self) -> list[int]:
        return self._indexer.steps()

    def page(self, begin: int, count: int, wanted: Wanted) -> JsonObject:
        """Return `count` groups from the `begin`-th on, with how many groups and answers match.

        `scale` has the lowest and highest score of the phase, None without scores; `sources` its data sources.
        """
        with self._lock:
            index = self._indexer.read()
            passing = self._passing(index, wanted)
            chosen = np.unique(index.answers["group"][passing])
            chosen = chosen[_order(self._key(index, wanted.sort)[chosen], wanted.down)]
            score = index.answers["score"][np.isfinite(index.answers["score"])]
            return {
                "groups": len(chosen),
                "answers": int(passing.sum()),
                "scale": [float(score.min()), float(score.max())] if len(score) else None,
                "sources": sorted({one for one in index.groups["source"] if one}),
                "rows": [self._row(index, int(place), passing, wanted) for place in chosen[begin : begin + count]],
            }

    def group(self, step: int, group: int, place: int | None = None) -> list[Row]:
        """Return a prompt's rows at a step, or only the `place`-th with all of its text; [] if it is not there.

        `messages` is the prompt (`read_prompt`; parts that all prompts of the step share are `common`), `turns` an
        episode (`read_turns`), `pieces` the text of each token; `cut` tells that the row is longer than what came.
        Names of pictures that are not in the record are None.
        """
        import pyarrow.compute as pc

        shown = [name for name in SCHEMA.names if name not in HIDDEN and not name.startswith("teacher_top")]
        try:
            table = self._run.sample_table(step, self._phase, shown)
        except FileNotFoundError:
            return []
        rows = table.filter(pc.equal(table["group"], group)).to_pylist()
        with self._lock:
            self._indexer.read()
            ends = self._texts.questions(step)
        chosen = rows if place is None else rows[place : place + 1]
        return [self._in_full(row, ends, whole=place is not None) for row in chosen]

    def same(self, prompt_id: str) -> list[JsonObject]:
        """Return the groups of a prompt: step, group, mean score and the score of each answer."""
        with self._lock:
            index = self._indexer.read()
        return [
            {
                "step": int(index.groups["step"][place]),
                "group": int(index.groups["group"][place]),
                "score": float(index.groups["mean"][place]),
                "scores": index.answers["score"][_answers(index, int(place))][:MOST_SQUARES].tolist(),
            }
            for place in np.flatnonzero(index.groups["prompt_id"] == prompt_id)
        ]

    def _passing(self, index: Index, wanted: Wanted) -> Column:
        answers, groups = index.answers, index.groups
        member = answers["group"]
        passing = np.ones(len(member), bool)
        for name in wanted.filters:
            passing &= groups["flat"][member] if name == "flat" else answers[name]
        if wanted.step is not None:
            passing &= (groups["step"] == wanted.step)[member]
        if wanted.source is not None:
            passing &= (groups["source"] == wanted.source)[member]
        if wanted.low is not None:
            passing &= answers["score"] >= wanted.low
        if wanted.high is not None:
            passing &= answers["score"] <= wanted.high
        if wanted.search:
            step = groups["step"][member]
            there = passing.nonzero()[0]
            steps = [int(one) for one in np.unique(step[there])]
            for number, hits in self._texts.find(steps, wanted.search).items():
                inside = there[step[there] == number]
                passing[inside] = hits[answers["row"][inside]]
        return passing

    def _key(self, index: Index, sort: str) -> Column:
        if sort == "length":
            steps = np.unique(index.groups["step"])
            return _means(index, {int(step): self._indexer.lengths(int(step)) for step in steps})
        return index.groups[{"score": "mean"}.get(sort, sort)]

    def _row(self, index: Index, place: int, passing: Column, wanted: Wanted) -> JsonObject:
        groups, of_group = index.groups, _answers(index, place)
        answers: Columns = {name: column[of_group] for name, column in index.answers.items()}
        step, hit = int(groups["step"][place]), passing[of_group]
        found: JsonObject = {
            "step": step, "group": int(groups["group"][place]), "source": groups["source"][place],
            "count": len(hit), "mean": float(groups["mean"][place]), "spread": float(groups["spread"][place]),
            "length": float(self._indexer.lengths(step)[answers["row"]].mean()), "excerpt": None,
        }  # fmt: skip
        for name in ("score", "truncated", "failed"):
            found[name] = answers[name][:MOST_SQUARES].tolist()
        found["hit"] = None if hit.all() else hit[:MOST_SQUARES].tolist()
        found |= self._texts.shorten(step, int(answers["row"][0]))
        if wanted.search or len(hit) == 1:
            found["excerpt"] = self._texts.excerpt(step, int(answers["row"][hit.argmax()]), wanted.search)
        return found

    def _in_full(self, row: Row, ends: tuple[int, int], *, whole: bool) -> Row:
        row["parts"] = dict(row["parts"] or ())
        row["prompt_media"] = prompt_media(row)
        row["messages"], row["turns"] = read_prompt(row), read_turns(row)
        _mark_common(row["messages"], *ends)
        row["length"], row["characters"] = len(row["tokens"] or ()), len(row["answer"] or "")
        for message in [*row["messages"], *(row["turns"] or ())]:
            for part in message["parts"]:
                if part.get("media") and not self._run.media_path(part["media"]).is_file():
                    part["media"] = None
        row["cut"] = not whole and _cut(row)
        row["pieces"] = self._token_texts.decode(row["tokens"])
        return row


def _answers(index: Index, place: int) -> slice:
    return slice(index.groups["begin"][place], index.groups["begin"][place + 1])


def _order(key: Column, down: bool) -> Column:
    known = np.nan_to_num(key.astype(float), nan=-np.inf)
    return np.argsort(-known if down else known, kind="stable")


def _means(index: Index, lengths: dict[int, Column]) -> Column:
    step = index.groups["step"][index.answers["group"]]
    found = np.zeros(len(step))
    for number, values in lengths.items():
        found[step == number] = values[index.answers["row"][step == number]]
    count = np.maximum(np.diff(index.groups["begin"]), 1)
    return np.bincount(index.answers["group"], found, minlength=len(count)) / count


def _cut(row: Row) -> bool:
    """Shorten the long texts of a row; return whether there were any."""
    cut = len(row["tokens"] or ()) > MOST_TOKENS or len(row["answer"] or "") > LONGEST
    row["answer"] = (row["answer"] or "")[:LONGEST]
    for name in OF_TOKENS:
        row[name] = row[name][:MOST_TOKENS] if row.get(name) else row.get(name)
    for turn in row["turns"] or ():
        for part in turn["parts"]:
            if len(part.get("text") or "") > LONGEST:
                part["text"], cut = part["text"][:LONGEST], True
    return cut


def _mark_common(messages: list[JsonObject], before: int, after: int) -> None:
    """Mark what all questions of a step begin and end with: `common` parts of the user's last message."""
    asked = [one for one in messages if one["role"] in ("user", "prompt")]
    if not asked or not before + after:
        return
    parts: list[JsonObject] = []
    length = sum(len(part.get("text", "")) for part in asked[-1]["parts"])
    place = 0
    for part in asked[-1]["parts"]:
        text: Any = part.get("text")
        if text is None:
            parts.append(part)
            continue
        edges = sorted({0, *(min(max(one - place, 0), len(text)) for one in (before, length - after)), len(text)})
        for begin, end in pairwise(edges):
            common = place + end <= before or place + begin >= length - after
            parts.append({"text": text[begin:end], **({"common": True} if common else {})})
        place += len(text)
    asked[-1]["parts"] = parts
