"""Find ground truths that no response can match, before a run and in each step."""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from r1_cli.build.rows import SEEN, OpenSource
from r1_cli.config import RunConfig
from r1_cli.config.sources import Source
from r1_data.types import DataError
from r1_rewards.verifiers import BUILTINS, columns_of, truth_problem

SHOWN = 3  # rows of a source that are named


class GroundTruthReader:
    """Checks ground truths by each source's built-in reward. A user's own reward cannot be checked."""

    def __init__(self, config: RunConfig, sources: Sequence[Source]) -> None:
        run = config.worker.reward
        self._rewards = {
            source.name: (source.reward_function, source.reward_function_kwargs)
            if source.reward_function
            else (run.reward_function or "", run.reward_function_kwargs)
            for source in sources
        }

    def reward(self, source: str) -> tuple[str, Mapping[str, Any]]:
        return self._rewards[source]

    def problem(self, source: str, ground_truth: str, columns: Mapping[str, Any]) -> str | None:
        """Return why no response to a row can be correct, or None."""
        name, options = self._rewards.get(source, ("", {}))
        problem = truth_problem(name, ground_truth, options, columns) if name in BUILTINS else None
        return f"{name} can use no response: {problem}" if problem else None

    def columns(self, opened: OpenSource, index: int) -> dict[str, Any]:
        name, options = self._rewards[opened.source.name]
        wanted = columns_of(name, options) if name in BUILTINS else set()
        if not wanted:
            return {}
        metadata = opened.reader(*opened.rows[index]).metadata
        return {key: metadata[key] for key in wanted if key in metadata}

    def problem_of_row(self, opened: OpenSource, index: int, ground_truth: str) -> str | None:
        return self.problem(opened.source.name, ground_truth, self.columns(opened, index))


def find_unusable_ground_truths(truths: GroundTruthReader, opened: Sequence[OpenSource | None]) -> list[str]:
    """Return a line for each unusable ground truth among the first rows, at most `SHOWN` per source.

    None stands for sources that are not local. `r1 data check` checks all rows.
    """
    return [line for one in opened if one is not None for line in islice(_problems(truths, one), SHOWN)]


def _problems(truths: GroundTruthReader, opened: OpenSource) -> list[str]:
    if truths.reward(opened.source.name)[0] not in BUILTINS:
        return []
    found = []
    for index in range(min(len(opened.rows), SEEN)):
        try:
            row_id, row = opened.rows[index]
            example = opened.reader(row_id, row)
        except DataError:
            continue
        if problem := truths.problem(opened.source.name, example.ground_truth, example.metadata):
            found.append(f"{opened.source.label}: {row_id}: {problem}")
    return found
