"""How answers and calls of the embedded engine end: tokens, strings, limits, and a consumer who has enough."""

import gc
import threading
import weakref
from itertools import chain
from typing import Any

import pytest
import torch
from embedded_cases import END, copy_of, engine_for, mixed_prompts, sample, text_prompt

from r1_rollout.embedded import EmbeddedEngine, decoding
from r1_rollout.embedded.kv import GroupCache
from r1_rollout.embedded.prefill import prefill
from r1_rollout.errors import PromptError
from r1_rollout.types import Completion, SamplingParams
from r1_rollout.weights import LocalWeights

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+-"


class Letters:
    """A tokenizer of 64 letters, one a token."""

    def batch_decode(self, sequences: list[list[int]], **options: Any) -> list[str]:
        assert options == {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return ["".join(LETTERS[token] for token in tokens) for tokens in sequences]


def cut(completion: Completion, ends: tuple[str, ...]) -> Completion:
    """The completion as it would be if the first of these strings in it had ended it."""
    text = "".join(LETTERS[token] for token in completion.token_ids.tolist())
    found = [text.index(end) + len(end) for end in ends if end in text]
    if not found:
        return completion
    length = min(found)
    return Completion(completion.token_ids[:length], completion.logprobs[:length], "stop", completion.weight_version)


def same(first: list[list[Completion]], second: list[list[Completion]]) -> bool:
    return [(c.token_ids.tolist(), c.finish_reason) for c in chain.from_iterable(first)] == [
        (c.token_ids.tolist(), c.finish_reason) for c in chain.from_iterable(second)
    ]


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_stop_tokens_end_answers_beside_the_models_own(text_model, ignore_eos):
    prompts = mixed_prompts(text_model)
    free = sample(text_model, prompts, SamplingParams(max_tokens=20, n=8, ignore_eos=True))
    ends = tuple(LETTERS[token] for token in ((3, 11) if ignore_eos else (3, 11, END)))
    params = SamplingParams(max_tokens=20, n=8, ignore_eos=ignore_eos, stop_token_ids=(3, 11))
    expected = [[cut(completion, ends) for completion in group] for group in free]
    assert same(sample(text_model, prompts, params), expected)
    assert {c.finish_reason for c in chain.from_iterable(expected)} == {"stop", "length"}


def test_stop_strings_end_answers_behind_the_token_that_completes_them(text_model):
    prompts = mixed_prompts(text_model)
    free = sample(text_model, prompts, SamplingParams(max_tokens=20, n=8, ignore_eos=True))
    texts = ["".join(LETTERS[token] for token in c.token_ids.tolist()) for c in chain.from_iterable(free)]
    ends = (texts[0][7:10], texts[5][3:5], "never said, as it is longer than an answer")
    params = SamplingParams(max_tokens=20, n=8, ignore_eos=True, stop=ends)
    expected = [[cut(completion, ends) for completion in group] for group in free]
    assert same(sample(text_model, prompts, params, tokenizer=Letters()), expected)
    stopped = [c for c in chain.from_iterable(expected) if c.finish_reason == "stop"]
    assert {len(c.token_ids) for c in stopped} >= {5}
    assert len(stopped) < 40


def test_a_string_of_the_prompt_does_not_end_the_answer(text_model):
    prompt = text_prompt("p", 9)
    said = "".join(LETTERS[token] for token in prompt.token_ids[-3:])
    ((completion,),) = sample(
        text_model, [prompt], SamplingParams(max_tokens=4, stop=(said,), ignore_eos=True), tokenizer=Letters()
    )
    assert len(completion.token_ids) == 4


def test_stop_strings_need_a_tokenizer(text_model):
    with pytest.raises(ValueError, match=r"stop=\('x',\) needs a tokenizer"):
        sample(text_model, [text_prompt("p", 3)], SamplingParams(max_tokens=2, stop=("x",)))


def alive(kind: type) -> list[Any]:
    gc.collect()
    return [weakref.ref(o) for o in gc.get_objects() if type(o) is kind]  # a dead proxy has no `__class__` to ask for


@pytest.mark.parametrize("started", [True, False])
def test_closing_a_call_abandons_what_is_unfinished_and_frees_it(text_model, started):
    engine = engine_for(text_model, max_sequences=4)
    prompts, params = [text_prompt(f"p{i}", 5) for i in range(6)], SamplingParams(max_tokens=6, n=2)
    with engine.active(LocalWeights(text_model.state_dict().items(), 3)):
        before = len(alive(GroupCache))
        groups = engine.generate(prompts, params)
        if started:
            next(groups)
        groups.close()
        groups.close()
        assert len(alive(GroupCache)) == before
        assert list(groups) == []
        assert len(list(engine.generate(prompts, params))) == 6


def test_a_call_that_nobody_holds_any_more_is_freed(text_model):
    engine = engine_for(text_model, max_sequences=4)
    with engine.active(LocalWeights(text_model.state_dict().items(), 3)):
        before = len(alive(GroupCache))
        for _ in engine.generate([text_prompt(f"p{i}", 5) for i in range(6)], SamplingParams(max_tokens=6, n=2)):
            break
        assert len(alive(GroupCache)) == before


def test_an_engine_that_was_given_a_version_samples_at_once_and_takes_updates(text_model):
    model = copy_of(text_model)
    model.load_state_dict(text_model.state_dict())
    engine = EmbeddedEngine(model, end_token_ids={END}, version=0)
    prompt, params = text_prompt("p", 6), SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)

    def answer() -> tuple[list[int], int]:
        ((_, (completion,)),) = engine.generate([prompt], params)
        return completion.token_ids.tolist(), completion.weight_version

    first = answer()
    assert first[1] == 0
    engine.load_weights(LocalWeights(((name, -tensor) for name, tensor in text_model.state_dict().items()), 1))
    assert answer() == (answer()[0], 1)
    assert answer()[0] != first[0]
    with engine.active(LocalWeights(text_model.state_dict().items(), 2)):
        assert answer() == (first[0], 2)
    assert answer() == (first[0], 2)


def test_an_update_ends_the_call_that_is_running(text_model):
    engine = engine_for(text_model, max_sequences=2)
    engine.load_weights(LocalWeights(text_model.state_dict().items(), 1))
    groups = engine.generate([text_prompt(f"p{i}", 5) for i in range(4)], SamplingParams(max_tokens=6, n=2))
    next(groups)
    engine.load_weights(LocalWeights(text_model.state_dict().items(), 2))
    with pytest.raises(RuntimeError, match="new weights came"):
        next(groups)


@pytest.mark.parametrize("ending", ["a later generate", "new weights", "close"])
def test_a_call_that_is_ended_while_its_prompts_are_computed_does_not_pass_for_complete(
    text_model, monkeypatch, ending
):
    engine = engine_for(text_model)
    engine.load_weights(LocalWeights(text_model.state_dict().items(), 1))
    end = {
        "a later generate": lambda: engine.generate([text_prompt("z", 3)], SamplingParams(max_tokens=2)),
        "new weights": lambda: engine.load_weights(LocalWeights(text_model.state_dict().items(), 2)),
        "close": lambda: groups.close(),
    }[ending]

    def prefill_and_end(*args: Any) -> Any:
        monkeypatch.undo()  # the first prompts only
        thread = threading.Thread(target=end)
        thread.start()
        thread.join()
        return prefill(*args)

    monkeypatch.setattr(decoding, "prefill", prefill_and_end)
    groups = engine.generate([text_prompt(f"p{i}", 4) for i in range(6)], SamplingParams(max_tokens=1, n=2))
    if ending == "close":  # by the one who asks: nothing is left to say
        assert list(groups) == []
        return
    with pytest.raises(RuntimeError, match=ending):
        list(groups)


def test_weights_that_are_too_old_change_nothing_and_end_nothing(text_model):
    engine, params = engine_for(text_model, max_sequences=2), SamplingParams(max_tokens=6, n=2)
    prompts = [text_prompt(f"p{i}", 5) for i in range(4)]
    engine.load_weights(LocalWeights(text_model.state_dict().items(), 5))
    groups = engine.generate(prompts, params)
    first = next(groups)
    with pytest.raises(ValueError, match="version 4 are older than version 5"):
        engine.load_weights(LocalWeights(((name, -tensor) for name, tensor in text_model.state_dict().items()), 4))
    answers = dict([first, *groups])
    assert answers == dict(engine.generate(prompts, params))
    assert {completion.weight_version for group in answers.values() for completion in group} == {5}


def test_after_a_trainer_that_died_while_it_pushed_nothing_is_sampled_until_a_whole_set_has_come(text_model):
    engine = engine_for(text_model)
    engine.load_weights(LocalWeights(text_model.state_dict().items(), 1))

    def half() -> Any:
        yield from list(text_model.state_dict().items())[:5]
        raise ConnectionError("the trainer is gone")

    with pytest.raises(ConnectionError):
        engine.load_weights(LocalWeights(half(), 2))
    with pytest.raises(
        RuntimeError,
        match=r"needs an active engine with whole weights: .*active\(source\)`, or after `engine.load_w",
    ):
        engine.generate([text_prompt("p", 3)], SamplingParams(max_tokens=2))
    engine.load_weights(LocalWeights(text_model.state_dict(), 2))
    assert list(engine.generate([text_prompt("p", 3)], SamplingParams(max_tokens=2)))


def test_after_an_update_that_failed_nothing_is_sampled_until_the_next(text_model):
    engine, prompt = engine_for(text_model), text_prompt("p", 3)
    engine.load_weights(LocalWeights(text_model.state_dict().items(), 1))
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        engine.load_weights(
            LocalWeights([(k, v) for k, v in text_model.state_dict().items() if k != "model.norm.weight"], 2)
        )
    with pytest.raises(RuntimeError, match="active"):
        engine.generate([prompt], SamplingParams(max_tokens=2))
    engine.load_weights(LocalWeights(text_model.state_dict().items(), 3))
    assert list(engine.generate([prompt], SamplingParams(max_tokens=2)))


def test_too_little_memory_is_told_with_what_to_lower_and_leaves_the_engine_usable(text_model, monkeypatch):
    engine = engine_for(text_model, max_sequences=4)
    prompts, params = [text_prompt(f"p{i}", 5) for i in range(6)], SamplingParams(max_tokens=6, n=2)

    def full(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with engine.active(LocalWeights(text_model.state_dict().items(), 3)):
        with monkeypatch.context() as patch:
            patch.setattr(GroupCache, "aim", full)
            with pytest.raises(MemoryError, match=r"4 samples .* lower max_sequences \(4.*run\), the answers"):
                list(engine.generate(prompts, params))
        session = engine.open_session(params)
        session.submit("p0", prompts[0], max_tokens=6)
        with monkeypatch.context() as patch:
            patch.setattr(GroupCache, "aim", full)
            with pytest.raises(MemoryError, match=r"1 samples .*\(4 of them may run\), prefix_cache_gb, the answers"):
                session.poll(None)
        assert len(list(engine.generate(prompts, params))) == 6


def test_prompts_that_are_appended_while_others_run_are_sampled_as_if_they_had_been_there(text_model):
    prompts, params = [text_prompt(f"p{i}", 3 + 9 * i) for i in range(5)], SamplingParams(max_tokens=6, n=2, seed=1)
    expected = sample(text_model, prompts, params)
    engine, growing = engine_for(text_model, max_sequences=4), prompts[:2]
    found = {}
    with engine.active(LocalWeights(text_model.state_dict().items(), 3)):
        for index, group in engine.generate(growing, params):
            found[index] = group
            growing += prompts[len(growing) : len(growing) + 2]
        tokens = [[one.token_ids.tolist() for one in found[index]] for index in range(5)]
        assert tokens == [[one.token_ids.tolist() for one in group] for group in expected]
        wrong = prompts[:1]
        groups = engine.generate(wrong, params)
        wrong.append(text_prompt("too long", 255))
        with pytest.raises(PromptError, match="prompt too long ends at position 255"):
            list(groups)


def test_a_drained_call_begins_nothing_that_is_appended_later(text_model):
    growing, params = [text_prompt("p", 4)], SamplingParams(max_tokens=6, n=2)
    engine = engine_for(text_model)
    with engine.active(LocalWeights(text_model.state_dict().items(), 3)):
        groups = engine.generate(growing, params)
        engine.drain()
        growing.append(text_prompt("q", 4))
        assert dict(groups) == {}
