"""Whom the reference-probability reward asks, what it makes of the answers, and what it subtracts."""

import json
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
from loopback import answering
from test_cli_ranks import ranked

from r1_cli.groups.group import SampledInput, reward_inputs
from r1_cli.reference.bases import BaseFile, Terms, fill_bases, key_of
from r1_cli.reference.frozen import FrozenReading
from r1_cli.reference.mixed import MixedVerifier
from r1_cli.reference.reading import LearnerReading
from r1_cli.reference.served import ServedReading
from r1_cli.reference.verifier import Asked, ReferenceVerifier
from r1_cli.track.stopwatch import Stopwatch
from r1_core.filtering import KeepAll
from r1_core.learner.batching import Batching, MicroLimit
from r1_core.learner.parallel import Parallel
from r1_core.learner.passes import Passes
from r1_core.types import Sample
from r1_data.types import Prompt
from r1_rewards.reference.options import read_options
from r1_rewards.services.endpoint import Patience
from r1_rewards.spec import RewardSpecError
from r1_rewards.types import RewardInput, Score
from r1_rewards.workers.failures import FailureRule
from r1_rollout.types import Completion

TAGGED = "<think>6*7</think> <answer> 41 </answer>"
TERMS = Terms("models/tiny", 1.0, "mean_exp_log_softmax", "r1", "tagged")


class Characters:
    """A tokenizer of one token a character."""

    eos_token = "$"

    def __call__(self, text: str, *, add_special_tokens: bool, return_offsets_mapping: bool) -> dict[str, Any]:
        return {"input_ids": [*map(ord, text)], "offset_mapping": [(i, i + 1) for i in range(len(text))]}

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(map(chr, token_ids))


class Canned:
    """Finds every token as likely as `value` says; remembers what it was asked."""

    def __init__(self, value: float = math.log(0.5), *, concurrent: bool = False, silent: bool = False) -> None:
        self.value, self.concurrent, self.silent = value, concurrent, silent
        self.calls: list[list[tuple[Any, list[int], int]]] = []

    def read_logprobs(self, prompts: Any, responses: Any, starts: Any, temperature: float = 1.0) -> list[list[float]]:
        self.calls.append([*zip(prompts, map(list, responses), starts, strict=True)])
        return [
            [] if self.silent else [self.value] * (len(response) - begin)
            for response, begin in zip(responses, starts, strict=True)
        ]


def prompt_of(truth: str = "42", row: int = 1, **columns: Any) -> Prompt:
    return Prompt(
        id=f"rows:{row}", text="6*7?", token_ids=[1, 2], engine_token_ids=[1, 2],
        position_ids=torch.arange(2)[None], ground_truth=truth, metadata=columns,
    )  # fmt: skip


def asking(reading: Any, policy: str = "score", longest: int = 1000, **options: Any) -> ReferenceVerifier:
    verifier = ReferenceVerifier(read_options(options))
    verifier.asked = Asked(reading, Characters(), "$", 1.0, longest, 1000, FailureRule(policy, 0.0))  # type: ignore[arg-type]
    return verifier


def inputs_of(*responses: str, prompt: Prompt | None = None) -> list[RewardInput]:
    completions = [Completion([*map(ord, text)], [-1.0] * len(text), "stop", 0) for text in responses]
    return reward_inputs(prompt or prompt_of(), completions, Characters())  # type: ignore[arg-type]


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


def cut(samples: Sequence[Sample]) -> tuple[list[Prompt], list[list[int]], list[int]]:
    """Samples as prompts, responses, and the places from which on they are read: the second token."""
    prompts, responses = [], []
    for sample in samples:
        if not sample.loss_mask.any():
            continue
        first = int(sample.loss_mask.int().argmax())
        ids = sample.token_ids.tolist()
        prompts.append(
            Prompt(
                id="rows:1", text="", token_ids=ids[:first], engine_token_ids=ids[:first], ground_truth="",
                position_ids=sample.position_ids[:, :first], model_inputs=sample.model_inputs,
            )
        )  # fmt: skip
        responses.append(ids[first:])
    return prompts, responses, [min(1, len(response) - 1) for response in responses]


@pytest.mark.parametrize("name", ["text", "pictures"])
def test_learner_ranks_and_a_frozen_model_say_the_same(name: str) -> None:
    learner, _ = build(name, "KL", Parallel())
    frozen = FrozenReading(learner.model, Batching(False, experience=MicroLimit(2)), torch.device("cpu"))
    asked = cut(step_samples(name))
    expected = LearnerReading(learner, "policy", 1.0).read_logprobs(*asked)
    assert [len(row) for row in expected] == [len(r) - s for _, r, s in zip(*asked, strict=True)]
    for reading in (LearnerReading(ranked(name)[0], "policy", 1.0), frozen):
        for row, own in zip(reading.read_logprobs(*asked), expected, strict=True):
            assert row == pytest.approx(own, abs=1e-6)
    assert LearnerReading(learner, "reference", 1.0).read_logprobs(*asked) != expected
    with pytest.raises(ValueError, match=r"not at 0\.5"):
        LearnerReading(learner, "policy", 1.0).read_logprobs(*asked, 0.5)


@pytest.mark.slow
def test_two_ranks_say_of_pictures_what_one_learner_does() -> None:
    asked = cut(step_samples("pictures"))
    expected = LearnerReading(build("pictures", "KL", Parallel())[0], "policy", 1.0).read_logprobs(*asked)
    for found in ranks.run(cli_ranks.read_aloud, "pictures", asked):
        assert [pytest.approx(row, abs=1e-9) for row in expected] == found


def test_the_policy_is_asked_in_one_pass_over_the_spliced_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    passes, measure = [], Passes.measure
    monkeypatch.setattr(
        Passes, "measure", lambda self, samples, *more: passes.append(list(samples)) or measure(self, samples, *more)
    )
    learner, _ = build("text", "KL", Parallel())
    prompts, responses, starts = cut(step_samples("text"))
    LearnerReading(learner, "policy", 1.0).read_logprobs(prompts, responses, starts)
    (samples,) = passes
    tokens = sum(len(one.token_ids) for one in samples)
    assert tokens == sum(len(p.token_ids) + len(r) for p, r in zip(prompts, responses, strict=True))
    assert [one.response_length for one in samples] == [len(r) - s for r, s in zip(responses, starts, strict=True)]


def test_what_a_frozen_model_says_depends_on_the_prompts_own_responses_alone() -> None:
    learner, _ = build("text", "KL", Parallel())
    frozen = FrozenReading(learner.model, Batching(False, experience=MicroLimit(2)), torch.device("cpu"))
    prompts, responses, starts = cut(step_samples("text"))
    whole = frozen.read_logprobs(prompts, responses, starts)
    alone = [frozen.read_logprobs([p], [r], [s])[0] for p, r, s in zip(prompts, responses, starts, strict=True)]
    assert whole == alone


def test_a_model_apart_is_asked_while_the_engine_samples() -> None:
    asked = threading.Event()

    class Noting(Canned):
        def read_logprobs(self, *args: Any, **kwargs: Any) -> list[list[float]]:
            asked.set()
            return super().read_logprobs(*args, **kwargs)

    class Patient:
        """An engine that gives its second group when the first one's log-probs have been asked for."""

        version, waited = 0, False

        def generate(self, prompts: Sequence[Any], params: Any) -> Iterator[tuple[int, list[Completion]]]:
            text = [*map(ord, TAGGED)]
            for index in range(len(prompts)):
                self.waited = index == 0 or asked.wait(60)
                yield index, [Completion(text, [-1.0] * len(text), "stop", 0)] * params.n

        @contextmanager
        def awake(self, source: Any) -> Iterator[None]:
            yield

    engine, verifier = Patient(), asking(Noting(concurrent=True))
    assert verifier.per_sample
    assert not asking(Canned()).per_sample
    own = collector(engine, wanted=2, verifier=verifier)
    own = replace(own, scorer=replace(own.scorer, tokenizer=Characters()))
    own.collect(start(KeepAll()), Stopwatch())
    assert engine.waited


# --- over HTTP -------------------------------------------------------------------------------------------------------

READY = Patience(timeout=5.0, deadline=5.0, tries=1)


def as_vllm(body: dict[str, Any]) -> dict[str, Any]:
    """What vLLM answers: a log-prob of minus its number for every token but the first."""
    tokens = body.get("prompt") or body["token_ids"]
    listed = [None, *({str(token): {"logprob": -float(token), "rank": 1}} for token in tokens[1:])]
    return {"choices": [{"text": "", "prompt_logprobs": listed}]}


def as_echo(body: dict[str, Any]) -> dict[str, Any]:
    """What OpenAI's older servers answer, with the token that they have sampled."""
    logprobs = [None, *(-float(token) for token in body["prompt"][1:]), -0.5]
    return {"choices": [{"text": "", "logprobs": {"token_logprobs": logprobs}}]}


@pytest.mark.parametrize("answer", [as_vllm, as_echo])
def test_a_server_is_asked_by_numbers_with_its_token_and_read_from_the_start_on(
    answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "secret")
    seen: list[tuple[dict[str, Any], str, str]] = []

    def respond(body: bytes, path: str, headers: Any) -> tuple[int, Any]:
        seen.append((json.loads(body), path, headers["authorization"]))
        return 200, answer(seen[-1][0])

    with answering(respond) as url:
        reading = ServedReading(f"{url}/v1", served_name="tiny", token_env="MY_TOKEN", patience=READY)
        rows = reading.read_logprobs([prompt_of(), prompt_of()], [[7, 8, 9], [5, 6]], [1, 0])
    assert rows == [[-8.0, -9.0], [-5.0, -6.0]]
    assert {path for _, path, _ in seen} == {"/v1/completions"}
    assert {token for _, _, token in seen} == {"Bearer secret"}
    bodies = sorted((body for body, _, _ in seen), key=lambda body: len(body["prompt"]))
    assert [body["prompt"] for body in bodies] == [[1, 2, 5, 6], [1, 2, 7, 8, 9]]
    assert {body["model"] for body in bodies} == {"tiny"}


def test_pictures_go_to_vllm_itself_with_one_placeholder_each() -> None:
    from PIL import Image

    seen: list[tuple[dict[str, Any], str]] = []

    def respond(body: bytes, path: str, headers: Any) -> tuple[int, Any]:
        seen.append((json.loads(body), path))
        listed: list[Any] = [None] * 5 + [{"8": {"logprob": -1.5}}]
        return 200, {"choices": [{}], "prompt_logprobs": listed}

    picture = replace(
        prompt_of(), token_ids=[3, 3, 3, 3, 1], position_ids=torch.arange(5)[None], engine_token_ids=[3, 1],
        images=(Image.new("RGB", (4, 4)),), model_inputs={"pixel_values": torch.zeros(1)},
    )  # fmt: skip
    with answering(respond) as url:
        assert ServedReading(url, patience=READY).read_logprobs([picture], [[8]], [0]) == [[-1.5]]
    ((body, path),) = seen
    assert path == "/inference/v1/generate"
    assert body["token_ids"] == [3, 1, 8]
    assert body["content_parts"][0]["url"].startswith("data:image/png;base64,")


@pytest.mark.parametrize(
    "answer",
    [
        {"choices": []},
        {"choices": [{"text": "a"}]},
        {"choices": [{"prompt_logprobs": [None, {"2": {"logprob": -1}}]}]},
        {"choices": [{"prompt_logprobs": [None, {"2": -1.0}, {"77": {"logprob": -1}}]}]},
        {"choices": [{"logprobs": {"token_logprobs": [None, -1.0, "x"]}}]},
    ],
)
def test_a_server_that_makes_no_sense_leaves_the_row_empty_and_says_so_once(
    answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with answering(lambda body, path, headers: (200, answer)) as url:
        reading = ServedReading(url, patience=READY)
        assert reading.read_logprobs([prompt_of()] * 2, [[9]] * 2, [0, 0]) == [[], []]
    assert len([record for record in caplog.records if "no log-probs" in record.message]) == 1


def test_a_token_never_crosses_a_network_in_the_clear_and_servers_know_one_temperature(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MY_TOKEN", "secret")
    with pytest.raises(RewardSpecError, match="in the clear"):
        ServedReading("http://10.0.0.7:8000", token_env="MY_TOKEN")
    ServedReading("https://models.example/v1", token_env="MY_TOKEN")
    with pytest.raises(ValueError, match="temperature 1"):
        ServedReading("http://localhost:1").read_logprobs([], [], [], 0.6)


# --- what it subtracts -----------------------------------------------------------------------------------------------


def test_base_scores_go_on_where_they_were_cut(tmp_path: Path) -> None:
    path, reading = tmp_path / "scores.jsonl", Canned()
    asked = asking(reading).asked
    assert asked is not None
    options, prompts = read_options({}), [prompt_of(row=row) for row in range(100)]
    fill_bases(BaseFile(path, TERMS), prompts[:70], asked, options)
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])  # a kill has cut the last line
    again = BaseFile(path, TERMS)
    assert key_of(prompts[68]) in again
    assert key_of(prompts[69]) not in again
    reading.calls.clear()
    fill_bases(again, prompts, asked, options)
    assert sum(map(len, reading.calls)) == 31
    assert set(BaseFile(path, TERMS).rows().values()) == {0.5}


def test_a_row_without_a_base_score_is_kept_as_such(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    asked = asking(Canned(math.nan), longest=100).asked
    assert asked is not None
    file, prompts = BaseFile(tmp_path / "a.jsonl", TERMS), [prompt_of(""), prompt_of("4" * 200, 2), prompt_of("1", 3)]
    fill_bases(file, prompts, asked, read_options({}))
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
    found = TERMS.problem(other.written())
    assert (found is None) if said is None else (said in str(found))
    BaseFile(tmp_path / "a.jsonl", other)
    if said is not None:
        with pytest.raises(ValueError, match="has base scores with"):
            BaseFile(tmp_path / "a.jsonl", TERMS)
    assert "has not written" in str(TERMS.problem("0.5"))


def test_inputs_of_other_callers_are_refused_with_the_reason() -> None:
    with pytest.raises(RuntimeError, match="needs the tokens"):
        asking(Canned())([RewardInput(TAGGED, "42")])
    with pytest.raises(RuntimeError, match="before a model was there"):
        ReferenceVerifier(read_options({}))(inputs_of(TAGGED))
    assert all(isinstance(one, SampledInput) for one in inputs_of(TAGGED))
