"""What a user reads: step lines, responses, tables and the commands that come next."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from r1_cli.checkpoint.folders import CheckpointStore
from r1_cli.commands.models import chosen_checkpoint, own_configuration
from r1_cli.config import load_config
from r1_cli.jobs.next_steps import closing_lines, typed_command
from r1_cli.plan.announce import announce, show_table
from r1_cli.plan.batches import make_plan
from r1_cli.runs.track.console import ConsoleReporter, labelled, step_line

BASE = [
    "data.train_files=owner/rows@train",
    "worker.actor.model.model_path=owner/model",
    "worker.reward.reward_function=math",
]
RECORD = {
    "reward/overall": 0.53591, "reward/failures": 0.0, "response_length/mean": 10.42, "actor/kl_loss": 0.00123,
    "actor/entropy_loss": 0.1115, "actor/grad_norm": 0.36742, "timing_s/step": 1.1834, "perf/mfu": 0.1,
}  # fmt: skip


def reporter_on(terminal: bool, width: int = 80, **settings: Any) -> tuple[ConsoleReporter, io.StringIO]:
    out = io.StringIO()
    return ConsoleReporter(Console(file=out, force_terminal=terminal, width=width), **settings), out


def test_a_step_line_fits_a_terminal_of_80_columns_and_is_whole_in_a_file() -> None:
    narrow, full = step_line(123, 1400, RECORD, 80), step_line(123, 1400, RECORD)
    assert len(narrow) <= 80
    for shown in ("step 123/1400", "reward 0.536", "seconds 1.18"):
        assert shown in narrow
        assert shown in full
    assert "entropy 0.112" in full
    assert "kl 0.00123" in full


def test_failed_rewards_stand_on_the_step_line_where_there_are_any() -> None:
    assert "failed" not in step_line(1, 2, RECORD)
    assert "failed 16" in step_line(1, 2, RECORD | {"reward/failures": 16.0}, 40)


@pytest.mark.parametrize(
    ("terminal", "asked", "shown"), [(False, False, True), (True, False, False), (True, True, True)]
)
def test_a_run_that_is_not_watched_writes_step_lines_whatever_its_loggers(
    terminal: int, asked: int, shown: int
) -> None:
    reporter, out = reporter_on(bool(terminal), step_lines=bool(asked))
    reporter.begin(0, 4)
    reporter.log(1, RECORD)
    assert ("step 1/4" in out.getvalue()) == bool(shown)


def test_a_response_is_read_as_it_was_written_and_cannot_control_the_terminal() -> None:
    assert labelled("response", "<think>\na\n</think>\n\\boxed{2}") == [
        "  response  <think>",
        "            a",
        "            </think>",
        "            \\boxed{2}",
    ]
    assert labelled("response", "\x1b[2Jgone") == ["  response  \\x1b[2Jgone"]
    assert labelled("truth", "") == ["  truth     "]
    assert len(labelled("response", "x\n" * 1000)) == 6
    assert max(map(len, labelled("response", "x" * 10**6))) < 120


def test_a_validation_shows_prompt_response_and_truth() -> None:
    reporter, out = reporter_on(False, step_lines=True)
    reporter.begin(0, 4)
    row = {"prompt": "How many?", "response": "two\n\\boxed{2}", "ground_truth": "3", "score": 0.1}
    reporter.log_generations(2, [row])
    reporter.log(2, {"val/reward_score": 0.1, "val/accuracy_reward": 0.0})
    assert out.getvalue().splitlines() == [
        "validation at step 2: reward 0.100  accuracy 0.000",
        "  prompt    How many?",
        "  response  two",
        "            \\boxed{2}",
        "  truth     3",
        "  score     0.10",
    ]


def test_a_piped_table_breaks_no_path() -> None:
    path = "/data/" + "x" * 200 + "/reward.py:compute_score"
    out = io.StringIO()
    table = Table("source", "reward")
    table.add_row("train", path)
    show_table(Console(file=out), table)
    assert path in out.getvalue()


def test_the_plan_fits_100_columns_and_breaks_no_path(tmp_path: Path) -> None:
    folder = tmp_path / ("a-long-name-" * 12)
    config, provenance = load_config([*BASE, f"trainer.save_checkpoint_path={folder}"])
    out = io.StringIO()
    announce(Console(file=out), config, provenance, make_plan(config, 10**9))
    lines = out.getvalue().splitlines()
    assert f"checkpoints go to {folder}" in lines
    assert max(len(line) for line in lines if str(folder) not in line) <= 100


def test_what_is_allowed_and_seldom_meant_is_said() -> None:
    config, provenance = load_config([*BASE, "data.val_files=null", "worker.actor.optim.lr=0", "trainer.save_freq=0"])
    out = io.StringIO()
    announce(Console(file=out), config, provenance, make_plan(config, 512))
    assert "worker.actor.optim.lr=0.0: no weight changes" in out.getvalue()
    assert "nothing will be saved: trainer.save_freq" in out.getvalue()


def save(store: CheckpointStore, step: int, score: float | None) -> None:
    store.publish(
        store.write(step, lambda folder: (folder / "actor").mkdir(), {"step": step, "val_reward_score": score})
    )


def test_the_end_names_the_best_checkpoint_and_evaluates_that_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "my runs")
    for step, score in ((120, 0.917), (140, 0.9)):
        save(store, step, score)
    lines = closing_lines(store, 140, 140, "uv run r1")
    best = tmp_path / "my runs" / "global_step_120"
    assert lines == [
        "step 140/140: the run is complete",
        f"checkpoint: {tmp_path / 'my runs' / 'global_step_140'}",
        f"best in validation: {best} (reward 0.917)",
        f"next: uv run r1 eval '{best}'",
        f"      uv run r1 chat '{best}'",
        f"      uv run r1 merge '{best}' --output my-model",
        f"      uv run r1 view '{store.root}'",
        f"      uv run r1 report '{store.root}'",
    ]


def test_a_run_that_is_not_complete_or_saved_nothing_says_so(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    assert closing_lines(store, 3, 3, "r1")[1].startswith("nothing was saved: trainer.save_freq")
    save(store, 2, None)
    lines = closing_lines(store, 2, 3, "r1")
    assert lines[0] == "step 2/3: the run is not complete; to resume, run the same command again"
    assert lines[2] == f"next: r1 eval {tmp_path / 'global_step_2'}"
    assert any(line.endswith(" TASK.yaml") for line in closing_lines(store, 3, 3, "r1", has_task=False))
    without_rows = closing_lines(store, 2, 3, "r1", has_rows=False)
    assert without_rows[2] == f"next: r1 eval {tmp_path / 'global_step_2'} data.val_files=ROWS"
    assert "reward_function=reward_model" in closing_lines(store, 3, 3, "r1", reward_model=True)[2]
    idle = closing_lines(store, 3, 3, "r1", idle=3)
    assert idle[2].startswith("no step learned anything")
    assert idle[3] == f"next: r1 diagnose {tmp_path}"
    assert not any("merge" in line for line in idle)


def test_of_a_runs_folder_the_best_checkpoint_is_chosen_or_else_the_last(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "run")
    for step in (2, 4, 10):
        save(store, step, None)
    assert chosen_checkpoint(str(store.root)) == str(store.path(10))
    save(store, 12, 0.9)
    save(store, 14, 0.2)
    assert chosen_checkpoint(str(store.root)) == str(store.path(12))
    assert chosen_checkpoint(str(store.path(4))) == str(store.path(4))
    assert chosen_checkpoint("Qwen/Qwen2.5-0.5B") == "Qwen/Qwen2.5-0.5B"
    (store.root / "config.json").touch()
    assert chosen_checkpoint(str(store.root)) == str(store.root)


def test_commands_are_named_as_this_one_was_called(tmp_path: Path) -> None:
    program = tmp_path / "r1"
    program.touch(mode=0o755)
    assert typed_command(str(program), {"UV_RUN_RECURSION_DEPTH": "1"}) == "uv run r1"
    assert typed_command(str(program), {"PATH": str(tmp_path)}) == "r1"
    assert typed_command(str(program), {"PATH": "/nowhere"}) == str(program)
    assert typed_command("/packages/r1_cli/main.py", {}) == "python -m r1_cli.main"


def test_a_checkpoint_is_evaluated_as_its_run_was_configured_unless_another_file_is_named(tmp_path: Path) -> None:
    checkpoint = tmp_path / "global_step_3"
    (checkpoint / "actor").mkdir(parents=True)
    assert own_configuration(str(checkpoint), ()) == []
    (tmp_path / "experiment_config.json").write_text("{}")
    words = ("worker.rollout.val_override_config.n=4",)
    assert own_configuration(str(checkpoint), words) == [f"config={tmp_path / 'experiment_config.json'}"]
    assert own_configuration(str(checkpoint), ("config=other.yaml",)) == []
    assert own_configuration(str(tmp_path / "merged"), ()) == []
