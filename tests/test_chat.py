"""`r1 chat`: answers and prompts against transformers' and a run's record, and what the terminal does with them."""

import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import families
import pandas
import pytest
import tokenizers
import torch
from click.testing import CliRunner, Result
from endtoend import QUICKSTART, R1, ROOT, SMALL
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, PreTrainedTokenizerFast

from r1_cli.config import load_config
from r1_cli.jobs.chat import Chat, ChatSampling, TextStream, ThoughtSplitter, build_reader, open_chat
from r1_cli.jobs.chat_terminal import Terminal, interruptions
from r1_cli.main import main

MODEL = "examples/quickstart/model"
LORA = ["worker.actor.model.lora.rank=4", "worker.actor.optim.lr=5e-2"]  # so that it shows


def say(*words: str | Path, stdin: str = "How many shapes?") -> Result:
    return CliRunner().invoke(main, ["chat", *map(str, words)], input=stdin)


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("pictures") / "one.png"
    Image.radial_gradient("L").resize((112, 112)).convert("RGB").save(path)
    return str(path)


@pytest.fixture(scope="module")
def run(r1: R1, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of an adapter under prompts of its own."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "format.jinja").write_text("{{ content }} Answer briefly.")
    r1(
        "train", QUICKSTART, *SMALL, *LORA, "trainer.max_steps=2", "trainer.save_freq=1", "trainer.val_freq=1",
        "trainer.val_before_train=false", f"data.format_prompt={folder}/format.jinja", "data.system_prompt=Count.",
        f"trainer.save_checkpoint_path={folder}/run", "data.max_prompt_length=128",
        "worker.reward.reward_function=math", "trainer.save_limit=3",
    )  # fmt: skip
    return folder / "run"


@pytest.fixture
def chat(r1: R1) -> Iterator[Chat]:
    config, _ = load_config([QUICKSTART, f"worker.actor.model.model_path={MODEL}"], command="chat")
    with open_chat(config, ChatSampling(temperature=0.0)) as (found, _):
        yield found


# --- answers ----------------------------------------------------------------------------------------------------------


def test_greedy_answers_of_several_turns_with_pictures_are_those_of_transformers(chat: Chat, picture: str) -> None:
    processor = AutoProcessor.from_pretrained(MODEL)
    model = AutoModelForImageTextToText.from_pretrained(MODEL, dtype=torch.float32)
    messages: list[dict[str, Any]] = []
    images: list[Image.Image] = []
    for turn, (question, shown) in enumerate((("How many?", [picture]), ("And red?", []), ("Here?", [picture] * 2))):
        pieces = list(chat.ask(question, shown))
        images += [Image.open(path).convert("RGB") for path in shown]
        content = [{"type": "image"} for _ in shown] + [{"type": "text", "text": question}]
        messages.append({"role": "user", "content": content})
        text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        inputs = processor(text=[text], images=images, return_tensors="pt", add_special_tokens=False)
        prompt = inputs["input_ids"].shape[1]
        with torch.inference_mode():
            (tokens,) = model.generate(**inputs, max_new_tokens=20, do_sample=False)
        answer = chat.answers[turn]
        assert answer.prompt.token_ids == inputs["input_ids"][0].tolist()
        assert answer.tokens == tokens[prompt:].tolist()
        decoded = processor.tokenizer.decode(tokens[prompt:], skip_special_tokens=True)
        assert "".join(pieces) == answer.text == decoded
        messages.append({"role": "assistant", "content": decoded})
    assert sum(len(answer.tokens) for answer in chat.answers) > 10


def test_greedy_answers_of_a_text_model_are_those_of_transformers(r1: R1, tmp_path: Path) -> None:
    path = families.save_model("qwen3", tmp_path)
    model, tokenizer, messages = families.make_model("qwen3"), families.make_tokenizer(), list[dict[str, str]]()
    config, _ = load_config([f"worker.actor.model.model_path={path}", "data.system_prompt=Hm."], command="chat")
    with open_chat(config, ChatSampling(temperature=0.0, max_tokens=40)) as (chat, _):
        for question in ("How many?", "And red? \U0001f534", "Why?"):
            answer = "".join(chat.ask(question))
            messages += [{"role": "system", "content": "Hm."}] * (not messages) + [
                {"role": "user", "content": question}
            ]
            inputs = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
            found = model.generate(**inputs, **ends, max_new_tokens=40, do_sample=False)
            tokens = found[0, inputs["input_ids"].shape[1] :].tolist()
            assert chat.answers[-1].tokens == tokens
            assert answer == tokenizer.decode(tokens, skip_special_tokens=True)
            messages.append({"role": "assistant", "content": answer})
    assert [answer.ended for answer in chat.answers] == ["length"] * 3


def test_an_answer_is_streamed_token_by_token_while_it_is_sampled(chat: Chat, picture: str) -> None:
    seen = []
    for _ in chat.ask("How many?", [picture]):
        seen.append(len(chat.session.decoded("answer 1")))
    tokens = chat.answers[0].tokens
    assert seen[:3] == [1, 2, 3]
    assert len(seen) >= len(tokens) - 1


def test_the_prompts_of_a_run_are_those_that_it_trained_with(run: Path, tmp_path: Path) -> None:
    rows = pandas.read_parquet(ROOT / "examples/quickstart/train.parquet")
    record = pandas.read_parquet(run / "samples")
    trained = record[record.phase == "train"].iloc[0]
    row = rows.iloc[int(trained.prompt_id.rpartition(":")[2]) - 1]
    (tmp_path / "shown.png").write_bytes(row.images[0]["bytes"])
    words = [
        f"config={run}/experiment_config.json",
        "data.train_files=gone.parquet",
        f"worker.actor.model.model_path={MODEL}",
    ]
    with open_chat(load_config(words, command="chat")[0], ChatSampling(max_tokens=1)) as (chat, lines):
        list(chat.ask(row.problem, [str(tmp_path / "shown.png")]))
        list(chat.ask("And now?"))
    first, second = (answer.prompt for answer in chat.answers)
    assert first.text == trained.prompt
    assert first.token_ids == trained.prompt_tokens.tolist()
    assert "Count." in first.text
    assert "Answer briefly." in first.text
    assert second.text.startswith(first.text)
    assert second.text.count("Count.") == 1
    assert "And now? Answer briefly." in second.text
    assert any("format.jinja" in line and "Count." in line for line in lines)


# --- what is loaded ---------------------------------------------------------------------------------------------------


def test_a_runs_folder_its_best_checkpoint_an_adapter_and_the_merged_folder_answer_alike(
    run: Path, r1: R1, tmp_path: Path, picture: str
) -> None:
    best = json.loads((run / "checkpoint_tracker.json").read_text())["best_global_step"]
    checkpoint, merged = run / f"global_step_{best}", tmp_path / "merged"
    r1("merge", checkpoint, "--output", merged)
    assert (checkpoint / "actor/adapter_model.safetensors").is_file()
    shutil.copytree(checkpoint / "actor", tmp_path / "peft", ignore=lambda *_: {"config.json", "learner.json"})
    words = [
        [run],
        [checkpoint],
        [checkpoint / "actor"],
        [tmp_path / "peft", run / "experiment_config.json"],
        [merged, run / "experiment_config.json"],
        [run, "worker.rollout.servers.urls=[http://127.0.0.1:9]", "worker.rollout.name=vllm"],
    ]
    found = [say(*one, "--seed", 3, "--image", picture) for one in words]
    assert all(one.exit_code == 0 for one in found), found[0].output
    assert len({one.stdout for one in found}) == 1
    base = say(MODEL, run / "experiment_config.json", "--seed", 3, "--image", picture)
    assert base.exit_code == 0
    assert base.stdout != found[0].stdout
    assert f"global_step_{best}" in found[0].stderr
    assert "Count." in found[2].stderr
    alone = say(merged, "--seed", 3, "--image", picture, "data.min_pixels=3136", "--max-tokens", 20)
    assert "r1_prompts.json" in alone.stderr
    assert "system prompt Count." in alone.stderr
    plain = say(merged, "--plain", "--image", picture)
    assert "format prompt none, system prompt none" in plain.stderr
    other = say(run, "--seed", 4, "--image", picture)
    assert other.stdout != found[0].stdout


@pytest.mark.slow
def test_a_moved_run_whose_format_prompt_is_gone_has_its_own_copy(
    run: Path, picture: str, tmp_path: Path, r1: R1
) -> None:
    moved = shutil.copytree(run, tmp_path / "moved")
    asked = "--seed", 3, "--image", picture
    expected, file = say(run, *asked).stdout, run.parent / "format.jinja"
    best = json.loads((run / "checkpoint_tracker.json").read_text())["best_global_step"]
    assert expected != say(run, *asked, "data.format_prompt=null").stdout
    file.rename(gone := tmp_path / "gone.jinja")
    try:
        for words in ([moved], [moved / f"global_step_{best}/actor", moved / "experiment_config.json"]):
            assert say(*words, *asked).stdout == expected
        r1("eval", moved, "data.val_files=examples/quickstart/val.parquet[:2]")
        r1("merge", moved, "--output", tmp_path / "merged")
    finally:
        gone.rename(file)
    prompts = json.loads((tmp_path / "merged/r1_prompts.json").read_text())
    assert prompts["format_prompt"] == "{{ content }} Answer briefly."


def test_piped_input_is_one_question_whose_answer_alone_is_printed(r1: R1) -> None:
    found = say(MODEL, QUICKSTART, "--temperature", 0, stdin="How many\nshapes?\n")
    assert found.exit_code == 0, found.output
    assert "\\boxed{" in found.stdout
    assert found.stdout.count("\n") == 1
    assert "<think>" not in found.stdout
    assert "of thoughts" in found.stderr
    shown = say(MODEL, QUICKSTART, "--temperature", 0, "--thoughts", stdin="How many\nshapes?\n")
    assert shown.stdout.endswith(found.stdout)
    assert len(shown.stdout) > len(found.stdout)


@pytest.mark.parametrize(
    ("words", "stdin", "told"),
    [
        ([MODEL], " \n", "holds no question"),
        (["no/such/folder"], "x", "no/such/folder: no such folder"),
        ([QUICKSTART], "x", "config.yaml: no such folder, but a file"),
        ([MODEL, "--image", "nowhere.png"], "x", "nowhere.png: no such picture"),
        ([MODEL, "--image", QUICKSTART], "x", "picture"),
        ([MODEL, "data.format_prompt=gone.jinja"], "x", "data.format_prompt"),
        ([MODEL, "--temperature", "1e-9"], "x", "temperature"),
        ([MODEL], "<|image_pad|>", "<|image_pad|>"),
        (["ADAPTER"], "x", "does not name the base model"),
    ],
)
def test_what_cannot_be_asked_is_one_sentence(r1: R1, words: list[str], stdin: str, told: str, tmp_path: Path) -> None:
    adapter = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    found = say(*(str(tmp_path) if word == "ADAPTER" else word for word in words), stdin=stdin)
    assert found.exit_code == 2
    assert told in found.stderr
    assert "Traceback" not in found.output


def test_a_model_of_text_refuses_pictures_and_knows_its_reach(r1: R1, tmp_path: Path, picture: str) -> None:
    families.save_model("qwen3", tmp_path / "text")
    found = say(tmp_path / "text", "--image", picture)
    assert found.exit_code == 2
    assert "reads text only" in found.stderr
    reach = json.loads((tmp_path / "text/config.json").read_text())["max_position_embeddings"]
    assert say(tmp_path / "text", "--max-tokens", reach * 2, stdin="x" * (reach - 40)).exit_code == 0
    found = say(tmp_path / "text", stdin="x" * reach)
    assert found.exit_code == 2
    assert f"the model knows {reach} positions" in found.stderr


# --- text -------------------------------------------------------------------------------------------------------------


def test_the_space_before_a_word_is_kept_where_a_tokenizer_drops_that_of_the_first_token() -> None:
    words = tokenizers.models.WordLevel({"▁Hello": 0, "▁big": 1, "▁world": 2}, unk_token="▁Hello")
    inner = tokenizers.Tokenizer(words)
    inner.decoder = tokenizers.decoders.Metaspace()
    stream = TextStream(PreTrainedTokenizerFast(tokenizer_object=inner))
    pieces = [stream.feed([0]), stream.feed([0, 1]), stream.feed([0, 1, 2]), stream.feed([0, 1, 2], last=True)]
    assert pieces == ["Hello", " big", " world", ""]


def test_prompts_are_those_of_the_first_source_unless_they_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "f.jinja").write_text("{{ q }}?")
    own = f"{{files: a.parquet, name: sums, prompt_key: q, format_prompt: {tmp_path}/f.jinja, system_prompt: Mine}}"
    words = [
        f"data.sources=[{own}, {{files: b.parquet}}]",
        "data.system_prompt=Other",
        "worker.actor.model.model_path=m",
    ]
    config, _ = load_config(words, command="chat")
    reader, lines = build_reader(config)
    assert [message["content"] for message in reader("x", {"q": "Why", "answer": "-"}).messages] == ["Mine", "Why?"]
    assert any("several sources; the prompts are those of sums" in line for line in lines)
    reader, _ = build_reader(config, plain=True)
    assert [message["content"] for message in reader("x", {"q": "Why", "answer": "-"}).messages] == ["Why"]


@settings(max_examples=40)
@given(st.text(), st.lists(st.integers(1, 5)))
def test_pieces_end_with_characters_and_make_the_whole_text(text: str, cuts: list[int]) -> None:
    tokenizer = families.make_tokenizer()
    tokens = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    stream, pieces, place = TextStream(tokenizer), [], 0
    for cut in cuts:
        place += cut
        pieces.append(stream.feed(tokens[:place]))
    whole = tokenizer.decode(tokens, skip_special_tokens=True)
    assert all("\ufffd" not in piece or "\ufffd" in whole for piece in pieces)
    assert "".join([*pieces, stream.feed(tokens, last=True)]) == whole


@given(st.lists(st.sampled_from(["a", "<", "think", ">", "/", "\n", "<think>", "</think>", " "])), st.data())
def test_thoughts_are_split_alike_wherever_the_text_is_cut(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cut = sorted(data.draw(st.lists(st.integers(0, len(text)))))
    splitter, found = ThoughtSplitter(), list[tuple[bool, str]]()
    for first, last in zip([0, *cut], [*cut, len(text)], strict=True):
        found += splitter.feed(text[first:last])
    found += splitter.feed("", last=True)
    thinking, expected = False, {True: "", False: ""}
    for piece in re.split("(<think>|</think>)", text):
        if piece == ("</think>" if thinking else "<think>"):
            thinking = not thinking
        else:
            expected[thinking] += piece
    assert {kind: "".join(one for k, one in found if k == kind) for kind in (True, False)} == expected


# --- the terminal -----------------------------------------------------------------------------------------------------


class Typing:
    """A person at the terminal: types lines, and collects what is written and noted."""

    def __init__(self, chat: Any, *lines: str | type[BaseException], **options: bool) -> None:
        self.lines, self.written, self.notes = [*lines], "", list[str]()
        Terminal(chat, write=self.write, note=self.notes.append, **options).talk(self.read)

    def read(self, prompt: str) -> str:
        line = self.lines.pop(0) if self.lines else EOFError
        if isinstance(line, str):
            return line
        raise line

    def write(self, text: str) -> None:
        self.written += text


def test_thoughts_are_folded_and_shown_on_demand(chat: Chat) -> None:
    found = Typing(chat, "How many shapes?", "/thoughts", "/prompt", "/help", " /exit is a question", "/exit", "never")
    shown, thoughts, _ = found.written.split("\n", 2)
    text = chat.answers[0].text
    assert re.fullmatch(r"<think>(.*)</think>\s*(.*)", text, re.DOTALL)
    assert shown == text.partition("</think>")[2].strip()
    assert thoughts == re.split("</?think>", text)[1].strip()
    assert "<|im_start|>assistant" in found.written
    assert len(chat.answers) == 2
    assert found.lines == ["never"]
    assert any("/image PATH" in note for note in found.notes)


def test_pictures_clear_and_mistakes_leave_the_chat_open(chat: Chat, picture: str) -> None:
    found = Typing(
        chat, "/image", "/image nowhere.png", f"/image '{picture}'", "/sing", "One \\", "two", "More", "/clear", "",
        "Three", KeyboardInterrupt, "/image 'x",
    )  # fmt: skip
    assert "One \ntwo" in chat.answers[0].prompt.text
    assert len(chat.answers[0].prompt.images) == 1
    assert len(chat.answers[1].prompt.images) == 1
    assert not chat.answers[2].prompt.images
    assert "One" not in chat.answers[2].prompt.text
    assert len(chat.answers) == 3
    for told in ("takes the path", "nowhere.png: no such picture", "/sing is no command", "Ctrl-D or /exit", "quote"):
        assert any(told in note for note in found.notes), told


def test_ctrl_c_ends_the_answer_and_the_conversation_goes_on(chat: Chat) -> None:
    before = signal.getsignal(signal.SIGINT)

    class Interrupting(Typing):
        def write(self, text: str) -> None:
            super().write(text)
            if len(chat.answers) == 0 and text.strip():
                os.kill(os.getpid(), signal.SIGINT)

    found = Interrupting(chat, "How many shapes?", show_thoughts=True)
    assert chat.session.decoded("answer 1") == []
    Typing(chat, "Go on")
    first, second = chat.answers
    assert first.ended == "user"
    assert 0 < len(first.tokens) < len(second.tokens)
    assert second.ended == "stop"
    assert f"assistant\n{first.text}<|im_end|>" in second.prompt.text
    assert any(f"ended by you after {len(first.tokens)} tokens" in note for note in found.notes)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_ends_more_than_the_answer() -> None:
    with interruptions() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_control_characters_of_an_answer_are_not_sent_to_the_terminal() -> None:
    class Hostile:
        answers = (type("Answer", (), {"ended": "length", "tokens": [1, 2]})(),)

        def ask(self, *_: object) -> Iterator[str]:
            yield "<think>\x1b[2J"
            yield "never\n\tends"

    found = Typing(Hostile(), "x", "/thoughts")
    assert "\x1b" not in found.written
    assert "never\n    ends" in found.written
    assert any("unfinished thoughts" in note for note in found.notes)
    assert any("cut at the limit" in note and "inside its thoughts" in note for note in found.notes)
