"""A teacher's tokenizer and servers are compared with the policy's before a run, and by `r1 check`."""

import io
import json
import logging
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_references import prompt_of
from loopback import answering
from PIL import Image
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoProcessor, PreTrainedTokenizerFast

from r1_cli.build.rendering import build_renderer
from r1_cli.build.rewards.served_model import ServedReading, read_tail
from r1_cli.build.teacher import (
    build_teacher,
    open_teachers,
    require_length_of_servers,
    require_logprobs_of_servers,
    require_same_tokens_on_servers,
)
from r1_cli.build.teacher_model import (
    PROBES,
    find_difference,
    require_same_tokenizer,
)
from r1_cli.build.teacher_prompts import TeacherRows, open_teacher_rows
from r1_cli.config import load_config
from r1_cli.jobs.data import with_longest_prompt
from r1_cli.models.files import open_model
from r1_cli.models.load import ModelError
from r1_cli.plan.check.findings import Subject
from r1_cli.plan.check.model import check_teacher
from r1_cli.train.groups.group import Group
from r1_data.dataset import Mixture, PromptDataset
from r1_data.formats import Columns
from r1_data.messages import RowReader
from r1_data.types import DataError
from r1_rewards.services.endpoint import Patience, Unusable

BASE = ["data.train_files=owner/rows@train", "worker.actor.model.model_path=owner/model"]
TEACHER = "worker.teacher.model.model_path=owner/teacher"
ACTORS_CODE = "worker.actor.model.trust_remote_code=true"
NONE = "algorithm.disable_kl=true"


def config_of(*words):
    return load_config([*BASE, *words])[0]


# --- tokenizers ------------------------------------------------------------------------------------------------------


def tokenizer(words=("a", "b", "c", "<end>"), *, split=".", end="<end>"):
    inner = Tokenizer(models.WordLevel({word: place for place, word in enumerate([*words, "?"])}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(split), "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=end, additional_special_tokens=["c", "<end>"] if "c" in words else []
    )


def test_equal_tokenizers_pass_and_there_are_64_probes():
    assert len(set(PROBES)) == 64
    require_same_tokenizer("teacher", tokenizer(), tokenizer())


def test_of_equal_size_and_other_words_is_refused_with_the_way_out():
    with pytest.raises(ModelError, match=r"teacher=x: 2 of the policy's 5 tokens are others.*'b', 1, is its 2.*r1 sft"):
        require_same_tokenizer("teacher=x", tokenizer(), tokenizer(("a", "c", "b", "<end>")))


def test_a_word_that_the_teacher_lacks_is_refused_and_one_more_is_not():
    small, large = tokenizer(("a", "b", "<end>"), end="<end>"), tokenizer()
    assert "'c', 2, is unknown to it" in str(find_difference(tokenizer(), small))
    more = PreTrainedTokenizerFast(tokenizer_object=tokenizer().backend_tokenizer, eos_token="<end>")
    more.add_tokens(["<image>"])
    assert find_difference(large, more) is None
    assert "<image>" in str(find_difference(more, large))


def test_equal_words_that_are_split_otherwise_are_refused():
    assert find_difference(tokenizer(), tokenizer(split=r"\s+")).startswith("it splits 'The quick brown")


def test_another_end_token_is_a_warning(caplog):
    with caplog.at_level(logging.WARNING, "r1"):
        require_same_tokenizer("teacher", tokenizer(), tokenizer(end="c"))
    assert "it ends answers with 'c', the policy with '<end>'" in caplog.text


# --- servers ---------------------------------------------------------------------------------------------------------

READY = Patience(timeout=5.0, deadline=5.0, tries=1)


def tokenizes_by(other):
    def respond(body, path, headers):
        assert path == "/tokenize"
        return 200, {"tokens": other.encode(json.loads(body)["prompt"], add_special_tokens=False)}

    return respond


def test_servers_are_compared_by_their_own_answers():
    with answering(tokenizes_by(tokenizer())) as url:
        require_same_tokens_on_servers(ServedReading(url, patience=READY), "urls", None, tokenizer())
    with (
        answering(tokenizes_by(tokenizer(split=r"\s+"))) as url,
        pytest.raises(ModelError, match=r"splits 'The quick.*r1 sft"),
    ):
        require_same_tokens_on_servers(ServedReading(url, patience=READY), "urls", None, tokenizer())


def lists(most):
    def respond(body, path, headers):
        count = json.loads(body)["prompt_logprobs"]
        if count > most:
            return 400, {"error": f"Requested prompt logprobs of {count}, which is greater than max allowed: {most}"}
        listed = {"1": {"logprob": -0.5}, "2": {"logprob": -1.5}, "0": {"logprob": -2.5}}
        rows = [None, *({str(token): {"logprob": -9.0}} | listed for token in json.loads(body)["prompt"][1:])]
        return 200, {"choices": [{"prompt_logprobs": rows}]}

    return respond


def test_servers_that_do_not_list_as_many_tokens_are_named_at_the_start():
    with answering(lists(4)) as url:
        reading = ServedReading(url, patience=READY)
        require_logprobs_of_servers(reading, "urls", tokenizer(), 4)
        with pytest.raises(
            ModelError,
            match=r"at most 4 likely.*topk is 5.*--max-logprobs 5, or set .*topk=4",
        ):
            require_logprobs_of_servers(reading, "urls", tokenizer(), 5)
        (row,) = reading.read_top([prompt_of()], [[7, 2]], 4, 1.0)
    nothing = [-math.inf, -1.0]
    assert row.tolist() == [
        [-9.0, -0.5, -1.5, -2.5, -9.0, 1, 2, 0, 7],
        [-1.5, -0.5, -1.5, -2.5, nothing[0], 1, 2, 0, nothing[1]],
    ]


def replies(rows_of, **more):
    """A server of these prompt_logprobs, which tokenizes as `tokenizer()` and says `more` there."""

    def respond(body, path, headers):
        body = json.loads(body)
        if path == "/tokenize":
            return 200, {"tokens": tokenizer().encode(body["prompt"], add_special_tokens=False), **more}
        if "echo" in more and body["prompt_logprobs"]:
            return 404, {}
        return 200, {"choices": [{"prompt_logprobs": [None, *map(rows_of, body["prompt"][1:])]}]}

    return respond


@pytest.mark.parametrize("topk", [0, 2])
@pytest.mark.parametrize(
    "listed",
    [
        {"1": {"logprob": 3.5}, "2": {"logprob": 1.0}},  # logits
        {"1": {"logprob": -0.1}, "2": {"logprob": -0.2}},  # logits, all below 0: the probabilities are 1.7
    ],
)
def test_logits_in_place_of_log_probs_are_refused_at_the_start(topk, listed):
    """As of a vLLM with --logprobs-mode=processed_logits, which r1 itself starts to sample."""
    rows = replies(lambda token: listed | {str(token): {"logprob": -4.0}})
    with answering(rows) as url, pytest.raises(ModelError, match=r"gives no log-probs.*logits.*--logprobs-mode"):
        require_logprobs_of_servers(ServedReading(url, patience=READY), "urls", tokenizer(), topk)


@pytest.mark.parametrize("count", [0, 1])
def test_a_value_above_0_is_never_read_as_a_log_prob(count):
    reply = {"choices": [{"prompt_logprobs": [None, {"7": {"logprob": 0.5}}]}]}
    with pytest.raises(Unusable, match=r"0.5, above 0: these are logits"):
        read_tail(reply, tokens=[7], total=2, count=count)
    reply["choices"][0]["prompt_logprobs"][1]["7"]["logprob"] = 1e-6  # rounding
    assert read_tail(reply, tokens=[7], total=2, count=count)[0][0] == 1e-6


def test_a_server_that_only_echoes_is_enough_for_advantages():
    rows = replies(lambda token: {str(token): {"logprob": -4.0}}, echo=True)
    with answering(rows) as url:
        reading = ServedReading(url, patience=READY)
        require_logprobs_of_servers(reading, "urls", tokenizer(), 0)
        with pytest.raises(ModelError, match=r"does not list its 2 most likely tokens.*HTTP 404"):
            require_logprobs_of_servers(reading, "urls", tokenizer(), 2)
    with answering(lambda *request: (404, {})) as url, pytest.raises(ModelError, match=r"no log-probs of given.*404"):
        require_logprobs_of_servers(ServedReading(url, patience=READY), "urls", tokenizer(), 0)


def test_a_server_that_reads_too_short_texts_is_named_at_the_start():
    with answering(replies(None, max_model_len=16)) as url:
        reading = ServedReading(url, patience=READY)
        require_length_of_servers(reading, "urls", 15)
        with pytest.raises(ModelError, match=r"at most 16 tokens.*may have 17: .*--max-model-len 17"):
            require_length_of_servers(reading, "urls", 16)
    with answering(replies(None)) as url:  # it says nothing
        require_length_of_servers(ServedReading(url, patience=READY), "urls", 10**6)


def test_a_server_that_does_not_tokenize_needs_a_tokenizer_path():
    with (
        answering(lambda body, path, headers: (404, {})) as url,
        pytest.raises(ModelError, match=r"HTTP 404.*set tokenizer_path"),
    ):
        require_same_tokens_on_servers(ServedReading(url, patience=READY), "urls", None, tokenizer())


# --- pictures of the teacher's own -----------------------------------------------------------------------------------


def picture(seed):
    pixels = np.random.default_rng(seed).integers(0, 256, (112, 112, 3), np.uint8)
    Image.fromarray(pixels).save(buffer := io.BytesIO(), "PNG")
    return {"bytes": buffer.getvalue()}


ROW = {"problem": "<image>How many?", "answer": "3", "images": [picture(1)], "crops": [picture(2)], "empty": []}
READER = RowReader(Columns("problem"), explicit_columns=True)
SMALL, SHARP = 56 * 56, 112 * 112


def prompts_of(*words):
    """The prompts of the policy and of its teacher, whose pictures are at most 56 × 56 and as `words` say."""
    model = "worker.actor.model.model_path=examples/quickstart/model"
    itself = ["worker.teacher.model.model_path=policy", "algorithm.distillation.sync=never", "worker.rollout.n=1"]
    config = config_of(
        model,
        "data.max_response_length=99",
        *itself,
        NONE,
        f"data.min_pixels={SMALL}",
        f"data.max_pixels={SMALL}",
        *words,
    )
    files = open_model(config)
    reader = RowReader(Columns("problem"), explicit_columns=True, format_prompt="{{ content }} Look.")
    rows = Mixture([PromptDataset([ROW], build_renderer(config, files), max_prompt_length=99, reader=reader)])
    found = open_teacher_rows(config, files, rows)
    teacher = build_teacher(config, None, files, None, found)
    find = teacher.teachers.find("rows").prompt_of
    assert found["worker.teacher"].longest == len(find(Group(rows[0], (), row=0)).token_ids)
    return rows[0], find(Group(rows[0], (), row=0))


def policy_of(*words):
    model = ["worker.actor.model.model_path=examples/quickstart/model", "data.max_response_length=99"]
    model += [f"data.min_pixels={SMALL}", f"data.max_pixels={SMALL}"]
    config = config_of(*model, "worker.rollout.n=1", NONE, *(words or [TEACHER]))
    return config, open_model(config)


def processed(cell, pixels):
    """What the model's own processor makes of the row with this picture."""
    processor = AutoProcessor.from_pretrained("examples/quickstart/model")
    content = [{"type": "image"}, {"type": "text", "text": "How many? Look."}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    size = {"shortest_edge": SMALL, "longest_edge": pixels}
    shown = Image.open(io.BytesIO(cell["bytes"]))
    return processor(text=[text], images=[shown], images_kwargs={"size": size}, return_tensors="pt")


@pytest.mark.parametrize(
    ("words", "column", "pixels", "tokens"),
    [
        ([f"max_pixels={SHARP}"], "images", SHARP, 16),
        ([f"max_pixels={SMALL}"], "images", SMALL, 4),
        (["image_key=crops"], "crops", SMALL, 4),
        (["image_key=crops", f"max_pixels={SHARP}"], "crops", SHARP, 16),
    ],
)
def test_a_teacher_sees_its_own_pictures_as_the_processor_makes_them(words, column, pixels, tokens):
    own, teachers = prompts_of(*(f"worker.teacher.{word}" for word in words))
    for prompt, cell, most, count in ((own, "images", SMALL, 4), (teachers, column, pixels, tokens)):
        expected = processed(ROW[cell][0], most)
        assert prompt.token_ids == expected["input_ids"][0].tolist()
        assert (expected["input_ids"] == 315).sum() == count  # <|image_pad|>
        assert torch.equal(prompt.model_inputs["image_grid_thw"], expected["image_grid_thw"])
        torch.testing.assert_close(prompt.model_inputs["pixel_values"], expected["pixel_values"])
        assert prompt.position_ids.shape[-1] == len(prompt.token_ids)


def test_a_row_without_the_teachers_pictures_is_named():
    with pytest.raises(
        DataError, match=r":1: it has no column 'crop'; columns found: problem, .*crops.* \(worker.teacher.image_key\)"
    ):
        prompts_of("worker.teacher.image_key=crop")
    with pytest.raises(
        DataError, match=r":1: 1 <image> markers but 0 pictures in column 'empty' \(worker.teacher.image_key\)"
    ):
        prompts_of("worker.teacher.image_key=empty")


def rows_with(*sources, **columns):
    """The rows of two sources, one of which has also these columns, and what opens their teachers' prompts."""

    def opened(*words):
        model = ["worker.actor.model.model_path=examples/quickstart/model", "data.max_response_length=99"]
        config = config_of(*model, NONE, *words)
        files, reader = open_model(config), RowReader(Columns("problem"), explicit_columns=True)
        rows = [{"problem": "How many?", "answer": "3", "data_source": name} for name in sources]
        rows[0] |= columns
        parts = PromptDataset(rows, build_renderer(config, files), max_prompt_length=99, reader=reader)
        return open_teacher_rows(config, files, Mixture([parts]))

    return opened


def test_only_the_rows_of_a_source_are_shown_to_its_teacher(tmp_path):
    (tmp_path / "hint.jinja").write_text("{{ content }} {{ hint }}")
    opened = rows_with("geo", "math", hint="So many that a prompt with them is longer than all others.")
    geo, context = "worker.teacher.sources.geo.", f"context={tmp_path / 'hint.jinja'}"
    words = ["worker.reward.reward_function=math", f"{geo}model.model_path=policy", f"{geo}{context}"]
    found = opened(*words)["worker.teacher.sources.geo"]
    plain = opened("worker.reward.reward_function=math", f"{geo}urls=http://a:1")["worker.teacher.sources.geo"]
    assert found.longest > plain.longest > 0
    assert plain.prompts is None
    (tmp_path / "any.jinja").write_text("{{ content }} {{ hint | default('') }}")
    every = opened("worker.teacher.model.model_path=policy", f"worker.teacher.context={tmp_path / 'any.jinja'}")
    assert every["worker.teacher"].longest == found.longest  # of its first row
    with pytest.raises(DataError, match=r":2: the teacher's context fails on this row .*hint"):
        opened("worker.teacher.model.model_path=policy", f"worker.teacher.{context}")
    with pytest.raises(DataError, match=rf":1: the prompt of .*geo has {found.longest} tokens, .*_prompt_length is 9:"):
        opened(*words, "worker.teacher.max_prompt_length=9")
    opened(*words, f"worker.teacher.max_prompt_length={found.longest}")


def test_a_teacher_with_too_few_positions_is_refused(tmp_path):
    for file in Path("examples/quickstart/model").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((tmp_path / "config.json").read_text())
    opened, words = rows_with("math"), [f"worker.teacher.model.model_path={tmp_path}"]
    longest = opened(*words)["worker.teacher"].longest + 99
    for known in (longest, longest - 1):
        settings["text_config"]["max_position_embeddings"] = known
        (tmp_path / "config.json").write_text(json.dumps(settings))
        if known == longest:
            opened(*words)
    with pytest.raises(ModelError, match=rf"knows {longest - 1} positions.*may have {longest} tokens"):
        opened(*words)


# --- what a user sees before the run ---------------------------------------------------------------------------------


def checked(*words):
    model = "examples/quickstart/model"
    config = [f"worker.actor.model.model_path={model}", "data.train_files=owner/rows@train", "worker.rollout.n=1", NONE]
    subject = Subject(words, *load_config([*config, "data.max_response_length=99", *words]))
    return [(one.level, one.message) for one in check_teacher(subject)]


def test_a_check_says_what_is_learned_and_finds_a_teacher_with_other_tokens(tmp_path):
    assert checked("worker.reward.reward_function=math", "worker.rollout.n=2") == []
    same = "worker.teacher.model.model_path=examples/quickstart/model"
    assert [level for level, _ in checked(same)] == ["note"]
    for file in Path("examples/quickstart/model").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    vocabulary = json.loads((tmp_path / "tokenizer.json").read_text())
    words = vocabulary["model"]["vocab"]
    one, other, *_ = sorted(words, key=words.get)
    words[one], words[other] = words[other], words[one]
    (tmp_path / "tokenizer.json").write_text(json.dumps(vocabulary))
    (_, (level, message)) = checked(f"worker.teacher.model.model_path={tmp_path}")
    assert (level, "tokens are others there" in message, "r1 sft" in message) == ("error", True, True)


def test_a_second_teachers_tokens_are_compared_as_the_first_ones_are(tmp_path):
    """Both have the policy's vocabulary, and the second joins other pairs."""
    for file in Path("examples/quickstart/model").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    vocabulary = json.loads((tmp_path / "tokenizer.json").read_text())
    vocabulary["model"]["merges"] = vocabulary["model"]["merges"][::2]
    (tmp_path / "tokenizer.json").write_text(json.dumps(vocabulary))
    first = "worker.teacher.model.model_path=examples/quickstart/model"
    found = checked(first, f"worker.teacher.sources.math.model.model_path={tmp_path}")
    assert [level for level, _ in found] == ["note", "error"]
    assert "it splits" in found[1][1]
    assert f"worker.teacher.sources.math.model.model_path={tmp_path}" in found[1][1]


def test_a_second_teacher_runs_its_own_code_only_if_it_is_trusted(monkeypatch):
    asked = []

    def load_config(path, *, trust_remote_code, key):
        asked.append((path, trust_remote_code))
        raise ModelError("stop")

    key, first = "worker.teacher.sources.b.model", "worker.teacher.model.model_path=owner/a"
    runs = [
        policy_of(first, f"{key}.model_path=owner/b", f"{key}.trust_remote_code={trusted}", ACTORS_CODE)
        for trusted in (False, True)
    ]
    monkeypatch.setattr("r1_cli.build.rewards.frozen_model.models.load_config", load_config)
    for config, files in runs:
        with pytest.raises(ModelError, match="stop"):
            build_teacher(config, None, files, None, {key: TeacherRows(9) for key in config.worker.teacher.every})
    assert asked == [("owner/b", False), ("owner/b", True)]


def test_servers_are_asked_whether_they_read_the_longest_prompt_with_an_answer():
    rows = Mixture([PromptDataset([ROW], build_renderer(*policy_of()), max_prompt_length=99, reader=READER)])
    config, files = policy_of()
    longest = len(rows[0].token_ids) + 99
    own = files.tokenizer

    def respond(body, path, headers, most=longest):
        body = json.loads(body)
        if path == "/tokenize":
            return 200, {"tokens": own.encode(body["prompt"], add_special_tokens=False), "max_model_len": most}
        listed = [{str(token): {"logprob": -1.0}} for token in body["prompt"][1:]]
        return 200, {"choices": [{"prompt_logprobs": [None, *listed]}]}

    with answering(respond) as url:
        config, files = policy_of(f"worker.teacher.urls={url}")
        with pytest.raises(ModelError, match=rf"at most {longest} tokens.*may have {longest + 1}"):
            open_teachers(config, files, rows)
    with answering(partial(respond, most=longest + 1)) as url:
        config, files = policy_of(f"worker.teacher.urls={url}")
        found = open_teachers(config, files, rows)["worker.teacher"]
    assert found.reading.bases == [url]
    assert (
        build_teacher(config, None, files, None, {"worker.teacher": found}).teachers.find("rows").reading
        is found.reading
    )


def test_the_plan_of_a_run_counts_with_the_longest_prompt_of_its_teachers():
    config, _ = policy_of()
    rows = {"a": TeacherRows(400), "b": TeacherRows(90, object()), "c": TeacherRows(80, object())}
    assert with_longest_prompt(config, rows).worker.teacher.max_prompt_length == 90
    assert with_longest_prompt(config, {"a": TeacherRows(400)}).worker.teacher.max_prompt_length is None


def test_a_check_asks_the_servers():
    with answering(lambda body, path, headers: (404, {})) as url:
        (_, (level, message)) = checked(f"worker.teacher.urls={url}")
    assert level == "error"
    assert "set tokenizer_path" in message


def test_a_check_reads_rows_as_the_teacher_sees_them(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"problem": "How many?", "answer": "3", "hint": "few"}) + "\n" for _ in "ab"))
    (tmp_path / "hint.jinja").write_text("{{ content }} {{ hint }}")
    words = ["worker.teacher.model.model_path=policy", f"data.train_files={rows}", "data.prompt_key=problem"]
    words += [f"worker.teacher.context={tmp_path / 'hint.jinja'}"]
    assert [level for level, _ in checked(*words)] == ["note"]
    (_, (level, message)) = checked(*words, "worker.teacher.image_key=crops")
    assert level == "error"
    assert f"{rows.name}:1: it has no column 'crops'" in message
    assert "(worker.teacher.image_key)" in message
