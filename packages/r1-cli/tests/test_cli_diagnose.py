"""Diagnoses: each bad run under `runs/` is found to be what it is, and healthy ones are not."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli_pages import call, turn
from click.testing import CliRunner

from r1_cli.main import main
from r1_cli.runs.diagnose.answers import diagnose_answers, diagnose_run
from r1_cli.runs.diagnose.signatures import SIGNATURES, diagnose
from r1_cli.runs.history import NoHistoryError, read_history
from r1_cli.runs.reader import SAMPLES, RunReader, sample_file
from r1_cli.runs.schema import SCHEMA

RUNS = Path(__file__).parent / "runs"
ANSWERS = {"repeated_answers", "dead_media", "repeated_calls", "dropped_answers"}


def found_in(run: Path) -> set[str]:
    answers = diagnose_answers(RunReader(run)) if run.is_dir() else []
    return {one.signature for one in [*diagnose(read_history(run)), *answers]}


def write(folder: Path, steps: Iterable[dict[str, Any]], config: dict[str, Any] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"step": number, **one}) for number, one in enumerate(steps, start=1)]
    (folder / "experiment_log.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (folder / "experiment_config.json").write_text(json.dumps(config or {}))
    return folder


@pytest.mark.parametrize("run", sorted(RUNS.glob("[!h]*")), ids=lambda run: run.name)
def test_a_real_bad_run_is_found_to_be_what_it_is(run: Path) -> None:
    assert run.name in found_in(run)


def test_of_twenty_healthy_runs_at_most_one_is_said_to_be_ill() -> None:
    said = {run.name: found_in(run) for run in RUNS.glob("healthy_*")}
    assert len(said) == 20
    assert sum(map(bool, said.values())) <= 1, said


def test_every_signature_has_a_bad_run() -> None:
    real = {run.name for run in RUNS.glob("[!h]*")}
    assert real | {*BY_HAND} | {*EPISODES} | found_in(RUNS / "dead_media") == {*SIGNATURES} | ANSWERS
    assert len(SIGNATURES) + len(ANSWERS) >= 16


def grows(begin: float, end: float, steps: int = 40) -> list[float]:
    """A number on its way, with a little noise."""
    return [begin + (end - begin) * i / (steps - 1) + (end - begin) * 0.02 * (-1) ** i for i in range(steps)]


# Those that no short run of the quickstart shows: its answers are all about as long as the longest, most of their
# tokens are beyond doubt, and its engine computes what the learner does.
BY_HAND: dict[str, list[dict[str, float]]] = {
    "padding_waste": [
        {"prompt_length/mean": 100, "prompt_length/max": 120, "response_length/mean": 300, "response_length/max": 4000}
    ]
    * 10,
    "forgetting": [
        {"eval/a/chat/avg@1": 0.5, "eval/a/chat/change": -0.2, "eval/a/chat/change/low": -0.3,
         "eval/a/chat/change/high": -0.1, "eval/a/chat/change/p": 0.01}
    ],
    "clipped_often": [{"actor/pg_clipfrac_higher": value} for value in grows(0.05, 0.4)],
    "constant_reward": [{"reward/overall": -1.0, "reward/groups_without_variance": 1.0}] * 10,
    "engine_gap": [{"rollout/logprob_gap_mean": value} for value in grows(0.001, 0.2)],
    "no_tool_calls": [{"episode/turns/mean": 1.0, "episode/calls": value} for value in [0.8] * 5 + [0.02] * 5],
    "calls_until_limit": [{"episode/turns/mean": 4.0, "episode/calls": 3.0, "episode/stop/max_turns": 0.9}] * 10,
    "malformed_calls": [
        {"episode/turns/mean": 2.0, "episode/calls": 1.0, "tool/a/calls": 9.0, "tool/a/failures": 4.0,
         "tool/b/calls": 1.0}
    ]
    * 10,
    "slow_tools": [
        {"episode/turns/mean": 3.0, "episode/calls": 2.0, "tool/a/calls": 8.0, "timing_s/tool/a/mean": 3.0,
         "timing_s/gen": 8.0}
    ] * 10,
}  # fmt: skip
LOOK, AGAIN = call(arguments='{"x0": 0.1}'), call(arguments='{"x0": 0.9}')
EPISODES: dict[str, tuple[list[dict[str, Any]], str]] = {  # an episode's turns, and why it ended
    "repeated_calls": (
        [turn("environment", 4, 8, [], [LOOK, AGAIN]), turn("environment", 9, 12, [], [LOOK])],
        "answered",
    ),
    "dropped_answers": ([turn("assistant", 0, 4, []), turn("environment", 4, 4, [], [LOOK])], "max_tokens"),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_a_bad_run_made_by_hand_is_found(name: str, tmp_path: Path) -> None:
    assert name in found_in(write(tmp_path, BY_HAND[name], {"worker": {"actor": {"padding_free": False}}}))


def record(folder: Path, episodes: list[tuple[list[dict[str, Any]], str]]) -> Path:
    """Write a run with one step whose answers are these episodes."""
    run = write(folder, [{"episode/turns/mean": 2.0, "episode/calls": 2.0}])
    rows = [
        {"step": 1, "phase": "train", "group": number, "sample": 0, "answer": str(number), "turns": turns,
         "stop_reason": stop}
        for number, (turns, stop) in enumerate(episodes)
    ]  # fmt: skip
    (run / SAMPLES).mkdir()
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), run / SAMPLES / sample_file(1, "train"))
    return run


@pytest.mark.parametrize("name", EPISODES)
def test_a_problem_of_recorded_episodes_is_found(name: str, tmp_path: Path) -> None:
    assert found_in(record(tmp_path / "bad", [EPISODES[name]] * 20)) == {name}
    fine = ([turn("environment", 4, 8, [], [LOOK, AGAIN])], "answered")
    assert found_in(record(tmp_path / "few", [*[fine] * 19, EPISODES[name]])) == set()


def test_an_environment_that_reads_text_and_healthy_episodes_are_not_ill(tmp_path: Path) -> None:
    steps = turn("environment", 4, 8, [], [call("step", arguments="{}")] * 3)
    assert found_in(record(tmp_path / "text", [([steps], "max_tokens")] * 2 + [([steps], "done")] * 30)) == set()
    healthy = {
        "episode/turns/mean": 2.0, "episode/calls": 1.5, "episode/stop/answered": 0.9, "episode/stop/max_turns": 0.1,
        "tool/a/calls": 20.0, "tool/a/failures": 3.0, "timing_s/tool/a/mean": 0.4, "timing_s/gen": 2.0,
    }  # fmt: skip
    assert found_in(write(tmp_path / "log", [healthy] * 12)) == set()
    rare = [{"episode/turns/mean": 2.0, "episode/calls": 1.0}] * 9 + [healthy | {"episode/stop/max_turns": 1.0}]
    assert found_in(write(tmp_path / "rare", rare)) == set()  # a reason that is not logged did not occur


def first_steps(run: Path, count: int, folder: Path, *, shift: float = 0.0) -> Path:
    """A copy of a run that ended after a few steps, its rewards moved by `shift`."""
    steps = [json.loads(line) for line in (run / "experiment_log.jsonl").read_text().splitlines()[:count]]
    name = "reward/overall"
    return write(folder, [one | ({name: one[name] + shift} if name in one else {}) for one in steps])


@pytest.mark.parametrize("shift", [0.0, -1.0])
@pytest.mark.parametrize("count", [4, 5, 7, 8, 30])
def test_a_rate_that_is_too_high_is_told_before_what_follows_from_it(count: int, shift: float, tmp_path: Path) -> None:
    cause, *symptoms = diagnose_run(RunReader(first_steps(RUNS / "rate_too_high", count, tmp_path, shift=shift)))
    assert (cause.signature, cause.follows) == ("rate_too_high", "")
    assert "truncation" in {one.signature for one in symptoms}
    assert all(one.advised.startswith("first what it follows from, 'the reward falls") for one in symptoms)
    told = CliRunner().invoke(main, ["diagnose", str(tmp_path)]).output
    assert told.index(cause.what) < told.index("answers are cut off")


def test_the_first_steps_of_healthy_runs_are_not_said_to_have_lost_all(tmp_path: Path) -> None:
    for run in RUNS.glob("healthy_*"):
        for count in (4, 6, 7, 8):
            assert not found_in(first_steps(run, count, tmp_path / run.name))


def test_what_is_advised_asks_whether_the_reward_is_constant_and_its_sign_right() -> None:
    constant, symptom = diagnose_run(RunReader(RUNS / "no_variance"))
    assert (constant.signature, symptom.signature) == ("constant_reward", "no_variance")
    assert "is the reward constant?" in symptom.advised
    assert "r1 reward test" in constant.advice
    for name in ("rate_too_high", "part_falls"):
        (one,) = [one for one in diagnose_run(RunReader(RUNS / name)) if one.signature == name]
        assert "is the sign" in one.advice


def test_answers_that_repeat_are_found_in_the_record() -> None:
    assert found_in(RUNS / "dead_media") >= {"repeated_answers", "dead_media", "entropy_collapse"}
    assert not found_in(RUNS / "healthy_01") & ANSWERS


def test_a_record_without_pictures_truths_or_several_answers_says_nothing(tmp_path: Path) -> None:
    run = RUNS / "dead_media"
    for place in sorted((run / "samples").glob("*.parquet")):
        table = pq.read_table(place, partitioning=None)
        (tmp_path / "samples").mkdir(exist_ok=True)
        pq.write_table(
            table.filter([i % 8 == 0 for i in range(len(table))]).slice(0, 3), tmp_path / "samples" / place.name
        )
    assert not diagnose_answers(RunReader(tmp_path))
    assert not diagnose_answers(RunReader(tmp_path / "nothing here"))


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7])
def test_of_a_run_of_few_steps_nothing_is_said_of_how_numbers_went(count: int, tmp_path: Path) -> None:
    steps = [{"reward/overall": 1.0 / (i + 1), "actor/entropy_loss": 1.0 / (i + 1)} for i in range(count)]
    run = write(tmp_path, steps)
    if not count:
        with pytest.raises(NoHistoryError, match="holds no step"):
            read_history(run)
    else:
        assert not found_in(run)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf"), None, 0.0, 1e300, -1e300])
def test_odd_numbers_stop_nothing(odd: float | None, tmp_path: Path) -> None:
    names = sorted({name for run in RUNS.iterdir() for name in read_history(run).names("")})
    steps = [{name: (odd if i % 3 else 0.5) for name in names if name != "step"} for i in range(30)]
    assert isinstance(found_in(write(tmp_path, steps)), set)


def test_a_log_with_a_torn_last_line_is_read(tmp_path: Path) -> None:
    run = write(tmp_path, [{"reward/overall": 1.0}] * 3)
    with (run / "experiment_log.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')
    assert len(read_history(run).steps) == 3


def trl(folder: Path, rows: Iterable[dict[str, float]]) -> Path:
    """A state as TRL's GRPOTrainer writes it."""
    history = [{"epoch": step / 100, "step": step, **row} for step, row in enumerate(rows, start=1)]
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": len(history), "log_history": history}))
    return folder


def test_runs_of_trl_are_read_at_their_last_checkpoint(tmp_path: Path) -> None:
    healthy = {"reward": 0.5, "frac_reward_zero_std": 0.1, "entropy": 1.0, "completions/clipped_ratio": 0.0}
    trl(tmp_path / "checkpoint-9", [healthy] * 9)
    form, answer = grows(0.1, 0.95), grows(0.3, 0.2)
    steps = [
        healthy
        | {"rewards/format/mean": form[i], "rewards/accuracy/mean": answer[i], "reward": form[i] + answer[i]}
        | {"completions/clipped_ratio": 0.4, "frac_reward_zero_std": 0.9}
        for i in range(40)
    ]
    trl(tmp_path / "checkpoint-10", steps)
    assert read_history(tmp_path).writer == "trl"
    assert found_in(tmp_path) >= {"truncation", "no_variance", "format_gamed", "part_falls"}
    assert found_in(tmp_path / "checkpoint-10" / "trainer_state.json") == found_in(tmp_path)


def test_runs_of_verl_are_read(tmp_path: Path) -> None:
    file = tmp_path / "verl.jsonl"
    rise = grows(0.1, 0.8)
    rows = [
        {"critic/score/mean": rise[i], "actor/entropy": 0.8**i, "response_length/clip_ratio": 0.3}
        | ({"val-core/gsm8k/acc/mean@1": 0.1} if i % 10 == 0 else {})
        for i in range(40)
    ]
    file.write_text("\n".join(json.dumps({"step": i, "data": row}) for i, row in enumerate(rows)))
    assert read_history(file).writer == "verl"
    assert found_in(file) >= {"truncation", "entropy_collapse", "validation_below"}


def test_the_command_tells_what_and_what_to_try_and_exits_with_1() -> None:
    told = CliRunner().invoke(main, ["diagnose", str(RUNS / "truncation")])
    assert told.exit_code == 1
    assert "answers are cut off" in told.output
    assert "data.max_response_length" in told.output
    as_json = CliRunner().invoke(main, ["diagnose", str(RUNS / "truncation"), "--json"])
    assert "truncation" in [one["signature"] for one in json.loads(as_json.output)["findings"]]


def test_a_healthy_run_exits_with_0(tmp_path: Path) -> None:
    told = CliRunner().invoke(main, ["diagnose", str(write(tmp_path, [{"reward/overall": 0.5}] * 20))])
    assert told.exit_code == 0
    assert "nothing of what is known to go wrong" in told.output


def test_what_is_no_run_says_what_was_looked_for(tmp_path: Path) -> None:
    told = CliRunner().invoke(main, ["diagnose", str(tmp_path)])
    assert told.exit_code == 2
    assert "experiment_log.jsonl" in told.output
    assert "trainer_state.json" in told.output


def test_advice_names_keys_that_exist() -> None:
    """Each dotted key of an advice is one of the configuration's."""
    from r1_cli.config.root import RunConfig

    advices = " ".join(one.advice for run in RUNS.iterdir() for one in diagnose(read_history(run)))
    keys = {key.rstrip(".") for key in re.findall(r"\b(?:worker|algorithm|data|trainer)\.[\w.]+", advices)}
    assert len(keys) > 8
    for key in sorted(keys):
        model: Any = RunConfig
        for name in key.split("."):
            assert name in model.model_fields, key
            model = model.model_fields[name].annotation
