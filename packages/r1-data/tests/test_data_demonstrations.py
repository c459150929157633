"""Tests of demonstrations: which answers of a row are trained, how long they are, and data sets of them."""

import pickle
from dataclasses import replace

import pytest
from demonstration_cases import TALK, THINKING, THOUGHT, conversation, renderer_of, trained
from turn_templates import QWEN3, merging_tokenizer

from r1_data.conversations import ConversationReader
from r1_data.demonstrations import ConversationDataset
from r1_data.lengths import KnownLengths
from r1_data.types import Conversation, DataError, Overlong


@pytest.fixture(scope="module")
def merging():
    return merging_tokenizer()


def test_each_answer_is_trained_as_the_template_shows_it_when_it_is_the_last(merging):
    first, second = renderer_of(merging, QWEN3, turns="each").render(conversation(THINKING))
    assert trained(merging, first) == [f"{THOUGHT}There are 12.<|im_end|>"]
    assert trained(merging, second) == [f"{THOUGHT}Now 13.<|im_end|>"]
    assert len(first.token_ids) < len(second.token_ids)
    (last,) = renderer_of(merging, QWEN3, turns="last").render(conversation(THINKING))
    assert (last.token_ids, last.loss_mask) == (second.token_ids, second.loss_mask)


def test_turns_apart_are_the_rows_that_end_there_and_train_as_many_tokens_as_one_sample(merging):
    parts = renderer_of(merging, turns="each").render(conversation(TALK))
    rows = [renderer_of(merging, turns="last").render(conversation(TALK[:end]))[0] for end in (2, 4)]
    assert [(one.token_ids, one.loss_mask) for one in parts] == [(one.token_ids, one.loss_mask) for one in rows]
    (whole,) = renderer_of(merging).render(conversation(TALK))
    assert sum(whole.loss_mask) == sum(sum(one.loss_mask) for one in parts)
    assert [survey.trained_tokens for survey in renderer_of(merging, turns="each").survey(conversation(TALK))] == [
        sum(one.loss_mask) for one in parts
    ]


@pytest.mark.parametrize("excluded", [{"weight": 0}, {"train": False}])
def test_an_answer_without_weight_is_not_trained(merging, excluded):
    messages = [TALK[0], {**TALK[1], **excluded}, *TALK[2:]]
    (shown,) = renderer_of(merging).render(conversation(messages))
    assert trained(merging, shown) == ["Now 13.<|im_end|>"]
    (shown,) = renderer_of(merging, train_on_prompt=True).render(conversation(messages))
    assert "".join(trained(merging, shown)) == (
        "user\nHow many rows?<|im_end|>\n<|im_start|>assistant\n"
        "\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\nNow 13.<|im_end|>\n"
    )
    assert len(renderer_of(merging, turns="each").render(conversation(messages))) == 1
    with pytest.raises(DataError, match=r"^t:1: message 4 has weight=0.5; read are weight 0 and 1"):
        renderer_of(merging).render(conversation([*messages[:3], {**TALK[3], "weight": 0.5}]))
    with pytest.raises(DataError, match=r"^t:1: the conversation has no answer to train"):
        renderer_of(merging).render(conversation(messages[:3]))


def test_a_pair_is_the_better_and_the_worse_answer_behind_the_same_prompt(merging):
    worse = [{"role": "assistant", "content": "None."}]
    row = conversation(TALK, rejected=worse, source="s")
    better, other = renderer_of(merging, turns="each").render(row)
    assert (trained(merging, better), better.label) == (["Now 13.<|im_end|>"], True)
    assert (trained(merging, other), other.label) == (["None.<|im_end|>"], False)
    assert better.prompt_length == other.prompt_length
    assert better.token_ids[: better.prompt_length] == other.token_ids[: other.prompt_length]
    assert better.source == other.source == "s"
    longer = replace(row, prompt_messages=1, rejected=[*worse, *TALK[2:]])
    pieces = [trained(merging, one) for one in renderer_of(merging).render(longer)]
    assert pieces == [["There are 12.<|im_end|>", "Now 13.<|im_end|>"], ["None.<|im_end|>", "Now 13.<|im_end|>"]]
    with pytest.raises(DataError, match=r"^t:1: no token of an answer is left to train"):
        renderer_of(merging).render(replace(row, rejected=[{"role": "user", "content": "None."}]))


def test_a_labelled_row_trains_its_last_answer(merging):
    (shown,) = renderer_of(merging).render(conversation(TALK, label=False))
    assert (trained(merging, shown), shown.label) == (["Now 13.<|im_end|>"], False)


def test_lengths_are_measured_as_rendered_and_a_cut_loses_the_end(merging):
    rows = [conversation(TALK), conversation(TALK[:2]), conversation(TALK, rejected=[TALK[1], TALK[0], TALK[3]])]
    renderer = renderer_of(merging, turns="each")
    lengths = renderer.measure(rows)
    assert lengths == [max(len(one.token_ids) for one in renderer.render(row)) for row in rows]
    (whole,) = renderer_of(merging).render(rows[0])
    cut = renderer_of(merging, max_length=whole.prompt_length + 2, truncation="right")
    assert cut.measure(rows[:1]) == [len(whole.token_ids)]
    (shown,) = cut.render(rows[0])
    assert shown.token_ids == whole.token_ids[: whole.prompt_length + 2]
    assert sum(shown.loss_mask) == 2
    (refused,) = renderer_of(merging, max_length=whole.prompt_length, truncation="right").measure(rows[:1])
    assert str(refused).startswith("t:1: no token of an answer is left to train within the first ")
    (refused,) = renderer.measure([conversation([{"role": "user", "content": "x " * 10**6}, TALK[1]])], 100)
    assert isinstance(refused, Overlong)
    assert "max_length is 100" in str(refused)


def test_it_pickles_for_workers_and_its_fingerprint_tells_settings_apart(merging):
    renderer = renderer_of(merging, turns="each")
    again = pickle.loads(pickle.dumps(renderer))
    assert again.render(conversation(TALK))[0].loss_mask == renderer.render(conversation(TALK))[0].loss_mask
    others = [
        renderer_of(merging),
        renderer_of(merging, QWEN3, turns="each"),
        renderer_of(merging, max_length=9, truncation="right"),
    ]
    assert len({one.fingerprint() for one in (renderer, *others)}) == 4
    assert again.fingerprint() == renderer.fingerprint()


def read(row_id, row):
    if "messages" not in row:
        raise DataError(f"{row_id}: no messages")
    return Conversation(row_id, row["messages"], source="s")


def dataset_of(tokenizer, *rows, **options):
    settings = {"bad_rows": options.pop("bad_rows", "refuse"), "known_lengths": options.pop("known_lengths", None)}
    return ConversationDataset([*rows], renderer_of(tokenizer, **options), read, **settings)


def test_a_dataset_renders_rows_and_names_those_that_cannot_be_used(merging):
    rows = [{"messages": TALK}, {"messages": TALK[:1]}, {"messages": TALK[:2]}]
    dataset = dataset_of(merging, *rows, turns="each", bad_rows="skip", max_length=100)
    assert [len(dataset[index]) for index in range(len(dataset))] == [2, 1]
    assert [trained(merging, one) for one in dataset[0]] == [["There are 12.<|im_end|>"], ["Now 13.<|im_end|>"]]
    assert (dataset.summary.read, dataset.summary.kept, dataset.has_media) == (3, 2, False)
    assert "no answer to train" in dataset.summary.bad[0]
    assert dataset.digest != dataset_of(merging, *rows[2:]).digest
    with pytest.raises(DataError, match="1 of 3 rows cannot be used"):
        dataset_of(merging, *rows, max_length=100)


def test_what_is_over_the_limit_is_refused_left_out_or_cut(merging):
    rows = [{"messages": TALK[:2]}, {"messages": TALK}]
    (short,), (whole,) = (renderer_of(merging).render(conversation(row["messages"])) for row in rows)
    limit = len(whole.token_ids) - 3
    message = rf"1 of 2 rows are over data.max_length={limit} tokens \(the longest has {limit + 3} or more\)"
    for bad_rows in ("refuse", "skip"):
        with pytest.raises(DataError, match=message):
            dataset_of(merging, *rows, max_length=limit, bad_rows=bad_rows)
    dropped = dataset_of(merging, *rows, max_length=limit, truncation="drop")
    assert (len(dropped), dropped.summary.overlong, dropped.summary.cut) == (1, 1, 0)
    assert dropped[0][0].token_ids == short.token_ids
    assert len(list(dropped.left_out())) == 1
    cut = dataset_of(merging, *rows, max_length=limit, truncation="right")
    assert (len(cut), cut.summary.overlong, cut.summary.cut, cut.summary.longest) == (2, 0, 1, limit)
    assert cut[1][0].token_ids == whole.token_ids[:limit]
    assert not list(cut.left_out())


def test_lengths_of_conversations_are_cached_apart(merging, tmp_path):
    rows = [{"messages": TALK}] * 1000
    first = dataset_of(merging, *rows, max_length=100, known_lengths=tmp_path)
    again = dataset_of(merging, *rows, max_length=100, known_lengths=tmp_path)
    each = dataset_of(merging, *rows, max_length=100, known_lengths=tmp_path, turns="each")
    assert (first.summary, first.digest) == (again.summary, again.digest) == (each.summary, each.digest)
    row = conversation(TALK)
    known = KnownLengths(tmp_path / "x.sqlite", "")
    others = [replace(row, rejected=[TALK[1]]), replace(row, label=True), replace(row, template_kwargs={"a": 1})]
    assert len({known.key(one) for one in (row, *others)}) == 4
    assert known.key(replace(row, id="t:2")) == known.key(row)


def test_a_pair_of_several_turns_is_split_where_its_row_was(merging):
    chosen, rejected = list(TALK), [TALK[0], {"role": "assistant", "content": "None."}, *TALK[2:]]
    row = ConversationReader()("t:1", {"chosen": chosen, "rejected": rejected})
    better, worse = renderer_of(merging).render(row)
    assert trained(merging, better) == ["There are 12.<|im_end|>", "Now 13.<|im_end|>"]
    assert trained(merging, worse) == ["None.<|im_end|>", "Now 13.<|im_end|>"]
