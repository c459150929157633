"""Recorded answers of environments: a player repeats an episode from them to the bit, without a call."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from cli_players import PARAMS, Toy

from r1_cli.train.episodes.answers import (
    AnswerRecord,
    RecordedAnswer,
    answer_file,
    compare_answers,
    to_table,
)
from r1_cli.train.episodes.recorded_environments import RecordedEnvironments, record_answers, replay_answers
from r1_cli.train.recorder import Recorder
from r1_data.types import DataError
from r1_rewards.environments.types import CallRecord, StepResult
from r1_rewards.types import Score


@pytest.mark.parametrize("rounds", [True, False])
def test_the_record_answers_as_the_environments_did_to_the_bit(toy: Toy, tmp_path: Path, rounds: bool) -> None:
    prompts, recorder = toy.prompts("3", "die", "2"), Recorder(tmp_path, 10**9)
    with ExitStack() as stack:
        player = toy.player(stack, "Mortal", rounds=rounds, seconds=0.003)
        live = replace(player, answers=record_answers(recorder), max_concurrent=6)
        then = toy.play(live, prompts)
    recorder.close()
    record = AnswerRecord(tmp_path)
    assert record.has_steps()
    again = replace(
        live,
        environments=RecordedEnvironments(record.kinds({"": player.environments.setup})),
        answers=replay_answers(record),
    )
    assert again.environments.scores
    for group, repeated in zip(then, toy.play(again, prompts), strict=True):
        for one, other in zip(group, repeated, strict=True):
            assert one == other  # tokens and log-probs
            assert (one.turns, one.score, one.failure, one.stop_reason) == (
                other.turns,
                other.score,
                other.failure,
                other.stop_reason,
            )
            assert [image.tobytes() for image in one.images] == [image.tobytes() for image in other.images]
    assert {one.stop_reason for one in then[1]} == {"failed"}
    assert len([*(tmp_path / "media").iterdir()]) == 1
    assert compare_answers(tmp_path, tmp_path) == []

    talkative = replace(again, limits=replace(again.limits, max_turn_tokens=12))
    with pytest.raises(DataError, match=r"turn \d is not the recorded one; `r1 replay --tools again` calls"):
        toy.play(talkative, prompts)
    with pytest.raises(DataError, match="has no answers of this sampling round"), toy.engine.active():
        dict(again.generate(toy.engine, prompts, replace(PARAMS, seed=6)))


def test_a_tool_that_answers_equal_calls_differently_is_named(tmp_path: Path) -> None:
    def step(text: str, name: str) -> StepResult:
        return StepResult(({"role": "tool", "content": text},), calls=(CallRecord(name, {}, 0.1),))

    for folder, text in (("then", "1"), ("now", "2")):
        answers = [
            RecordedAnswer("row/0", 1, "a", 3, step("same", "clock")),
            RecordedAnswer("row/0", 2, "b", 4, step(text, "clock")),
            RecordedAnswer("row/1", 1, text, 4, step(text, "other turns")),
            RecordedAnswer("row/1", 2, "d", 4, Score(float(text))),
        ]
        (tmp_path / folder / "answers").mkdir(parents=True)
        table = to_table(answers, b"{}", lambda content: "")
        pq.write_table(table, tmp_path / folder / "answers" / answer_file(3, 77))
    assert compare_answers(tmp_path / "then", tmp_path / "now") == [
        "tool clock is not a function of its input: 1 of 2 equal calls were answered differently, first in "
        "episode row/0, turn 2",
        "score() is not a function of its input: 1 of 1 equal calls were answered differently, first in "
        "episode row/1, turn 2",
    ]
