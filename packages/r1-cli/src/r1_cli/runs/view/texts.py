"""The texts of recorded answers: read by file on request, searched, and shortened for a list."""

from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from r1_cli.runs.history import JsonObject
from r1_cli.runs.reader import Phase, RunReader
from r1_cli.runs.rendered import common_ends, question, split_messages
from r1_cli.runs.view.index import READERS, Indexer

if TYPE_CHECKING:
    import pyarrow as pa

PREVIEW = 160  # characters of a text in a list
BEFORE = 40  # of them before a text that was searched for
KEPT_BYTES = 500_000_000  # of answers that stay in memory
KEPT_FILES = 500  # whose prompts stay in memory
KEPT_SEARCHES = 8  # a file

Key = tuple[int, object]  # a step and its file


class Texts:
    def __init__(self, run: RunReader, phase: Phase, indexer: Indexer) -> None:
        self._run, self._phase, self._indexer = run, phase, indexer
        self._prompts: OrderedDict[Key, JsonObject] = OrderedDict()
        self._answers: OrderedDict[Key, pa.Table] = OrderedDict()
        self._found: OrderedDict[tuple[Key, str], npt.NDArray[np.bool_]] = OrderedDict()

    def find(self, steps: list[int], text: str) -> dict[int, npt.NDArray[np.bool_]]:
        """Return by step which rows of its file have a text in their prompt or answer, ignoring case."""
        with ThreadPoolExecutor(READERS) as pool:
            found = dict(zip(steps, pool.map(lambda step: self._search(step, text), steps), strict=True))
        _forget(self._found, KEPT_SEARCHES * max(len(steps), 1))
        return found

    def questions(self, step: int) -> tuple[int, int]:
        """Return how many characters all questions of a step begin and end with alike; see `common_ends`."""
        ends: tuple[int, int] = self._of_prompts(step)["ends"]
        return ends

    def shorten(self, step: int, row: int) -> JsonObject:
        """Return a row's {"question", "media"}: the prompt without what all share, and its first picture."""
        known = self._of_prompts(step)
        code = known["codes"][row]
        before, after = known["ends"]
        whole = known["questions"][code]
        text = " ".join(whole[before : len(whole) - after].split())
        media = known["media"][row].as_py() or []
        kept = next((name for name in media[:1] if self._run.media_path(name).is_file()), None)
        return {"question": text[:PREVIEW], "media": kept, "pictures": len(media)}

    def excerpt(self, step: int, row: int, search: str = "") -> str:
        """Return the begin of an answer, or the words around a text that was searched for."""
        text = self._of_answers(step)["answer"][row].as_py() or ""
        place = max(text.lower().find(search.lower()) - BEFORE, 0) if search else 0
        words = text[place : place + PREVIEW]
        return ("… " if place else "") + " ".join(words.split())

    def _key(self, step: int) -> Key:
        return step, self._indexer.identity(step)

    def _search(self, step: int, text: str) -> npt.NDArray[np.bool_]:
        import pyarrow.compute as pc

        key = self._key(step)
        if (key, text) not in self._found:
            known = self._of_prompts(step)
            low = text.lower()
            prompts = np.array([low in one.lower() for one in known["prompts"]], bool)[known["codes"]]
            hits = pc.match_substring(self._of_answers(step)["answer"], text, ignore_case=True)
            self._found[key, text] = prompts | np.array([bool(one) for one in hits.to_pylist()])
        return self._found[key, text]

    def _of_prompts(self, step: int) -> JsonObject:
        key = self._key(step)
        if key not in self._prompts:
            table = self._table(step, ["prompt", "media"], ["prompt"])
            column = table["prompt"].combine_chunks()
            codes = np.array(
                [len(column.dictionary) if one is None else one for one in column.indices.to_pylist()], int
            )
            prompts = [one or "" for one in column.dictionary.to_pylist()] + [""]
            questions = [question(split_messages(prompt)) for prompt in prompts]
            self._prompts[key] = {
                "codes": codes, "prompts": prompts, "questions": questions, "media": table["media"],
                "ends": common_ends([questions[code] for code in {*codes.tolist()}]),
            }  # fmt: skip
        self._prompts.move_to_end(key)
        known = self._prompts[key]
        _forget(self._prompts, KEPT_FILES)
        return known

    def _of_answers(self, step: int) -> "pa.Table":
        key = self._key(step)
        table = self._answers[key] if key in self._answers else self._table(step, ["answer"], [])
        self._answers[key] = table
        self._answers.move_to_end(key)
        while len(self._answers) > 1 and sum(one.nbytes for one in [*self._answers.values()]) > KEPT_BYTES:
            self._answers.popitem(last=False)
        return table

    def _table(self, step: int, columns: list[str], encoded: list[str]) -> "pa.Table":
        return self._run.sample_table(step, self._phase, columns, encoded)


def _forget(kept: "OrderedDict[Any, Any]", most: int) -> None:
    while len(kept) > most:
        kept.popitem(last=False)
