"""The reference-probability reward (RLPR): splicing, aggregation, shaping, and one call for a batch."""

import math
import re

import pytest

from r1_rewards import RewardInput, RewardSpecError, load, reference_probability
from r1_rewards.reference.options import read_options
from r1_rewards.reference.reference_probability import ReferenceProbability, Settings, combine
from r1_rewards.reference.shaping import AGGREGATIONS, aggregate, bins, shaping
from r1_rewards.reference.splice import splice, splice_alone
from r1_rewards.reference.tokens import splice_tokens

RESPONSE = "<think>6*7</think> <answer> 41 </answer>"


def tokenizer(text, *, add_special_tokens, return_offsets_mapping):
    """Words with the blank before them, and single signs, as byte-pair tokenizers cut."""
    matches = list(re.finditer(r" ?\w+| ?[^\w\s]|\s", text))
    return {
        "input_ids": [sum(map(ord, match.group())) for match in matches],
        "offset_mapping": [match.span() for match in matches],
    }


def spliced_tokens(found):
    offsets = tokenizer(found.text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    return [found.text[slice(*offsets[place])] for place in found.scored]


def test_the_reference_takes_the_place_of_the_answer():
    found = splice(RESPONSE, "forty two", tokenizer, eos="$")
    assert found.text == "<think>6*7</think> <answer> forty two </answer>$"
    assert spliced_tokens(found) == [" forty", " two"]
    assert found.ids[found.reference_start] == ord(" ") + ord("<")
    assert len(found.ids) == len(
        tokenizer(found.text, add_special_tokens=False, return_offsets_mapping=True)["input_ids"]
    )


@pytest.mark.parametrize(
    ("response", "mode", "lenient", "strict"),
    [
        (RESPONSE, "r1", True, True),
        ("<think>a</think> so <answer>1</answer>", "r1", True, False),
        ("Sure. <think>a</think><answer>1</answer>", "r1", True, False),
        ("<think>a</think><answer>1", "r1", True, False),
        ("<think>a</think><answer>1</answer><answer>2</answer>", "r1", False, False),
        ("<answer>1</answer><think>a</think>", "r1", False, False),
        ("no tags", "r1", False, False),
        ("so <answer>1</answer>", "r1_nothink", True, True),
    ],
)
def test_rules_say_which_responses_can_be_scored(response, mode, lenient, strict):
    for rule, expected in (("lenient", lenient), ("strict", strict)):
        assert (splice(response, "42", tokenizer, mode=mode, rule=rule) is not None) is expected


def test_blanks_after_the_tag_are_the_models_own_unless_strict_and_the_references_are_dropped():
    response = "<think>a</think><answer>\n41</answer>"
    assert splice(response, " 42 ", tokenizer).text.endswith("<answer>\n42 </answer>")
    assert splice(response, " 42 ", tokenizer, rule="strict").text.endswith("<answer> 42 </answer>")
    assert splice(response, "  ", tokenizer) is None


def test_a_reference_that_occurs_elsewhere_is_scored_in_its_place_only():
    found = splice("<think>42 is 42</think><answer>41</answer>", "42", tokenizer)
    assert len(found.scored) == 1
    assert found.scored[0] > found.reference_start


@pytest.mark.parametrize(
    ("context", "text", "first"),
    [
        ("tagged", "<answer> forty two </answer>", " forty"),
        ("plain", " forty two ", " forty"),
        ("suffix", " Answer: forty two", "forty"),
    ],
)
def test_the_base_score_asks_for_the_reference_without_reasoning(context, text, first):
    found = splice_alone("forty two", tokenizer, context=context)
    assert found.text == text
    assert [found.ids[place] for place in found.scored] == [sum(map(ord, first)), sum(map(ord, " two"))]
    assert splice_alone(" ", tokenizer, context=context) is None


def test_aggregations_are_means_and_products_of_probabilities():
    logs = [math.log(0.5), math.log(0.125)]
    found = {name: aggregate(logs, name) for name in AGGREGATIONS}
    assert found == pytest.approx(
        {
            "mean_exp_log_softmax": 0.3125,
            "mean_log_softmax": math.log(0.25),
            "exp_sum_log_softmax": 0.0625,
            "exp_mean_log_softmax": 0.25,
        }
    )
    assert aggregate([], "mean_log_softmax") == 0.0
    assert aggregate([-math.inf], "exp_sum_log_softmax") == 0.0
    with pytest.raises(ValueError, match="must be one of"):
        aggregate(logs, "mean")


@pytest.mark.parametrize(
    ("name", "x", "value"),
    [
        ("identity", -0.3, -0.3),
        ("one_minus", 0.3, 0.7),
        ("threshold_0.2", 0.1, 0.0),
        ("threshold_0.2", 0.2, 0.2),
        ("leaky_0.2", 0.1, 0.001),
        ("sigmoid_6", 0.5, 0.5),
        ("sigmoid_0", 0.0, 0.5),
        ("comp_threshold_0.2_sigmoidv2fixed_5", 0.2, 0.2),
        ("comp_threshold_0.2_sigmoidv3_5", 1.0, 1.0),
        ("comp_threshold_0.2_tanh_4", 0.5, 0.5),
        ("comp_threshold_0.2_sigmoid_4", 0.0, 0.0),
    ],
)
def test_shapings_do_what_their_names_say(name, x, value):
    assert shaping(name)(x) == pytest.approx(value)
    assert math.isnan(shaping("threshold_0")(math.nan))


@pytest.mark.parametrize(
    "name", ["threshold", "threshold_", "leaky_x", "comp_threshold_1", "comp_threshold_0_cosh_1", "no"]
)
def test_malformed_shapings_are_refused(name):
    with pytest.raises(ValueError, match="shaping"):
        shaping(name)


def test_bins_round_to_the_nearest_with_halves_to_even():
    assert [bins("bin_4")(x) for x in (0.1, 0.125, 0.375, 0.9)] == [0.0, 0.0, 0.5, 1.0]
    with pytest.raises(ValueError, match="at least 1"):
        bins("bin_0")


def policy(prompts, rows):
    assert len(prompts) == len(rows)
    return [[math.log(0.25)] * len(row) for row in rows]


def test_the_reward_weighs_probability_above_base_and_format():
    score = reference_probability.score(RESPONSE, "42", logprobs=policy, tokenizer=tokenizer, base_score=0.05)
    assert score.parts == pytest.approx(
        {
            "overall": 0.9 * 0.2 + 0.1, "format": 1.0, "probability": 0.2, "score_b": 0.25, "score_a": 0.05,
            "delta": 0.2, "unscored": 0.0,
        }
    )  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "response", "overall"),
    [
        (Settings(use_debiasing=False), RESPONSE, 0.9 * 0.25 + 0.1),
        (Settings(format_weight=-1.0), "no tags", -1.0),
        (Settings(format_weight=-1.0), RESPONSE, 0.2),
        (Settings(format_weight=1.0), RESPONSE, 1.0),
        (Settings(discrete_function_name="bin_2"), RESPONSE, 0.1),
        (Settings(shaping_function_name="one_minus", clip=False), "no tags", 0.9 * 1.05),
        (Settings(aggregation="mean_log_softmax", clip=False, shaping_function_name="identity"), RESPONSE,
         0.9 * (math.log(0.25) - 0.05) + 0.1),
    ],
)  # fmt: skip
def test_settings_change_the_reward_as_they_say(settings, response, overall):
    found = reference_probability.score(
        response, "42", logprobs=policy, tokenizer=tokenizer, base_score=0.05, settings=settings
    )
    assert found.value == pytest.approx(overall)


def test_one_call_scores_a_batch_in_order_and_skips_what_cannot_be_scored():
    calls = []

    def logprobs(prompts, rows):
        calls.append(list(prompts))
        return [
            [math.log(0.5 if prompt == "a" else 0.25)] * len(row) for prompt, row in zip(prompts, rows, strict=True)
        ]

    verifier = ReferenceProbability(logprobs, tokenizer, Settings(format_weight=0.0))
    inputs = [
        RewardInput(RESPONSE, "42", prompt="a"),
        RewardInput("no tags", "42", prompt="b"),
        RewardInput(RESPONSE, "42", prompt="c", metadata={"scoreA": 0.1}),
    ]
    scores = verifier(inputs)
    assert [score.value for score in scores] == pytest.approx([0.5, 0.0, 0.15])
    assert [score.parts["unscored"] for score in scores] == [0.0, 1.0, 0.0]
    assert calls == [["a", "c"]]
    assert verifier([]) == []
    assert verifier.base_scores(["a", "b"], ["42", " "]) == pytest.approx([0.5, 0.0])


@pytest.mark.parametrize("base", [math.nan, math.inf, "0.5", "no", True])
def test_a_base_score_that_is_no_finite_number_is_refused_with_its_input(base):
    inputs = [RewardInput(RESPONSE, "42"), RewardInput(RESPONSE, "42", metadata={"scoreA": base})]
    with pytest.raises(ValueError, match=rf"the column 'scoreA' of input 1 is '?{base}'?, not a finite number"):
        ReferenceProbability(policy, tokenizer, Settings())(inputs)
    inputs[1] = RewardInput(RESPONSE, "42", metadata={"scoreA": None})
    assert len({score.value for score in ReferenceProbability(policy, tokenizer, Settings())(inputs)}) == 1


def test_a_log_prob_that_is_no_number_is_worth_nothing_and_counted():
    score = reference_probability.score(
        RESPONSE, "42", logprobs=lambda prompts, rows: [[math.nan] * len(rows[0])], tokenizer=tokenizer
    )
    assert score.parts["unscored"] == 1.0
    assert score.value == pytest.approx(0.1)


def test_one_more_token_is_scored_with_at_most_one_half():
    settings = Settings(one_more_token=True, format_weight=0.0)
    sure = reference_probability.score(
        RESPONSE, "42", logprobs=lambda prompts, rows: [[0.0] * len(rows[0])], tokenizer=tokenizer, settings=settings
    )
    assert sure.value == pytest.approx(0.75)


def test_wrong_numbers_of_log_probs_and_wrong_settings_are_refused():
    with pytest.raises(ValueError, match="for a row of"):
        reference_probability.score(RESPONSE, "42", logprobs=lambda prompts, rows: [[0.0]], tokenizer=tokenizer)
    with pytest.raises(ValueError, match="format_weight is 2"):
        Settings(format_weight=2)
    with pytest.raises(ValueError, match="shaping is"):
        Settings(shaping_function_name="cosine")


class Characters:
    """A tokenizer of characters that merges `pairs`; it can write any tokens as text."""

    def __init__(self, *pairs):
        self.pairs = pairs

    def __call__(self, text, *, add_special_tokens, return_offsets_mapping):
        matches = list(re.finditer("|".join([*map(re.escape, self.pairs), r"[\s\S]"]), text))
        ids = [self.number(match.group()) for match in matches]
        return {"input_ids": ids, "offset_mapping": [match.span() for match in matches]}

    def number(self, piece):
        return -1 - self.pairs.index(piece) if piece in self.pairs else ord(piece)

    def decode(self, token_ids, *, skip_special_tokens):
        return "".join(self.pairs[-1 - token] if token < 0 else chr(token) for token in token_ids)


def ids_of(coder, *pieces):
    return [coder.number(piece) for piece in pieces]


def test_reasoning_stays_as_it_was_sampled_even_where_the_tokenizer_would_cut_it_otherwise():
    coder = Characters("ab", "</think>", "<answer>")
    text = "<think>ab</think><answer>41</answer>"
    whole = coder(text, add_special_tokens=False, return_offsets_mapping=True)["input_ids"]
    own = [*map(ord, "<think>ab"), *ids_of(coder, "</think>", "<answer>"), *map(ord, "41</answer>")]
    assert coder.decode(own, skip_special_tokens=False) == text
    for tokens, kept in ((whole, 9), (own, 10)):
        found = splice_tokens(tokens, "42", coder)
        assert found.kept == kept
        assert [found.ids[place] for place in found.scored] == [ord("4"), ord("2")]
        spliced = coder.decode([*tokens[: found.kept], *found.ids], skip_special_tokens=False)
        assert spliced == splice(text, "42", coder).text


def test_a_token_across_the_beginning_of_the_answer_is_cut_anew():
    coder = Characters(">\n<")
    tokens = [*map(ord, "<think>a</think"), coder.number(">\n<"), *map(ord, "answer>1</answer>")]
    found = splice_tokens(tokens, "42", coder)
    assert found.kept == len("<think>a</think")
    assert coder.decode(found.ids, skip_special_tokens=False) == ">\n<answer> 42 </answer>"


def test_what_cannot_be_spliced_says_why():
    coder = Characters()
    assert splice_tokens([ord("a")], "42", coder) == "form"
    assert splice_tokens([], "42", coder) == "form"
    assert splice_tokens(list(map(ord, RESPONSE)), " \n", coder) == "reference"


def test_a_box_takes_the_reference_without_blanks():
    coder, response = Characters(), r"<think>\boxed{1}, no</think>So \boxed{2}."
    found = splice_tokens(list(map(ord, response)), "42", coder, mode="think_box")
    spliced = response[: found.kept] + coder.decode(found.ids, skip_special_tokens=False)
    assert spliced == r"<think>\boxed{1}, no</think>So \boxed{42}"
    assert splice_tokens(list(map(ord, r"\boxed{2}")), "42", coder, mode="think_box") == "form"
    assert splice_alone("42", coder, mode="box").text == r"\boxed{42}"


def test_options_are_the_documents_and_the_forks_where_asked_for():
    options = read_options({"format_mode": "R1_nothink", "gt_tokens_one_more": True})
    assert (options.format_mode, options.one_more_token, options.rule) == ("r1_nothink", True, "lenient")
    fork = read_options({"strict": "easyr1_rlpr"})
    assert (fork.rule, fork.shaping_function_name) == ("strict", "identity")
    assert combine([math.nan], RESPONSE, 0.0, fork).parts["score_b"] == 1.0
    assert combine([-3.0], RESPONSE, 0.0, read_options({"strict": "easyr1_rlpr", "format_weight": -1})).value == (
        pytest.approx(2 * math.exp(-3.0) - 1)
    )


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"format_wieght": 0.1}, "did you mean 'format_weight'"),
        ({"format_weight": 2}, "format_weight is 2"),
        ({"format_weight": True}, "another type"),
        ({"use_debiasing": "yes"}, "another type"),
        ({"format_mode": "R2"}, "must be one of r1, r1_nothink"),
        ({"aggregation": "mean"}, "aggregation is 'mean'"),
        ({"score_a": "never"}, "must be one of auto"),
        ({"strict": "openbmb"}, "must be one of easyr1_rlpr"),
        ({"rule": "strict"}, "takes no 'rule'"),
    ],
)
def test_options_that_do_not_fit_are_named(kwargs, said):
    with pytest.raises(RewardSpecError, match=said):
        read_options(kwargs)


def test_only_a_run_can_ask_its_model():
    with pytest.raises(RewardSpecError, match="which only `r1 train` has"):
        load("reference_probability")
