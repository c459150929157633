"""Runs of several turns with an environment: the whole command, its record, and a resume."""

import io
import json
import random
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pyarrow.parquet as pq
import pytest
from endtoend import QUICKSTART, R1, ROOT, SMALL, read_log, without_clock
from episode_runs import AGENT, agents, calls_of, episodes, write_environment
from PIL import Image
from transformers import AutoProcessor, AutoTokenizer

from r1_cli.runs.diagnose.answers import diagnose_run
from r1_cli.runs.reader import RunReader
from r1_data.turns.calls import FORMATS
from r1_data.turns.calls.parse import parse_calls
from r1_data.turns.calls.types import signatures
from r1_rewards.environments.schema import function_schema
from r1_rewards.environments.tools.python import python
from r1_rollout.session import SteppedSession
from r1_rollout.types import Completion

# Changes the policy's turns before the last message.
SHOUTING = """\
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}
{{- message.content if loop.last or message.role != 'assistant' else '!' + message.content }}
{%- else %}{% for part in message.content %}
{%- if part.type == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def words(folder: Path, steps: int, *own: str) -> list[str]:
    return [
        "train", QUICKSTART, *SMALL, f"trainer.save_checkpoint_path={folder}", f"trainer.max_steps={steps}",
        "worker.actor.optim.lr_scheduler_type=constant", "trainer.val_before_train=false", "trainer.val_freq=-1",
        "trainer.save_freq=1", "trainer.save_limit=-1", *own,
    ]  # fmt: skip


def test_a_run_with_an_environment_resumes_to_the_bit_and_records_its_turns(tmp_path: Path, r1: R1) -> None:
    whole, parts, own = tmp_path / "whole", tmp_path / "parts", episodes(write_environment(tmp_path))
    assert r1(*words(whole, 3, *own)).exit_code == 0
    assert r1(*words(parts, 2, *own)).exit_code == 0
    assert r1(*words(parts, 3, *own)).exit_code == 0
    log = read_log(whole)
    assert without_clock(read_log(parts)) == without_clock(log)
    assert any(record["rollout/groups_kept"] for record in log)  # so that episodes were in a checkpoint
    name = RunReader(whole).sample_path(3).relative_to(whole)
    without_seconds = [pq.read_table(folder / name).drop_columns(["turns"]) for folder in (parts, whole)]
    assert without_seconds[0].equals(without_seconds[1])

    rows = pq.read_table(whole / name).to_pylist()
    for row in rows:
        assert [turn["role"] for turn in row["turns"]] == ["assistant", "environment"] * 2
        assert row["stop_reason"] == "done"
        assert len(row["sampled"]) == len(row["tokens"]) == len(row["advantages"]) == len(row["old_logprobs"])
        gaps = [abs(a - b) for a, b in zip(row["old_logprobs"], row["rollout_logprobs"], strict=True)]
        assert max(gaps) < 1e-4 or row["weight_version"] < 2
        assert all(row["advantages"][t] == 0 for t, chosen in enumerate(row["sampled"]) if not chosen)
        assert len(row["media"]) == 2
        assert all((whole / "media" / file).is_file() for file in row["media"])
    assert log[-1]["episode/turns/mean"] == 2
    assert log[-1]["response_length/max"] <= 16  # tokens of the environment do not count


@pytest.mark.slow
@pytest.mark.parametrize("scheduling", ["arrival", "rounds"])
def test_a_replay_repeats_answers_that_no_call_gives_again_and_names_what_gave_them(
    scheduling: str, tmp_path: Path, r1: R1
) -> None:
    environment, run = write_environment(tmp_path), tmp_path / "run"
    r1(*words(run, 2, *episodes(environment, "Dice", scheduling=scheduling, max_concurrent=7)))
    calls = calls_of(environment)
    told = r1("replay", run, "--step", "2").output
    assert "tools and environments were not called" in told
    assert "step 2 is the same to the bit: 16 answers" in told
    assert calls_of(environment) == calls
    again = r1("replay", run, "--step", "2", "--tools", "again", ok=False)
    assert again.exit_code == 1
    assert "step() is not a function of its input: " in again.output
    assert ("numbers are compared up to 0.001" in again.output) == (scheduling == "arrival")
    for path in (run / "answers").glob("*"):
        path.unlink()
    gone = r1("replay", run, "--step", "2", ok=False)
    assert gone.exit_code == 2
    assert "has no answers of tools, environments or agents; `r1 replay --tools again`" in gone.output


@pytest.mark.slow
def test_a_run_whose_template_changes_earlier_turns_resumes_to_the_bit(tmp_path: Path, r1: R1) -> None:
    whole, parts, template = tmp_path / "whole", tmp_path / "parts", tmp_path / "shouting.jinja"
    template.write_text(SHOUTING)
    own = [*episodes(write_environment(tmp_path), history="template"), f"data.override_chat_template={template}"]
    assert r1(*words(whole, 3, *own)).exit_code == 0
    assert r1(*words(parts, 2, *own)).exit_code == 0
    assert r1(*words(parts, 3, *own)).exit_code == 0
    assert "step 3 is the same to the bit" in r1("replay", whole, "--step", "3").output
    log = read_log(whole)
    assert without_clock(read_log(parts)) == without_clock(log)
    assert any(record["rollout/groups_kept"] for record in log)  # so that forks were in a checkpoint
    assert all(record["episode/forks"] == 1 for record in log)
    name = RunReader(whole).sample_path(3).relative_to(whole)
    tables = [pq.read_table(folder / name) for folder in (parts, whole)]
    assert tables[0].drop_columns(["turns"]).equals(tables[1].drop_columns(["turns"]))
    rows = tables[0].to_pylist()
    assert [row["stop_reason"] for row in rows] == ["forked", "done"] * (len(rows) // 2)
    for fork, main in zip(rows[::2], rows[1::2], strict=True):
        assert fork["episode"] == main["episode"]
        assert len(main["prompt_tokens"]) > len(fork["prompt_tokens"]) + len(fork["tokens"])
        assert (len(fork["media"]), len(main["media"])) == (1, 2)
        for row in (fork, main):
            gaps = [abs(a - b) for a, b in zip(row["old_logprobs"], row["rollout_logprobs"], strict=True)]
            assert max(gaps) < 1e-4 or row["weight_version"] < 2
        assert {*fork["advantages"]} == {*main["advantages"]}


@pytest.mark.slow
def test_each_source_of_a_run_has_tools_or_an_environment_of_its_own(tmp_path: Path, r1: R1) -> None:
    sums = "files: examples/quickstart/train.parquet, name: sums, tools: [calculator]"
    albums = f"files: examples/quickstart/val.parquet, name: albums, environment: {write_environment(tmp_path)}:Album"
    own = [
        f"data.sources=[{{{sums}, weight: 1}}, {{{albums}, weight: 1}}]",
        "data.train_files=null", "data.val_files=null", "data.max_prompt_length=1900", "data.max_response_length=60",
        "worker.rollout.multi_turn.enable=true", "worker.rollout.multi_turn.max_turn_tokens=8",
    ]  # fmt: skip
    run = tmp_path / "run"
    told = " ".join(r1("check", *words(run, 2, *own)[1:]).output.split())
    assert "episodes: tools answer the policy: calculator" in told
    assert "episodes of albums: the environment" in told
    assert r1(*words(run, 2, *own)).exit_code == 0
    rows = pq.read_table(RunReader(run).sample_path(2)).to_pylist()
    assert {row["source"] for row in rows} == {"sums", "albums"}
    for row in rows:
        assert ("calculator" in row["prompt"]) == (row["source"] == "sums")
        assert row["stop_reason"] in (("answered", "turn_tokens") if row["source"] == "sums" else ("done",))


TOOLS = """
import time

def add(a: int, b: int) -> str:
    '''Add two numbers.

    Args:
        a, b: the numbers.
    '''
    return str(a + b)

def read(page: int) -> str:
    '''Read a page.

    Args:
        page: its number.
    '''
    time.sleep(3)
    return "word " * 2000
"""


OF_EPISODES = {
    "no_tool_calls", "calls_until_limit", "malformed_calls", "slow_tools", "repeated_calls", "dropped_answers",
}  # fmt: skip


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("turn", "found"),
    [
        ("I know it.", {"no_tool_calls"}),
        (call("add", a=1, b=2), {"calls_until_limit", "repeated_calls"}),
        (call("add", a=1), {"malformed_calls", "repeated_calls"}),
        (call("read", page=1), {"slow_tools", "dropped_answers"}),
    ],
)
def test_what_is_wrong_with_episodes_is_diagnosed_in_the_record_of_a_run(
    turn: str, found: set[str], tmp_path: Path, r1: R1, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tools.py").write_text(TOOLS)
    tokens = AutoTokenizer.from_pretrained(ROOT / "examples/quickstart/model")(turn + "<|im_end|>")["input_ids"]
    poll = SteppedSession.poll

    def say(session: SteppedSession, timeout: float | None = None) -> list[tuple[str, list[Completion]]]:
        said = [-1.0] * len(tokens)
        return [
            (key, [Completion(tokens, said, "stop", one.weight_version) for one in completions])
            for key, completions in poll(session, timeout)
        ]

    monkeypatch.setattr(SteppedSession, "poll", say)
    own = {"enable": "true", "tools": f"[{tmp_path}/tools.py]", "max_assistant_turns": 3, "max_turn_tokens": 48}
    r1(
        "train", QUICKSTART, *SMALL, f"trainer.save_checkpoint_path={tmp_path / 'run'}", "trainer.max_steps=3",
        "trainer.val_before_train=false", "trainer.val_freq=-1", "trainer.save_freq=-1", "data.rollout_batch_size=2",
        "data.max_prompt_length=2048", "data.max_response_length=512",
        *(f"worker.rollout.multi_turn.{key}={value}" for key, value in own.items()),
    )  # fmt: skip
    names = {one.signature for one in diagnose_run(RunReader(tmp_path / "run"))}
    assert names & OF_EPISODES == found


@pytest.fixture
def prepare(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> ModuleType:
    """The module prepare.py of an example: of look, or of the one that the test names."""
    monkeypatch.syspath_prepend(str(ROOT / "examples" / getattr(request, "param", "look")))
    monkeypatch.delitem(sys.modules, "prepare", raising=False)
    return import_module("prepare")


def test_the_example_covers_pictures_and_its_environment_uncovers_them(prepare: ModuleType, tmp_path: Path) -> None:
    environment = import_module("environment")
    rows = pq.read_table(ROOT / "examples/quickstart/val.parquet").slice(0, 3).to_pylist()
    prepare.write_rows(rows, tmp_path / "rows.parquet")
    for before, row in zip(rows, pq.read_table(tmp_path / "rows.parquet").to_pylist(), strict=True):
        assert (row["problem"], row["answer"]) == (before["problem"], before["answer"])
        cover = Image.open(io.BytesIO(row["images"][0]["bytes"])).convert("RGB")
        assert len(cover.getcolors()) == 1
        seen = {}
        for blind in (False, True):
            look = environment.Look(blind=blind)
            look.reset(row)
            seen[blind] = look.step("?")
            assert look.step("<think>*</think>") is None
        true = Image.open(io.BytesIO(before["images"][0]["bytes"])).convert("RGB")
        assert seen[False].tobytes() == true.tobytes()
        assert seen[True].tobytes() == cover.tobytes()


def test_the_lessons_of_the_example_teach_the_assistants_turns_only(prepare: ModuleType) -> None:
    processor = AutoProcessor.from_pretrained(ROOT / "examples/quickstart/model")
    rng = random.Random(1)
    batch = import_module("warm_start").collate(processor, [prepare.draw_lesson(rng, number) for number in range(4)])
    for number, (tokens, labels) in enumerate(zip(batch["input_ids"], batch["labels"], strict=True)):
        taught = processor.tokenizer.decode(tokens[labels != -100])
        assert taught.count("<|im_end|>") == 2 - number % 2
        assert taught.startswith("?<|im_end|><think>" if number % 2 == 0 else "<think>")


@pytest.mark.parametrize("prepare", ["sums"], indirect=True)
def test_the_lessons_of_sums_call_as_the_template_does_and_their_results_are_those_of_the_tool(
    prepare: ModuleType,
) -> None:
    rng = random.Random(1)
    _, tokenizer = import_module("warm_start").build_text_model(prepare.CORPUS, 1)
    lessons = [prepare.draw_lesson(rng, number, sure=True) for number in range(3)]
    batch = import_module("warm_start").collate(tokenizer, lessons)
    taught = [
        tokenizer.decode(tokens[labels != -100])
        for tokens, labels in zip(batch["input_ids"], batch["labels"], strict=True)
    ]
    assert [text.count("<|im_end|>") for text in taught] == [1, 1, 2]
    (call,) = parse_calls(FORMATS["hermes"], taught[2], signatures([function_schema(python)]))
    result = next(message["content"] for message in lessons[2].messages if message["role"] == "tool")
    assert python(**call.arguments) == result
    assert taught[2].endswith(f"\\boxed{{{result.strip()}}}<|im_end|>")


# The same as a function.
FUNCTION = """
import json, os, runpy
from pathlib import Path


def solve(row, *, base_url, api_key):
    os.environ |= {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key, "R1_ROW": json.dumps(row)}
    runpy.run_path(str(Path(__file__).with_name("agent.py")))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["python {}/agent.py", "{}/function.py:solve"])
def test_a_run_trains_an_agent_that_knows_nothing_but_an_address_and_a_replay_repeats_it(
    kind: str, tmp_path: Path, r1: R1
) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "function.py").write_text(FUNCTION)
    r1(*words(tmp_path, 2, *agents(kind.format(tmp_path))))
    log = read_log(tmp_path)
    assert [record["episode/turns/mean"] for record in log] == [3, 3]
    assert [record["episode/forks"] for record in log] == [1, 1]
    reader = RunReader(tmp_path)
    for step in (1, 2):
        rows = pq.read_table(reader.sample_path(step)).to_pylist()
        assert len({row["episode"] for row in rows}) * 2 == len(rows)
        for row in rows:
            gaps = [abs(a - b) for a, b in zip(row["old_logprobs"], row["rollout_logprobs"], strict=True)]
            assert max(gaps) < 1e-5
            assert not any(a for a, chosen in zip(row["advantages"], row["sampled"], strict=True) if not chosen)
    (tmp_path / "agent.py").write_text("raise SystemExit('a replay runs no agent')")
    told = r1("replay", tmp_path, "--step", "2").output
    assert "the agents did not run: their requests and rewards are those of the record" in told
    assert "step 2 is the same to the bit: 32 answers" in told


@pytest.mark.slow
def test_agents_run_again_for_a_replay_that_is_asked_to_and_one_that_is_no_function_is_named(
    tmp_path: Path, r1: R1
) -> None:
    agent, run = tmp_path / "agent.py", tmp_path / "run"
    agent.write_text(AGENT + 'open("calls", "a").write(".")\n'.replace("calls", str(tmp_path / "calls")))
    r1(*words(run, 2, *agents(f"python {agent}")))
    calls = (tmp_path / "calls").stat().st_size
    told = r1("replay", run, "--step", "2", "--tools", "again").output
    assert (tmp_path / "calls").stat().st_size >= calls + 16
    assert "all messages of agents to equal turns are those of the record" in told
    assert "step 2 is the same up to 0.001: 32 answers" in told
    agent.write_text(AGENT.replace('("Again?", "Sure?")', '(os.urandom(2).hex(), "Sure?")'))
    again = r1("replay", run, "--step", "2", "--tools", "again", ok=False)
    assert again.exit_code == 1
    assert "the agent is not a function of its input: " in again.output
    assert "not the same: " in again.output
