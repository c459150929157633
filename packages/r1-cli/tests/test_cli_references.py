"""Whom the reference-probability reward asks, what it makes of the answers, and what it subtracts."""

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import cli_ranks
import pytest
import ranks
import torch
from cli_fakes import collector, start
from cli_ranks import build, step_samples
from cli_references import TAGGED, TERMS, Canned, Characters, asking, cut, inputs_of, prompt_of
from test_cli_ranks import ranked

from r1_cli.build.rewards.base_scores import BaseScoreFile, fill_bases, key_of
from r1_cli.build.rewards.connect import has_column
from r1_cli.build.rewards.frozen_model import FrozenReading
from r1_cli.build.rewards.mixed import MixedVerifier
from r1_cli.build.rewards.own_models import LearnerReading
from r1_cli.build.rewards.reference_verifier import ReferenceVerifier
from r1_cli.config import ConfigError
from r1_cli.models.attention import attend_packed
from r1_cli.runs.track.timing import Stopwatch
from r1_cli.train.groups.group import SampledInput
from r1_core.filtering import KeepAll
from r1_core.learner.batching import Batching, MicroLimit
from r1_core.learner.parallel import Parallel
from r1_core.learner.passes import Passes
from r1_rewards.reference.options import read_options
from r1_rewards.types import RewardFailure, RewardInput, Score
from r1_rollout.types import Completion

# --- what becomes of odd answers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "truth", "cause"),
    [
        (TAGGED, "42", None),
        ("42", "42", "form"),
        ("", "42", "form"),
        ("<answer>42</answer>", "42", "form"),
        (TAGGED + "<answer>1</answer>", "42", "form"),
        ("<think>a</think><think>b</think><answer>1</answer>", "42", "form"),
        ("</think><think><answer>1</answer>", "42", "form"),
        (TAGGED, "", "reference"),
        (TAGGED, " \n\t", "reference"),
        (TAGGED, "4" * 2000, "length"),
        ("<think>\N{GRINNING FACE}\u0301</think><answer>é</answer>", "\N{GRINNING FACE}ß", None),
        ("<think>no end <answer>1", "42", "form"),
    ],
)
def test_every_response_gets_a_number_and_the_cause_where_it_was_not_scored(
    response: str, truth: str, cause: str | None
) -> None:
    (score,) = asking(Canned(), use_debiasing=False)(inputs_of(response, prompt=prompt_of(truth)))
    causes = {key for key, value in score.parts.items() if key.startswith("unscored_") and value}
    assert causes == ({f"unscored_{cause}"} if cause else set())
    assert score.parts["unscored"] == bool(cause)
    assert score.parts["score_b"] == pytest.approx(0.0 if cause else 0.5)
    assert score.error is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("aggregation", ["mean_exp_log_softmax", "mean_log_softmax", "exp_mean_log_softmax"])
@pytest.mark.parametrize("clip", [True, False])
def test_log_probs_that_are_no_numbers_never_make_a_reward_that_is_none(
    value: float, aggregation: str, clip: bool
) -> None:
    verifier = asking(Canned(value), aggregation=aggregation, clip=clip, shaping_function_name="identity")
    (score,) = verifier(inputs_of(TAGGED))
    assert math.isfinite(score.value)
    assert all(map(math.isfinite, score.parts.values()))


def test_what_nobody_answers_is_a_failure_that_the_runs_policy_decides_about() -> None:
    kept, dropped = (asking(Canned(silent=True), policy)(inputs_of(TAGGED))[0] for policy in ("score", "drop"))
    assert kept.error is not None
    assert (kept.error.cause, kept.value, kept.keep, dropped.keep) == ("remote", 0.0, True, False)


def test_a_whole_draw_is_one_call_with_each_prompt_once_and_no_token_twice() -> None:
    reading, prompt = Canned(), prompt_of()
    asking(reading)(inputs_of(TAGGED, "no form", TAGGED, prompt=prompt))
    (call,) = reading.calls
    assert [one[0] for one in call] == [prompt, prompt]
    kept = TAGGED.index("<answer>")
    assert all(begin == kept for _, _, begin in call)
    assert all("".join(map(chr, tokens)) == TAGGED[:kept] + "<answer> 42 </answer>$" for _, tokens, _ in call)


def test_debiasing_subtracts_what_the_row_brings_and_says_where_there_is_nothing() -> None:
    verifier = asking(Canned())
    known, unknown, odd = (
        verifier(inputs_of(TAGGED, prompt=prompt))[0].parts
        for prompt in (prompt_of(scoreA=0.2), prompt_of(), prompt_of(scoreA=math.nan))
    )
    assert (known["score_a"], known["delta"], known["no_score_a"]) == pytest.approx((0.2, 0.3, 0.0))
    assert unknown == odd
    assert (unknown["score_a"], unknown["delta"], unknown["no_score_a"]) == pytest.approx((0.0, 0.5, 1.0))


def test_a_repeated_run_of_words_costs_one_and_is_a_part_of_its_own() -> None:
    repeated = "one two three four five six seven eight nine ten " * 11
    verifier = asking(Canned(), repetition_penalty=True)
    plain, punished = verifier(inputs_of(TAGGED, f"<think>{repeated}</think><answer>1</answer>"))
    assert (plain.parts["repetition"], punished.parts["repetition"]) == (0.0, -1.0)
    assert punished.value == pytest.approx(plain.value - 1)


def test_it_is_added_to_verifiers_by_weight_and_keeps_its_parts_names() -> None:
    def half(inputs: Sequence[RewardInput]) -> list[Score]:
        return [Score(0.5, {"overall": 0.5, "accuracy": 1.0}) for _ in inputs]

    (score,) = MixedVerifier(half, {"rlpr": (2.0, asking(Canned(), format_weight=0.0))})(inputs_of(TAGGED))
    assert score.value == pytest.approx(0.5 + 2 * 0.5)
    assert (score.parts["accuracy"], score.parts["rlpr/score_b"]) == pytest.approx((1.0, 0.5))


# --- whom it asks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["text", "pictures"])
def test_learner_ranks_and_a_frozen_model_say_the_same(name: str) -> None:
    learner, _ = build(name, "KL", Parallel())
    frozen = FrozenReading(learner.model, Batching(False, experience=MicroLimit(2)), torch.device("cpu"))
    query = cut(step_samples(name))
    expected = LearnerReading(learner, "policy", 1.0).read_logprobs(*query)
    assert [len(row) for row in expected] == [len(r) - s for _, r, s in zip(*query, strict=True)]
    for reading in (LearnerReading(ranked(name)[0], "policy", 1.0), frozen):
        for row, own in zip(reading.read_logprobs(*query), expected, strict=True):
            assert row == pytest.approx(own, abs=1e-6)
    assert LearnerReading(learner, "reference", 1.0).read_logprobs(*query) != expected
    with pytest.raises(ValueError, match=r"not at 0\.5"):
        LearnerReading(learner, "policy", 1.0).read_logprobs(*query, 0.5)


@pytest.mark.slow
def test_two_ranks_say_of_pictures_what_one_learner_does() -> None:
    query = cut(step_samples("pictures"))
    expected = LearnerReading(build("pictures", "KL", Parallel())[0], "policy", 1.0).read_logprobs(*query)
    for found in ranks.run(cli_ranks.read_aloud, "pictures", query):
        assert [pytest.approx(row, abs=1e-9) for row in expected] == found


def test_the_policy_is_asked_in_one_pass_over_the_spliced_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    passes, compute = [], Passes.compute
    monkeypatch.setattr(
        Passes, "compute", lambda self, samples, *more: passes.append(list(samples)) or compute(self, samples, *more)
    )
    learner, _ = build("text", "KL", Parallel())
    prompts, responses, starts = cut(step_samples("text"))
    LearnerReading(learner, "policy", 1.0).read_logprobs(prompts, responses, starts)
    (samples,) = passes
    tokens = sum(len(one.token_ids) for one in samples)
    assert tokens == sum(len(p.token_ids) + len(r) for p, r in zip(prompts, responses, strict=True))
    assert [one.response_length for one in samples] == [len(r) - s for r, s in zip(responses, starts, strict=True)]


def test_a_prompt_is_computed_once_for_all_its_spliced_answers() -> None:
    learner, _ = build("text", "KL", Parallel())
    prompts, responses, starts = cut(step_samples("text"))
    query = [prompts[0]] * 3, responses[:3], starts[:3]
    expected = LearnerReading(learner, "policy", 1.0).read_logprobs(*query)
    attend_packed(learner.model)
    learner.batching = Batching(experience=MicroLimit(3), share_prompts=True)
    widths: list[int] = []
    learner.model.register_forward_pre_hook(
        lambda module, args, inputs: widths.append(inputs["input_ids"].numel()), with_kwargs=True
    )
    found = LearnerReading(learner, "policy", 1.0).read_logprobs(*query)
    assert widths == [len(prompts[0].token_ids) + sum(map(len, responses[:3]))]
    for row, own in zip(found, expected, strict=True):
        assert row == pytest.approx(own, abs=1e-6)


def test_what_a_frozen_model_says_depends_on_the_prompts_own_responses_alone() -> None:
    learner, _ = build("text", "KL", Parallel())
    frozen = FrozenReading(learner.model, Batching(False, experience=MicroLimit(2)), torch.device("cpu"))
    prompts, responses, starts = cut(step_samples("text"))
    whole = frozen.read_logprobs(prompts, responses, starts)
    alone = [frozen.read_logprobs([p], [r], [s])[0] for p, r, s in zip(prompts, responses, starts, strict=True)]
    assert whole == alone


def test_a_frozen_model_is_passed_one_text_at_a_time_if_padding_changes_it_and_refused_if_it_is_wrong_alone() -> None:
    model, texts = build("text", "KL", Parallel())[0].model, [[5, 9, 11], [7, 3, 8, 2, 6, 4, 12, 10]]
    frozen = FrozenReading(model, Batching(False, experience=MicroLimit(2)), torch.device("cpu"))
    frozen.require_right(texts, torch.float32)
    assert not frozen._passes.batching.single
    alone = [False]

    def spoil(module: Any, args: Any, output: Any) -> Any:
        wrong = len(output.logits) > 1 or (alone[0] and module.config._attn_implementation != "eager")
        output.logits = output.logits + wrong * output.logits.roll(1, -1)
        return output

    model.register_forward_hook(spoil)
    frozen.require_right(texts, torch.float32)
    assert frozen._passes.batching.single
    alone[0] = True
    with pytest.raises(ValueError, match=r"log-probs are off by .* of its own eager attention"):
        frozen.require_right(texts, torch.float32)


def test_a_model_apart_is_asked_while_the_engine_samples() -> None:
    query = threading.Event()

    class Noting(Canned):
        def read_logprobs(self, *args: Any, **kwargs: Any) -> list[list[float]]:
            query.set()
            return super().read_logprobs(*args, **kwargs)

    class Patient:
        """An engine that gives its second group when the first one's log-probs have been asked for."""

        version, waited = 0, False

        def generate(self, prompts: Sequence[Any], params: Any) -> Iterator[tuple[int, list[Completion]]]:
            text = [*map(ord, TAGGED)]
            for index in range(len(prompts)):
                self.waited = index == 0 or query.wait(60)
                yield index, [Completion(text, [-1.0] * len(text), "stop", 0)] * params.n

        @contextmanager
        def active(self, source: Any) -> Iterator[None]:
            yield

    engine, verifier = Patient(), asking(Noting(concurrent=True))
    assert verifier.per_sample
    assert not asking(Canned()).per_sample
    own = collector(engine, wanted=2, verifier=verifier)
    own = replace(own, sampler=replace(own.sampler, tokenizer=Characters()))
    own.collect(start(KeepAll()), Stopwatch())
    assert engine.waited


# --- what it subtracts -----------------------------------------------------------------------------------------------


def test_base_scores_go_on_where_they_were_cut(tmp_path: Path) -> None:
    path, reading = tmp_path / "scores.jsonl", Canned()
    query = asking(reading).query
    assert query is not None
    options, prompts = read_options({}), [prompt_of(row=row) for row in range(100)]
    fill_bases(BaseScoreFile(path, TERMS), prompts[:70], query, options)
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])  # a kill has cut the last line
    again = BaseScoreFile(path, TERMS)
    assert key_of(prompts[68]) in again
    assert key_of(prompts[69]) not in again
    reading.calls.clear()
    fill_bases(again, prompts, query, options)
    assert sum(map(len, reading.calls)) == 31
    assert set(BaseScoreFile(path, TERMS).rows().values()) == {0.5}


def test_a_model_that_does_not_answer_leaves_no_gap_among_base_scores(tmp_path: Path) -> None:
    query, file = asking(Canned(silent=True)).query, BaseScoreFile(tmp_path / "a.jsonl", TERMS)
    assert query is not None
    with pytest.raises(RewardFailure, match="no log-probs of 2 in 2"):
        fill_bases(file, [prompt_of(row=1), prompt_of(row=2)], query, read_options({}))
    assert not BaseScoreFile(tmp_path / "a.jsonl", TERMS).rows()


def test_a_row_without_a_base_score_is_kept_as_such(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    query = asking(Canned(math.nan), longest=100).query
    assert query is not None
    file, prompts = (
        BaseScoreFile(tmp_path / "a.jsonl", TERMS),
        [prompt_of(""), prompt_of("4" * 200, 2), prompt_of("1", 3)],
    )
    fill_bases(file, prompts, query, read_options({}))
    assert [file.get(key_of(prompt)) for prompt in prompts] == [None, None, None]
    assert "3 rows have no base score" in caplog.text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"temperature": 0.6}, "temperature=0.6 and not 1.0"),
        ({"aggregation": "mean_log_softmax"}, "aggregation="),
        ({"model": "models/other"}, "model='other' and not 'tiny'"),
        ({"model": "elsewhere/tiny"}, None),
    ],
)
def test_scores_that_came_about_otherwise_are_told_apart(
    change: dict[str, Any], said: str | None, tmp_path: Path
) -> None:
    other = replace(TERMS, **change)
    found = TERMS.problem(other.to_json())
    assert (found is None) if said is None else (said in str(found))
    BaseScoreFile(tmp_path / "a.jsonl", other)
    if said is not None:
        with pytest.raises(ValueError, match="has base scores with"):
            BaseScoreFile(tmp_path / "a.jsonl", TERMS)
    assert "has not written" in str(TERMS.problem("0.5"))


def test_a_column_is_taken_where_it_is_and_asked_for_by_name_where_it_has_to_be(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def found(options: dict[str, Any], **columns: Any) -> bool:
        rows: Any = [prompt_of(**columns)]
        return has_column("train", rows, read_options(options), TERMS)

    assert not found({})
    assert found({}, scoreA=0.1, scoreA_terms=TERMS.to_json())
    assert not caplog.records
    assert found({}, scoreA=0.1)
    assert "terms of column scoreA are unknown" in caplog.text
    assert not found({"score_a": "online"}, scoreA=0.1)
    assert found({"strict": "easyr1_rlpr"}), "the fork computes none in a run"
    with pytest.raises(ConfigError, match="`r1 score-a` writes it"):
        found({"score_a": "column"})
    with pytest.raises(ConfigError, match=r"temperature=0\.5 and not 1\.0"):
        found({}, scoreA=0.1, scoreA_terms=replace(TERMS, temperature=0.5).to_json())


def test_inputs_of_other_callers_are_refused_with_the_reason() -> None:
    with pytest.raises(RuntimeError, match="needs the tokens"):
        asking(Canned())([RewardInput(TAGGED, "42")])
    with pytest.raises(RuntimeError, match="before its model is loaded"):
        ReferenceVerifier(read_options({}))(inputs_of(TAGGED))
    assert all(isinstance(one, SampledInput) for one in inputs_of(TAGGED))
