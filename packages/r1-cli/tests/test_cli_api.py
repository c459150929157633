"""`r1_cli.open_run`: its loop is that of `r1 train`, and what ends it is recorded; functions are given to a run."""

import gc
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cli_fakes import start
from rich.console import Console
from test_cli_loop import Failing, records, run

from r1_cli.api import OpenRun, open_run, read_config
from r1_cli.build.algorithm import build_objective
from r1_cli.build.environments import environment_setups, open_environments
from r1_cli.build.own_functions import ESTIMATOR, LOSS, REWARD, OwnFunctions
from r1_cli.build.user_code import load_function
from r1_cli.config import ConfigError, RunConfig
from r1_cli.config.load import load_source
from r1_cli.jobs.resume import digest_code, report_code
from r1_cli.jobs.train import Opened
from r1_cli.runs.manifest import record_start
from r1_cli.runs.reader import RunReader
from r1_cli.script import require_main_guard
from r1_cli.train import loop
from r1_cli.train.metrics.step import NothingToLearn
from r1_core.filtering import KeepAll
from r1_core.types import LossInputs
from r1_rewards.environments.types import PolicyTurn, StepResult, ToolCall
from r1_rewards.load import load
from r1_rewards.types import RewardInput

QUICKSTART = Path(__file__).parents[3] / "examples/quickstart"
DATA = {"train_files": str(QUICKSTART / "train.parquet"), "prompt_key": "problem", "answer_key": "answer"}
SECTIONS: dict[str, Any] = {
    "data": {
        **DATA,
        "rollout_batch_size": 4,
        "format_prompt": None,
        "max_prompt_length": 64,
        "max_response_length": 20,
    },
    "worker": {
        "actor": {"global_batch_size": 4, "model": {"model_path": str(QUICKSTART / "model")}},
        "reward": {"reward_function": f"{QUICKSTART / 'reward.py'}:compute_score"},
    },
    "trainer": {"n_gpus_per_node": 1},
}
MANIFEST = {"data": {"seed": 1}, "worker": {"rollout": {"seed": 2}}}


def opened(folder: Path, **settings: Any) -> OpenRun:
    """Open a run of no weights with a manifest, as `open_run` does."""
    of = run(folder, **settings)
    with ExitStack() as stack:
        entry = stack.enter_context(record_start(folder, MANIFEST, {}, [], 0))
        for part in (of.tracker, of.recorder, of.saver):
            stack.callback(part.close)
        return OpenRun(RunConfig(), Opened(of, start(KeepAll()), entry), stack.pop_all(), Console(quiet=True))


def take(run: OpenRun, number: int, then: Callable[[], object]) -> None:
    """Take steps, and do something after one of them."""
    with run as steps:
        for step in steps:
            if step.number == number:
                then()


def end_of(folder: Path) -> str:
    return str(RunReader(folder).starts()[-1]["end"])


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("global_step_*"))


# --- the loop ---------------------------------------------------------------------------------------------------------


def test_iterating_a_run_takes_the_steps_that_the_command_takes(tmp_path: Path) -> None:
    loop.train(run(tmp_path / "command"), start(KeepAll()))
    with opened(tmp_path / "python") as steps:
        found = [(step.number, dict(step.metrics), step.groups) for step in steps]
        assert (steps.step, steps.total_steps, next(steps, None)) == (6, 6, None)
    by_command, by_python = (
        [{k: v for k, v in one.items() if not k.startswith(("timing_", "perf/"))} for one in records(tmp_path / name)]
        for name in ("command", "python")
    )
    assert by_command == by_python
    assert [{"step": number} | metrics for number, metrics, _ in found] == records(tmp_path / "python")
    assert [len(group.responses) for group in found[0][2]] == [2] * 4
    assert found[0][2][0].responses[0].score.value == 1.0
    assert end_of(tmp_path / "python") == "complete"


def test_a_stopped_run_has_saved_the_step_and_ends_its_iteration(tmp_path: Path) -> None:
    with opened(tmp_path) as steps:
        for step in steps:
            if step.number == 2:
                steps.stop()
    assert (steps.step, saved(tmp_path), end_of(tmp_path)) == (
        2,
        ["global_step_2"],
        "left after step 2, by the program",
    )
    assert next(steps, None) is None, "it is closed"
    assert [int(one["step"]) for one in steps.reader.history.steps] == [1, 2]


@pytest.mark.parametrize("way", ["break", "close", "end of the block", "unbegun"])
def test_leaving_a_run_saves_the_last_whole_step(tmp_path: Path, way: str) -> None:
    steps = opened(tmp_path)
    taken = 0 if way == "unbegun" else 3
    with steps if way != "close" else ExitStack():
        for step in steps if taken else ():
            if step.number == taken:
                break
    steps.close()
    steps.close()
    assert end_of(tmp_path) == f"left after step {taken}, by the program"
    assert saved(tmp_path) == [f"global_step_{taken}"] * bool(taken)


def test_a_run_that_is_dropped_ends_its_processes_and_the_manifest_says_so(tmp_path: Path) -> None:
    for _ in opened(tmp_path):
        break
    gc.collect()
    assert (end_of(tmp_path), saved(tmp_path)) == ("left without being closed", [])
    assert RunReader(tmp_path).starts()[0]["ended"] is not None


def test_an_iteration_that_was_left_goes_on_with_the_next_step(tmp_path: Path) -> None:
    with opened(tmp_path) as steps:
        first = next(iter(steps)).number
        assert [first, *(step.number for step in steps)] == [1, 2, 3, 4, 5, 6]
    assert end_of(tmp_path) == "complete"


def test_a_run_that_is_left_at_its_last_step_is_complete(tmp_path: Path) -> None:
    with opened(tmp_path, steps=2) as steps:
        for step in steps:
            if step.number == steps.total_steps:
                break
    assert end_of(tmp_path) == "complete"
    assert len(records(tmp_path)) == 2


def test_an_error_of_the_program_is_recorded_and_the_step_before_it_is_saved(tmp_path: Path) -> None:
    def fail() -> None:
        raise ValueError("mine\nand more")

    with pytest.raises(ValueError, match="mine"):
        take(opened(tmp_path), 2, fail)
    assert end_of(tmp_path) == "left after step 2, by the program's ValueError: mine"
    assert saved(tmp_path) == ["global_step_2"]


def test_an_error_of_a_step_closes_the_run_and_is_recorded(tmp_path: Path) -> None:
    steps = opened(tmp_path, verifier=Failing())
    with pytest.raises(NothingToLearn):
        list(steps)
    assert end_of(tmp_path).startswith("NothingToLearn: ")
    assert next(steps, None) is None
    assert saved(tmp_path) == ["global_step_3"]


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_during_a_step_saves_the_last_whole_one_and_reaches_the_program(
    tmp_path: Path, number: signal.Signals, raised: type[BaseException]
) -> None:
    class Interrupting(Failing):
        sound = 100

        def __call__(self, inputs: Any) -> Any:
            if len(self.calls) == 2:
                os.kill(os.getpid(), number)
            return super().__call__(inputs)

    handlers = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(raised) as ended:
        take(opened(tmp_path, verifier=Interrupting()), 3, lambda: pytest.fail("step 3 was taken"))
    assert (end_of(tmp_path), saved(tmp_path)) == ("left after step 2, by a signal", ["global_step_2"])
    assert not isinstance(ended.value, SystemExit) or ended.value.code == 143
    assert handlers == [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Python's own answer to Ctrl-C, also in a process that a shell started in the background, where it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_in_the_programs_own_code_interrupts_it_at_once_and_the_run_is_saved(tmp_path: Path) -> None:
    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("the signal did not interrupt")

    with pytest.raises(KeyboardInterrupt):
        take(opened(tmp_path), 2, interrupt)
    assert (end_of(tmp_path), saved(tmp_path)) == ("left after step 2, by a signal", ["global_step_2"])


# --- configuration ----------------------------------------------------------------------------------------------------


def test_a_configuration_is_typed_checked_and_changed_by_settings() -> None:
    config = read_config(SECTIONS, "trainer.max_steps=3")
    assert (config.trainer.max_steps, type(config)) == (3, RunConfig)
    changed = read_config(config, "trainer.max_steps=4", "worker.rollout.n=3")
    assert (changed.trainer.max_steps, changed.worker.rollout.n, changed.worker.actor) == (4, 3, config.worker.actor)
    with pytest.raises(ConfigError, match=r"max_stepz=3 \(command line\): unknown key; did you mean trainer\.max_step"):
        read_config(config, "trainer.max_stepz=3")
    with pytest.raises(ConfigError, match=r"data\.rollout_batch_sise=4 \(Python\): unknown key"):
        read_config({"data": {"rollout_batch_sise": 4}})


def test_sections_that_are_built_in_python_set_what_was_set_and_no_more() -> None:
    config, before = load_source(SECTIONS)
    _, again = load_source(config)
    assert {*again.origins} == {*before.origins}
    assert not again.is_set("worker.critic"), "its sizes follow the actor's"


class Refused(Exception):
    pass


@pytest.mark.parametrize(
    ("setting", "avoided_by"),
    [
        ("trainer.max_staleness=1", "trainer.max_staleness=0"),
        ("data.filter_overlong_prompts_workers=2", "data.filter_overlong_prompts_workers=1"),
        ("trainer.val_freq=-1", None),
    ],
)
def test_a_run_that_starts_processes_by_python_looks_for_the_guard_before_anything_else(
    setting: str, avoided_by: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def refuse(*_: object) -> None:
        raise Refused

    monkeypatch.setattr("r1_cli.api.require_main_guard", asked.append)
    monkeypatch.setattr("r1_cli.api.open_folder", refuse)
    words = ["data.filter_overlong_prompts_workers=1", setting, f"trainer.save_checkpoint_path={tmp_path}"]
    before = [*logging.getLogger("r1").handlers], logging.getLogger("r1").propagate
    with pytest.raises(Refused):
        open_run(SECTIONS, *words, quiet=True)
    assert asked == [avoided_by] * (avoided_by is not None)
    assert before == ([*logging.getLogger("r1").handlers], logging.getLogger("r1").propagate)
    assert not [*tmp_path.iterdir()]


def test_a_loss_that_only_this_process_has_is_refused_on_several_devices(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    words = ["trainer.n_gpus_per_node=2", f"trainer.save_checkpoint_path={tmp_path}"]
    with pytest.raises(ConfigError, match=r"loss_type: is a function that only this process can call, and ranks"):
        open_run(SECTIONS, *words, loss=lambda inputs: (inputs.logprobs, {}), quiet=True)


# --- functions --------------------------------------------------------------------------------------------------------

WEIGHT = 0.5


def weighted(response: str, ground_truth: str) -> float:
    return WEIGHT * (ground_truth in response)


def close_over(weight: float) -> Any:
    return lambda response, ground_truth: weight * (ground_truth in response)


def given(tmp_path: Path, **functions: Any) -> tuple[RunConfig, OwnFunctions]:
    """Return the configuration that names these functions in the run's folder."""
    own = OwnFunctions(tmp_path / "draft")
    for name, function in functions.items():
        own.add({"reward": REWARD, "loss": LOSS, "estimator": ESTIMATOR}[name], function)
    config, _ = load_source(SECTIONS, own.words())
    return own.moved(config, tmp_path / "run"), own


def test_a_function_of_a_module_is_named_by_its_file(tmp_path: Path) -> None:
    config, own = given(tmp_path, reward=weighted)
    assert Path(str(config.worker.reward.reward_function).removesuffix(":weighted")).resolve() == Path(__file__)
    assert not own.called_here
    assert not (tmp_path / "run").exists()


IN_A_SCRIPT = """
import re, sys
from pathlib import Path
from typing import Literal
from r1_cli.build.own_functions import REWARD, OwnFunctions

PATTERN, data = re.compile(r"\\d+"), object()

def found(text: str, kind: Literal["all"] = "all"):
    data = PATTERN.findall(text)  # a local variable that is called as the script's object
    return data

def reward(response, ground_truth):
    return found.weight * (ground_truth in found(response))

found.weight = 0.25
own = OwnFunctions(Path(sys.argv[1]))
own.add(REWARD, reward)
print(own.words()[0], bool(own.called_here))
"""


def test_a_function_of_a_script_is_written_with_all_that_it_uses(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(IN_A_SCRIPT)
    words = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "draft")]
    told = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert told == f"{REWARD}={tmp_path}/draft/reward/reward.py:reward False\n"
    with load(f"{tmp_path}/draft/reward/reward.py:reward") as verifier:
        assert [one.value for one in verifier([RewardInput("a 7", "7"), RewardInput("a 8", "7")])] == [0.25, 0.0]


def test_a_closure_is_called_in_this_process_and_its_record_tells_one_from_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    digests = set()
    for weight in (0.5, 0.75):
        folder = tmp_path / str(weight)
        config, own = given(folder, reward=close_over(weight))
        spec = str(config.worker.reward.reward_function)
        assert Path(spec.partition(":")[0]).is_relative_to(folder / "run/code/reward")
        assert [*own.called_here] == [spec]
        assert "it is called in this process, so nothing can end it if it hangs or crashes" in caplog.text
        digests |= {*digest_code({"reward": spec}).values()}
        with load(spec) as verifier:  # as `r1 eval` does
            (score,) = verifier([RewardInput("7", "7")])
        assert score.error is not None
        assert "pass it to r1_cli.open_run(reward=…)" in score.error.message
    assert len(digests) == 2


def test_a_loss_that_closes_over_a_variable_is_the_one_that_is_trained_with(tmp_path: Path) -> None:
    scale = 3.0

    def loss(inputs: LossInputs) -> Any:
        return scale * -inputs.logprobs * inputs.advantages, {}

    loss.needs = ("rollout_logprobs",)  # type: ignore[attr-defined]
    config, own = given(tmp_path, loss=loss)
    with own.given():
        built = build_objective(config)
        assert built.policy_loss.function is loss  # type: ignore[attr-defined]
        assert "rollout_logprobs" in built.needs
    with pytest.raises(RuntimeError, match=r"pass it to r1_cli\.open_run"):
        build_objective(config).policy_loss.function(None)  # type: ignore[attr-defined]


TOOL = """
def lookup(word: str) -> str:
    '''Look a word up.

    Args:
        word: The word.
    '''
    return word.upper()
"""


def test_tools_are_called_in_their_processes_and_one_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TOOL)
    lookup = load_function(tmp_path / "mine.py", "lookup")
    own = OwnFunctions(tmp_path / "draft")
    own.add_tools([lookup, "calculator"])
    config, _ = load_source(SECTIONS, own.words())
    config = own.moved(config, tmp_path / "run")
    assert config.worker.rollout.multi_turn.enable
    pool = open_environments(config, environment_setups(config)[0])
    try:
        pool.start("one", {})
        pool.poll()
        calls = ToolCall("lookup", {"word": "hi"}), ToolCall("calculator", {"expression": "6*7"})
        pool.step("one", PolicyTurn("", calls))
        ((_, answer),) = pool.poll()
    finally:
        pool.close()
    assert isinstance(answer, StepResult)
    assert [message["content"] for message in answer.messages] == ["HI", "42"]
    with pytest.raises(ConfigError, match=r"multi_turn\.tools: tool '<lambda>'.*runs in a process of its own"):
        own.add_tools([lambda word: word])
    with pytest.raises(ConfigError, match="tool 'partial'"):
        own.add_tools([partial(lookup)])


def test_code_that_changed_since_the_last_start_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (file := tmp_path / "mine.py").write_text("def reward(response, ground_truth): return 1.0\n")
    settings = {"worker": {"reward": f"{file}:reward", "other": "math"}, "data": [{"tools": [str(file)]}], "n": 1}
    before = digest_code(settings)
    assert [*before] == [f"{file}:reward", str(file)]
    report_code(before, digest_code(settings))
    report_code({}, digest_code(settings))
    assert not caplog.text
    file.write_text("def reward(response, ground_truth): return 0.0\n")
    report_code(before, digest_code({"reward": f"{file}:reward"}))
    assert caplog.messages == [f"the code of {file}:reward has changed since the last start"]


# --- scripts ----------------------------------------------------------------------------------------------------------

IMPORT = "from r1_cli.script import require_main_guard\n"
CALL = "require_main_guard('trainer.max_staleness=0')\nprint('runs')\n"
GUARD = "if __name__ == '__main__':\n"
FUNCTION = "def main():\n    " + CALL.replace("\nprint", "\n    print") + "\n"
SCRIPTS = {
    "at the top": (CALL, False),
    "in a loop": ("for _ in 'a':\n    " + CALL, False),
    "below the guard": (GUARD + "    " + CALL.replace("\nprint", "\n    print"), True),
    "behind the guard": (GUARD + "    pass\n" + CALL, False),
    "in a function called below the guard": (FUNCTION + GUARD + "    main()\n", True),
    "in a function called at the top": (FUNCTION + GUARD + "    pass\nmain()\n", False),
}


@pytest.mark.parametrize("place", SCRIPTS)
def test_a_script_that_worker_processes_would_run_again_is_refused_in_a_sentence(tmp_path: Path, place: str) -> None:
    text, runs = SCRIPTS[place]
    (file := tmp_path / "script.py").write_text(IMPORT + text)
    ran = subprocess.run([sys.executable, str(file)], capture_output=True, text=True)
    assert (ran.returncode == 0, "runs" in ran.stdout) == (runs, runs), ran.stderr
    if not runs:
        last = ran.stderr.splitlines()[-1]
        assert last.startswith(f"RuntimeError: {file} is run again by every worker process")
        assert last.endswith("or set trainer.max_staleness=0 so that no such process is needed")


def test_a_worker_process_that_runs_the_script_again_is_stopped_there(tmp_path: Path) -> None:
    script = (
        "import json, multiprocessing\nfrom r1_cli.script import require_main_guard\n"
        "if __name__ == '__main__':\n"
        "    process = multiprocessing.get_context('spawn').Process(target=json.loads, args=('1',))\n"
        "    process.start()\n    process.join()\n    print(process.exitcode)\n"
        "else:\n    require_main_guard('a.b=1')\n"
    )
    (file := tmp_path / "script.py").write_text(script)
    ran = subprocess.run([sys.executable, str(file)], capture_output=True, text=True)
    assert ran.stdout == "1\n"
    assert f"RuntimeError: {file} is run again by every worker process" in ran.stderr


def test_a_notebook_and_a_typed_command_need_no_guard() -> None:
    code = "from r1_cli.script import require_main_guard; require_main_guard('a.b=1')"
    subprocess.run([sys.executable, "-c", code], check=True)
    require_main_guard("a.b=1")  # as a test does, which another program imports
