"""Tests of the dataset: every row is checked before training, and rendered the same whenever asked for."""

import copy
import json
import pickle
import runpy
from pathlib import Path

import pytest
import torch
from data_models import tiny_config
from tokenizers import AddedToken

from r1_data.dataset import PromptDataset, Summary
from r1_data.formats import Columns
from r1_data.messages import RowReader
from r1_data.prefetch import PromptMemory
from r1_data.render import Renderer
from r1_data.sources import read_rows
from r1_data.tokens import encode_all
from r1_data.types import DataError


def text_rows(*prompts: str) -> list[tuple[str, dict]]:
    return [(f"t.jsonl:{i}", {"prompt": prompt, "answer": str(i)}) for i, prompt in enumerate(prompts, start=1)]


@pytest.fixture
def renderer(tokenizer) -> Renderer:
    return Renderer(tokenizer)


def test_overlong_rows_are_filtered_and_counted(renderer):
    dataset = PromptDataset(text_rows("a", "b" * 500, "cc"), renderer, max_prompt_length=100)
    assert [dataset[i].id for i in range(len(dataset))] == ["t.jsonl:1", "t.jsonl:3"]
    assert dataset.summary == Summary(read=3, kept=2, overlong=1, longest=len(dataset[1].token_ids))


def test_of_a_huge_prompt_only_the_beginning_is_tokenized(renderer, monkeypatch):
    sizes = []

    def spy(tokenizer, texts):
        sizes.extend(map(len, texts))
        return encode_all(tokenizer, texts)

    monkeypatch.setattr("r1_data.tokens.encode_all", spy)
    monkeypatch.setattr("r1_data.render.encode_all", spy)
    dataset = PromptDataset(text_rows("a", "x" * 1_000_000, "b"), renderer, max_prompt_length=100)
    assert (len(dataset), dataset.summary.overlong) == (2, 1)
    (said,) = dataset.left_out()
    assert said.startswith("t.jsonl:2: the prompt has 1,000,050 characters and at least 65,")
    assert said.endswith(" tokens, max_prompt_length is 100")
    assert max(sizes) < 70_000


def test_a_huge_prompt_is_refused_by_name_when_overlong_rows_are_not_filtered_or_all_there_is(renderer):
    rows = text_rows("x" * 200_000)
    with pytest.raises(DataError, match=r"1 of 1 rows .*\n  t\.jsonl:1: the prompt has 200,050 characters"):
        PromptDataset(rows, renderer, max_prompt_length=100, filter_overlong=False)
    with pytest.raises(DataError, match=r"the longest has more than 100\)"):
        PromptDataset(rows, renderer, max_prompt_length=100)


def test_every_added_token_that_structures_a_conversation_is_remarked_on(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "<table>", "\n\n", "user"])
    tokenizer.add_tokens([AddedToken("<|start_header_id|>", special=True, normalized=False)])
    assert "<|start_header_id|>" not in tokenizer.all_special_tokens
    rows = text_rows("<|start_header_id|>", "<tool_call>", "so <think>", "a\n\nuser's <table>", "2 < 3")
    dataset = PromptDataset(rows, Renderer(tokenizer), max_prompt_length=100)
    assert [said.split(",")[0] for said in dataset.summary.remarks] == [
        f"t.jsonl:{i}: the row's text spells {token}"
        for i, token in enumerate(["<|start_header_id|>", "<tool_call>", "<think>"], start=1)
    ]


def test_control_tokens_of_the_users_own_prompts_are_no_remark_but_those_of_a_row_are(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_tokens(["<think>", "</think>"])
    reader = RowReader(format_prompt="{{ content }} Think in <think> </think>.", system_prompt="Write </think> once.")
    rows = text_rows("plain", "my own <think>")
    dataset = PromptDataset(rows, Renderer(tokenizer), max_prompt_length=200, reader=reader)
    assert [said.split(",")[0] for said in dataset.summary.remarks] == ["t.jsonl:2: the row's text spells <think>"]


def test_prompt_of_exactly_the_limit_is_kept(renderer):
    length = len(PromptDataset(text_rows("abc"), renderer, max_prompt_length=100)[0].token_ids)
    assert len(PromptDataset(text_rows("abc"), renderer, max_prompt_length=length)) == 1
    with pytest.raises(DataError):
        PromptDataset(text_rows("abc"), renderer, max_prompt_length=length - 1)


def test_overlong_rows_are_refused_when_not_filtered(renderer):
    with pytest.raises(DataError, match=r"1 of 2 rows .*\n  t\.jsonl:2: the prompt has \d+ tokens, max_prompt_length"):
        PromptDataset(text_rows("a", "b" * 500), renderer, max_prompt_length=100, filter_overlong=False)


def test_nothing_left_says_how_many_were_filtered_and_why(renderer):
    with pytest.raises(DataError, match=r"empty: all 2 rows .* max_prompt_length=5 tokens \(the longest has \d+\)"):
        PromptDataset(text_rows("a", "b"), renderer, max_prompt_length=5)


def test_no_rows_at_all_is_refused(renderer):
    with pytest.raises(DataError, match="the dataset is empty: its files hold no rows"):
        PromptDataset([], renderer, max_prompt_length=5)


def test_unusable_rows_are_listed_up_to_ten_with_the_total(renderer):
    rows = [(f"t.jsonl:{i}", {"prompt": "?"} if i % 2 else {"prompt": "?", "answer": "2"}) for i in range(1, 31)]
    with pytest.raises(DataError) as caught:
        PromptDataset(rows, renderer, max_prompt_length=100)
    lines = str(caught.value).splitlines()
    assert lines[0] == "15 of 30 rows cannot be used:"
    assert lines[1] == "  t.jsonl:1: no answer column 'answer'; columns found: prompt"
    assert lines[-1] == "  ... and 5 more"
    assert len(lines) == 12


def test_unreadable_picture_and_broken_line_are_found_before_training(processor, tmp_path):
    lines = [
        json.dumps({"problem": "<image>?", "answer": "1", "images": ["bad.png"]}),
        '{"problem": ',
        json.dumps({"problem": "<image>?", "answer": "1", "images": ["gone.png"]}),
        json.dumps({"problem": "?", "answer": "1"}),
    ]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    (tmp_path / "bad.png").write_text("not a picture")
    with pytest.raises(DataError) as caught:
        PromptDataset(
            read_rows(str(tmp_path / "train.jsonl")),
            Renderer(processor),
            max_prompt_length=500,
            reader=RowReader(image_dir=str(tmp_path)),
        )
    head, bad, broken, gone = str(caught.value).splitlines()
    assert head.startswith("3 of 4 rows")
    assert "train.jsonl:1: " in bad
    assert "bad.png" in bad
    assert "train.jsonl:2: not a JSON row" in broken
    assert "train.jsonl:3: " in gone
    assert "gone.png: no such file" in gone


def test_picture_rows_and_text_rows_mix_from_a_real_file(processor, picture, tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [
        {"problem": "<image>How many?", "answer": "3", "images": [{"bytes": picture(60, 60), "path": None}]},
        {"problem": "1+1?", "answer": "2", "images": []},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    dataset = PromptDataset(
        read_rows(str(tmp_path / "train.parquet")),
        Renderer(processor),
        max_prompt_length=200,
        reader=RowReader(format_prompt="{{ content }} Answer in a box.", system_prompt="Think."),
    )
    prompts = [dataset[0], dataset[1]]
    assert [len(prompt.images) for prompt in prompts] == [1, 0]
    assert [prompt.id for prompt in prompts] == ["train.parquet:1", "train.parquet:2"]
    assert prompts[1].text.startswith("<|im_start|>system\nThink.<|im_end|>")
    assert "1+1? Answer in a box.<|im_end|>" in prompts[1].text
    assert dataset.summary.longest == len(prompts[0].token_ids)


def test_explicit_columns_switch_detection_off(renderer):
    rows = [("t:1", {"question": "?", "answer": "1"})]
    assert len(PromptDataset(rows, renderer, max_prompt_length=100)) == 1
    with pytest.raises(DataError, match="no prompt column 'problem'; columns found: question, answer"):
        PromptDataset(rows, renderer, max_prompt_length=100, reader=RowReader(Columns("problem"), True))


def test_progress_counts_every_row(renderer):
    seen: list[tuple[int, int]] = []
    PromptDataset(text_rows("a", "b" * 500, "c"), renderer, max_prompt_length=100, progress=lambda *c: seen.append(c))
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_media_are_decoded_once_as_far_as_memory_is_given(processor, picture, monkeypatch):
    rows = [(f"t:{i}", {"prompt": "?", "answer": "1", "images": [picture(100, 80)]}) for i in range(4)]
    renderer, decoded = Renderer(processor), []
    load = renderer.load
    monkeypatch.setattr(renderer, "load", lambda example: decoded.append(example.id) or load(example))
    one = PromptDataset(rows, renderer, max_prompt_length=500)[0].images[0]
    for room, again in ((2**30, []), (2.9, ["t:2", "t:3"]), (0, ["t:0", "t:1", "t:2", "t:3"])):
        memory = PromptMemory(int(room * 3 * one.width * one.height))
        dataset = PromptDataset(rows, renderer, max_prompt_length=500, memory=memory)
        first = [dataset[i] for i in range(4)]
        decoded.clear()
        second = [dataset[i] for i in range(4)]
        assert decoded == again
        for before, after in zip(first, second, strict=True):
            assert before.token_ids == after.token_ids
            assert torch.equal(before.model_inputs["pixel_values"], after.model_inputs["pixel_values"])


def test_picture_that_does_not_decode_names_its_row_when_rendered(processor, picture):
    data = bytearray(picture(300, 300))
    data[len(data) // 2] ^= 0xFF  # header and end are whole, so the check before training has nothing to say
    rows = [("t:1", {"prompt": "?", "answer": "1", "images": [bytes(data)]})]
    dataset = PromptDataset(rows, Renderer(processor), max_prompt_length=500)
    with pytest.raises(DataError, match=r"^t:1: picture of .* cannot be read"):
        dataset[0]


def test_picture_that_is_cut_off_is_found_before_training(processor, picture):
    data = picture(300, 300)
    rows = [("t:1", {"prompt": "?", "answer": "1", "images": [data[: len(data) // 2]]})]
    with pytest.raises(DataError, match=r"t:1: picture of .* truncated"):
        PromptDataset(rows, Renderer(processor), max_prompt_length=500)


def test_the_use_in_the_readme_runs(fresh_processor, picture, tmp_path, monkeypatch, capsys):
    import pyarrow
    import pyarrow.parquet

    readme = Path(__file__).parents[1] / "README.md"
    code = "\n".join(block.split("```")[0] for block in readme.read_text().split("```python\n")[1:])
    (tmp_path / "path" / "to").mkdir(parents=True)
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    processor = fresh_processor("qwen2_5_vl")
    processor.save_pretrained("path/to/Qwen2.5-VL")
    tiny_config("qwen2_5_vl", processor).save_pretrained("path/to/Qwen2.5-VL")
    rows = [
        {"problem": "<image>How many?", "answer": str(i), "images": [{"bytes": picture(600, 500)}]} for i in range(40)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), "data/train.parquet")
    (tmp_path / "use.py").write_text(code)
    used = runpy.run_path("use.py")
    assert (len(used["prompts"]), len(used["mine"])) == (32, 16)
    assert used["prompts"][0].position_ids.shape[0] == 4
    assert "Summary(read=40, kept=40, overlong=0" in capsys.readouterr().out


def test_rows_may_be_a_list_of_mappings_or_a_hugging_face_data_set(processor, picture):
    import datasets

    rows = [{"problem": "<image>?", "answer": "1", "images": [{"bytes": picture(60, 40), "path": None}]}] * 2
    features = datasets.Features(
        {"problem": datasets.Value("string"), "answer": datasets.Value("string"), "images": [datasets.Image()]}
    )
    for given in (rows, datasets.Dataset.from_list(rows, features=features)):
        prompt = PromptDataset(given, Renderer(processor), max_prompt_length=500)[1]
        assert (prompt.id, prompt.ground_truth, len(prompt.images)) == ("row:2", "1", 1)


def test_a_data_set_can_be_sent_to_another_process(processor, picture, tmp_path):
    (tmp_path / "train.jsonl").write_text('{"problem": "?", "answer": "1"}\n{"problem": "", "answer": "1"}\n')
    reader = RowReader(format_prompt="{{ content }}!")
    rows = read_rows(str(tmp_path / "train.jsonl"))
    dataset = PromptDataset(rows, Renderer(processor), max_prompt_length=500, reader=reader, bad_rows="skip")
    sent = pickle.loads(pickle.dumps(dataset))
    assert (sent.summary, sent[0].token_ids) == (dataset.summary, dataset[0].token_ids)


def test_what_grew_or_changed_since_the_check_is_named_when_it_is_read(processor, picture, tmp_path):
    path, image = tmp_path / "train.jsonl", tmp_path / "a.png"
    image.write_bytes(picture(30, 30))
    path.write_text(json.dumps({"problem": "?", "answer": "1", "images": [str(image)]}) + "\n")
    dataset = PromptDataset(read_rows(str(path)), Renderer(processor), max_prompt_length=60)
    image.write_bytes(picture(280, 280))
    with pytest.raises(
        DataError, match=r"train.jsonl:1: the prompt has \d+ tokens, .* its data changed after validation"
    ):
        dataset[0]
    path.write_text(json.dumps({"problem": "other", "answer": "2"}) + "\n")
    with pytest.raises(DataError, match="the file was changed after it was opened"):
        dataset[0]
    path.unlink()
    with pytest.raises(DataError, match="cannot be read any more"):
        dataset[0]


def test_every_row_that_is_left_out_is_named_and_the_digest_tells_other_rows(processor):
    rows = [(f"t:{n}", {"problem": "x" * n, "answer": "1"}) for n in range(120)]
    settings = {"max_prompt_length": 100, "bad_rows": "skip"}
    dataset = PromptDataset(rows, Renderer(processor), **settings)
    left_out = list(dataset.left_out())
    assert len(left_out) == 120 - len(dataset) > 20
    assert left_out[0].startswith("t:0: the prompt is empty")
    assert PromptDataset(rows, Renderer(processor), **settings).digest == dataset.digest
    rows[7] = ("t:7", {"problem": "x" * 7, "answer": "2"})
    assert PromptDataset(rows, Renderer(processor), **settings).digest != dataset.digest
