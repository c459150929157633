"""Tests of tokens of many texts at once: those that the tokenizer itself gives for each."""

import copy

import pytest
from tokenizers import Regex, normalizers
from transformers import PreTrainedTokenizerFast

from r1_data.tokens import count_beyond, encode_all

TEXTS = ["", "a", "<|im_start|>user\nHow many?<|im_end|>", "é 👩‍🚀 \u2028", "x" * 5000, "<|image_pad|> <|none|>"]


class Spelling(PreTrainedTokenizerFast):
    """A tokenizer that writes a text anew before it is cut, as some families do."""

    def _encode_plus(self, text, *args, **settings):
        return super()._encode_plus([one.upper() for one in text], *args, **settings)


@pytest.mark.parametrize("split_special_tokens", [False, True])
def test_many_texts_have_the_tokens_that_each_has_alone(tokenizer, split_special_tokens):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.split_special_tokens = split_special_tokens
    alone = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    assert encode_all(tokenizer, TEXTS) == alone
    assert encode_all(tokenizer, []) == []


def test_what_was_set_for_another_text_cuts_none_here(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    expected = encode_all(tokenizer, TEXTS)
    tokenizer(TEXTS, padding="max_length", truncation=True, max_length=3, split_special_tokens=True)
    assert encode_all(tokenizer, TEXTS) == expected


def test_a_tokenizer_with_a_way_of_its_own_goes_that_way(tokenizer):
    spelling = Spelling(tokenizer_object=copy.deepcopy(tokenizer.backend_tokenizer))
    assert encode_all(spelling, ["ab"]) == encode_all(tokenizer, ["AB"])


@pytest.mark.parametrize("text", ["x" * 10**6, "a b " * 10**5, "<|im_end|>" * 10**5])
def test_a_long_text_is_known_to_be_over_the_limit_from_its_beginning(tokenizer, text):
    found = count_beyond(tokenizer, text, 100)
    assert 100 < found <= len(encode_all(tokenizer, [text])[0])


def test_a_long_text_of_few_tokens_is_tokenized_as_a_whole(tokenizer):
    lean = copy.deepcopy(tokenizer)
    lean.backend_tokenizer.normalizer = normalizers.Replace(Regex(" +"), " ")  # as some tokenizers take white space
    text = "a" + " " * 10**6 + "b"
    assert count_beyond(lean, text, 100) is None
    assert len(encode_all(lean, [text])[0]) == 3
