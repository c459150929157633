"""Choosing rows of training among sampled answers, on groups of every kind."""

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from r1_cli.build.rows import OpenSource
from r1_cli.jobs.rows import to_row
from r1_cli.main import main
from r1_cli.runs.rows.choose import (
    Choice,
    ChoiceError,
    Chosen,
    SampledAnswer,
    SampledGroup,
    choose,
    control,
    histogram,
    parse_band,
    statistics,
)
from r1_cli.runs.rows.parts import SampleFolder
from r1_cli.runs.rows.recorded import to_group
from r1_data.turns.tool_prompt import ToolPrompt
from r1_data.types import Example


def group(*scores: float, name: str = "a:1", texts: str = "", cut: str = "", failed: str = "") -> SampledGroup:
    """Answers "a", "b", … of 10, 11, … tokens, right from a score of 1; `cut` and `failed` name some."""
    names = texts or "abcdefghijklmnop"
    answers = [
        SampledAnswer(place, one, 10 + place, score, score >= 1, one in cut, "timeout" if one in failed else "")
        for place, (score, one) in enumerate(zip(scores, names, strict=False))
    ]
    return SampledGroup(name, "sums", f"key of {name}", tuple(answers))


def chosen(groups: list[SampledGroup], choice: Choice) -> list[str]:
    return [
        one.chosen.text + (one.rejected.text if one.rejected else "") for one in choose(groups, choice) if one.chosen
    ]


def test_best_are_the_highest_scores_and_of_equal_ones_the_shortest() -> None:
    assert chosen([group(0, 1, 2, 2)], Choice()) == ["c"]
    assert chosen([group(0, 1, 2, 2)], Choice(per_row=3)) == ["c", "d", "b"]
    assert chosen([group(0, 1, 2, 2)], Choice(keep="shortest", per_row=2)) == ["b", "c"]
    assert chosen([group(0, 1, 2, 2)], Choice(keep="all")) == ["c", "d", "b"]
    assert chosen([group(0, 1, 2, 2)], Choice(keep="all", per_row=1)) == ["c"]


def test_random_is_a_right_answer_by_a_lot_of_the_row_alone() -> None:
    groups = [group(0, 1, 1, 1, name=f"a:{row}") for row in range(200)]
    found = chosen(groups, Choice(keep="random"))
    assert found[100:] == chosen(groups[100:], Choice(keep="random"))
    assert {text: 40 < found.count(text) < 95 for text in "abcd"} == {"a": False, "b": True, "c": True, "d": True}
    assert found != chosen(groups, Choice(keep="random", seed=1))


def test_a_text_is_chosen_once_a_row() -> None:
    assert chosen([group(1, 1, 1, texts="aab")], Choice(keep="all")) == ["a", "b"]
    assert chosen([group(1, 1, 0, 0, texts="aabb")], Choice("pairs", per_row=9)) == ["ab"]
    episodes = [SampledAnswer(n, "same end", 5, 1.0, True, turns=({"role": "assistant", "content": t},))
                for n, t in enumerate("xxy")]  # fmt: skip
    found = choose([SampledGroup("a", "s", "k", tuple(episodes))], Choice(keep="all"))
    assert [one.chosen.messages[0]["content"] for one in found if one.chosen] == ["x", "y"]


def test_answers_that_were_cut_or_could_not_be_scored_are_not_chosen() -> None:
    one = group(3, 2, 1, 0, cut="a", failed="b")
    assert chosen([one], Choice(keep="all")) == ["c"]
    assert chosen([one], Choice(keep="all", keep_cut=True)) == ["a", "c"]
    assert chosen([one], Choice("pairs")) == ["cd"]
    assert one.pass_rate == 2 / 3
    assert statistics(one)["share_cut"] == 0.25
    with pytest.raises(ChoiceError, match="nothing is left"):
        choose([group(1, cut="a")], Choice())


def test_pairs_are_of_the_best_and_the_worst_with_a_margin() -> None:
    one = group(0, 0.25, 0.5, 1)
    assert chosen([one], Choice("pairs")) == ["da"]
    assert chosen([one], Choice("pairs", per_row=5)) == ["da", "cb"]
    assert chosen([one], Choice("pairs", per_row=5, margin=0.5)) == ["da"]
    assert chosen([one], Choice("pairs", margin=1.0)) == ["da"]
    for nothing in (group(1), group(1, 1), group(0, 0, 0)):
        with pytest.raises(ChoiceError, match="nothing is left"):
            choose([nothing], Choice("pairs"))


def test_a_band_has_its_ends() -> None:
    groups = [group(*[1] * right, *[0] * (4 - right), name=f"a:{right}") for right in range(5)]
    found = choose(groups, Choice("rates", band=(0.25, 0.75)))
    assert [one.group.prompt_id for one in found] == ["a:1", "a:2", "a:3"]
    assert len(choose(groups, Choice("rates"))) == 5
    assert parse_band("0.25:0.75") == (0.25, 0.75)
    assert parse_band(None) is None
    for text in ("0.5", "0.9:0.1", "a:b", "-1:0.5", "0:2", "nan:1", "0:1:1"):
        with pytest.raises(ChoiceError, match="--band"):
            parse_band(text)


def test_a_choice_that_drops_nearly_everything_is_an_error_with_a_histogram() -> None:
    groups = [group(0, 0, name=f"a:{row}") for row in range(95)] + [group(1, 0, name=f"b:{row}") for row in range(4)]
    with pytest.raises(ChoiceError, match=r"4 of 99 rows are left; --few accepts that\nrows by pass rate:") as error:
        choose(groups, Choice())
    assert re.findall(r"^ +(\S.*?)  +(\d+) +#+$", str(error.value), re.MULTILINE) == [("0", "95"), ("0.5 to 0.6", "4")]
    assert len(choose(groups, Choice(few=True))) == 4


def test_a_histogram_names_rows_that_were_not_scored() -> None:
    text = histogram([group(0, failed="a"), group(1), group(1), group(1, 0, 0)])
    assert [line.split()[:-1] for line in text.splitlines()[1:]] == [
        ["0.3", "to", "0.4", "1"], ["1", "2"], ["not", "scored", "1"],
    ]  # fmt: skip
    assert histogram([]) == "rows by pass rate:"


def test_rates_come_with_wilsons_interval_and_lengths() -> None:
    found = statistics(group(1, 0, 0, 1, failed="d", cut="b"))
    assert (found["pass_rate"], found["asked"], found["mean_tokens"], found["share_cut"]) == (1 / 3, 3, 11.5, 0.25)
    assert found["interval"] == pytest.approx([0.061, 0.792], abs=1e-3)
    assert statistics(group(1))["interval"] == pytest.approx([0.207, 1.0], abs=1e-3)
    assert statistics(group(1, failed="a"))["pass_rate"] is None


def test_a_control_has_as_many_rows_whatever_their_scores() -> None:
    groups = [group(*[float(row % 4 == 0)] * 2, 0, 0, name=f"a:{row}") for row in range(400)]
    count = len(choose(groups, Choice()))
    found = control(groups, Choice(), count)
    assert len(found) == count == 100
    assert 10 < sum(one.chosen.right for one in found if one.chosen) < 40  # an eighth of all answers is right
    assert len({one.group.prompt_id for one in found}) == count  # one a row, as in the choice
    assert [one.group.prompt_id for one in found] == sorted(
        (one.group.prompt_id for one in found), key=lambda name: int(name[2:])
    )
    pairs = control(groups, Choice("pairs", per_row=2), 500)
    assert {(one.chosen is None, one.rejected is None) for one in pairs} == {(False, False)}
    assert len(pairs) == 500
    assert len(control(groups, Choice("rates"), 30)) == 30
    assert len(control(groups[:3], Choice(), 30)) == 3


SCORES = st.lists(st.sampled_from([0.0, 0.5, 1.0, -2.0, 1e308]), min_size=1, max_size=6)


@given(st.lists(SCORES, min_size=1, max_size=5), st.sampled_from(["best", "all", "shortest", "random"]), st.booleans())
def test_what_is_chosen_is_right_and_the_scores_of_pairs_are_apart(
    scores: list[list[float]], keep: str, keep_cut: bool
) -> None:
    groups = [group(*those, name=f"a:{row}", cut="b") for row, those in enumerate(scores)]
    for choice in (Choice(keep=keep, keep_cut=keep_cut), Choice("pairs", per_row=2, keep_cut=keep_cut)):  # type: ignore[arg-type]
        try:
            found = choose(groups, replace(choice, few=True))
        except ChoiceError:
            continue
        for one in found:
            assert one.chosen is not None
            assert keep_cut or not one.chosen.cut
            assert one.chosen.right if choice.kind == "sft" else one.rejected.score < one.chosen.score  # type: ignore[union-attr]


def recorded(**changed: object) -> dict[str, object]:
    row = {
        "group": 0, "sample": 0, "prompt_id": "a:1", "source": "s", "answer": "x", "tokens": 10**6, "score": 1.0,
        "parts": [("accuracy", 0.0)], "failure": None, "finish_reason": "stop", "turns": None, "stop_reason": None,
        "media": ["prompt.png"], "key": "k", "step": 0, "prompt_tokens": 5, "prompt": "p", "sampled": None,
    }  # fmt: skip
    return {**row, **changed}


def test_recorded_answers_are_right_by_their_accuracy_or_by_a_score() -> None:
    def answer(least: float | None = None, **changed: object) -> SampledAnswer:
        return to_group([recorded(**changed)], Path("media"), least).answers[0]

    assert answer().tokens == 10**6
    assert not answer().right
    assert answer(least=1.0).right
    assert answer(parts=None).right
    assert not answer(parts=None, least=1.5).right
    assert not answer(parts=[("accuracy", math.nan)]).right
    assert answer(score=math.nan).failed
    assert answer(score=None).failed
    assert answer(failure="timeout: 30 s").failed
    assert answer(finish_reason="length").cut
    assert answer(answer=None).text == ""


def test_an_episode_has_the_turns_that_the_policy_wrote_or_read_and_their_pictures() -> None:
    def turn(role: str, tokens: int, *messages: dict[str, object]) -> dict[str, object]:
        return {"role": role, "begin": 5, "end": 5 + tokens, "messages": json.dumps(messages)}

    picture = {"role": "tool", "content": [{"type": "image"}, {"type": "text", "text": "again"}]}
    turns = [
        turn("assistant", 3, {"role": "assistant", "content": "look"}),
        turn("environment", 4, picture),
        turn("assistant", 0, {"role": "assistant", "content": ""}),
        turn("environment", 0, picture),  # the episode had ended
    ]
    media = ["prompt.png", "seen.png"]
    answer = to_group([recorded(turns=turns, media=media)], Path("media")).answers[0]
    assert [message["role"] for message in answer.messages] == ["assistant", "tool", "assistant"]
    assert answer.pictures == (Path("media/seen.png"),)
    assert to_group([recorded(media=media)], Path("media")).answers[0].pictures == ()


def test_a_row_has_the_tools_that_its_prompt_showed_as_json(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "count", "parameters": {"type": "object"}}}
    folder = SampleFolder(tmp_path)
    assert folder.tools() == {}
    folder.write_tools({"s": ToolPrompt((tool,), "hermes", by_template=True, reads_system=True)})
    asked = Example("a:1", [{"role": "user", "content": "?"}], (), "1", source="s")
    answer = SampledAnswer(0, "one", 1, 1.0, True)
    chosen = Chosen(SampledGroup("a:1", "s", "k", (answer,)), answer)
    plain, formatted = (cast(OpenSource, SimpleNamespace(source=SimpleNamespace(format_prompt=f))) for f in (None, "f"))
    row = to_row(chosen, Choice(), folder.tools()["s"](asked), {}, plain)
    assert json.loads(str(row["tools"])) == [tool]
    assert "prompt_is_formatted" not in row
    row = to_row(chosen, Choice(), asked, {}, formatted)
    assert "tools" not in row
    assert row["prompt_is_formatted"] is True


def test_choosing_rows_loads_no_torch() -> None:
    code = "import sys, r1_cli.jobs.rows; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


@pytest.mark.parametrize("words", [("--margin", "nan"), ("--min-score", "nan"), ("--min-score", "inf")])
def test_a_number_that_no_score_compares_with_is_refused(tmp_path: Path, words: tuple[str, str]) -> None:
    command = ["rows", str(tmp_path), "--as", "rates", "--output", str(tmp_path / "rows.parquet"), *words]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 2
    assert f"{words[0]}': '{words[1]}' is not a finite number" in result.output


def test_without_answers_the_command_to_run_is_named() -> None:
    with pytest.raises(ChoiceError, match="no answers yet: run r1 sample"):
        choose([], Choice())


def test_rows_are_written_as_parquet_or_json_lines_only(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["rows", str(tmp_path), "--as", "sft", "--output", str(tmp_path / "rows.csv")])
    assert result.exit_code == 2
    assert "rows.csv: must end in .parquet or .jsonl" in result.output
