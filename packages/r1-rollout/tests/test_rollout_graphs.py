"""Replayed decoding steps. No GPU is needed: a replay here computes what was captured, from the addresses of then."""

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from embedded_cases import HandPrompt, engine_for, text_prompt
from replays import Replaying, stand_in
from rollout_models import TEXT, sharpen
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Qwen2Config

from r1_rollout.embedded import kv, step
from r1_rollout.embedded.graphs import PATIENCE, Graphs, capture_cuda
from r1_rollout.embedded.kv import GroupCache, KeysValues
from r1_rollout.embedded.segments import Layer
from r1_rollout.types import SamplingParams
from r1_rollout.weights import LocalWeights


@pytest.fixture
def replaying(monkeypatch: pytest.MonkeyPatch) -> type[Replaying]:
    stand_in(monkeypatch, Replaying)
    monkeypatch.setattr(kv, "GRAIN", 4)
    monkeypatch.setattr("r1_rollout.embedded.segments.FIRST", 16)
    Replaying.made = []
    return Replaying


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return sharpen(AutoModelForCausalLM.from_config(Qwen2Config(**TEXT)))


def prompts(count: int) -> list[HandPrompt]:
    return [text_prompt(f"p{index}", 3 + 7 * index % 40) for index in range(count)]


def answers(model: Any, asked: list[HandPrompt], params: SamplingParams, *, graphs: bool, rows: int) -> list[Any]:
    engine = engine_for(copy.deepcopy(model), max_sequences=rows)
    engine._graphs = graphs
    with engine.active(LocalWeights(model.state_dict().items(), 0)):
        groups = dict(engine.generate(asked, params))
    return [(one.token_ids.tolist(), one.logprobs) for index in range(len(asked)) for one in groups[index]]


@pytest.fixture(scope="module")
def windowed_model() -> Any:
    """A model whose second layer sees thirteen tokens."""
    torch.manual_seed(0)
    config = Qwen2Config(**TEXT, use_sliding_window=True, sliding_window=13, max_window_layers=1)
    return sharpen(AutoModelForCausalLM.from_config(config))


def test_replayed_steps_slide_their_window(
    windowed_model: Any, replaying: type[Replaying], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the window begins, columns come and go four steps after those where the answers grow."""
    monkeypatch.setattr(kv, "GRAIN", 8)
    params, asked = SamplingParams(max_tokens=40, n=3, ignore_eos=True), prompts(5)
    expected = answers(windowed_model, asked, params, graphs=False, rows=64)
    found = answers(windowed_model, asked, params, graphs=True, rows=64)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    for (_, logprobs), (_, others) in zip(found, expected, strict=True):
        assert logprobs == pytest.approx(others, abs=1e-5)
    (graphs,) = replaying.made
    assert graphs.replayed > 10


@pytest.mark.parametrize("rows", [6, 64])
@pytest.mark.parametrize("ends", [True, False], ids=["ragged", "even"])
def test_replayed_steps_say_what_launched_ones_do(
    model: Any, replaying: type[Replaying], rows: int, ends: bool
) -> None:
    params = SamplingParams(max_tokens=50, n=3, ignore_eos=not ends)
    asked = prompts(5)
    expected = answers(model, asked, params, graphs=False, rows=rows)
    assert not replaying.made
    found = answers(model, asked, params, graphs=True, rows=rows)
    for (said, logprobs), (words, others) in zip(found, expected, strict=True):
        assert said == words
        assert logprobs == pytest.approx(others, abs=1e-5)
    (graphs,) = replaying.made
    assert graphs.replayed > (10 if ends else 20)


def test_the_footprint_knows_every_tensor_that_a_step_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph is valid while they are where they were."""
    monkeypatch.setattr("r1_rollout.embedded.segments.FIRST", 4)
    cache, own = GroupCache(8, 40, replayed=True), torch.randn(2, 2, 5, 8)
    cache.insert([KeysValues(own, own)], [5, 3], 0)
    cache.arrange(np.arange(6) % 2, [5, 3], torch.device("cpu"))
    rows = np.array([0, 0, 1, 1, 1, 1])  # four of them reach the second segment
    for columns in (0 * rows, 3 + rows, 3 + 2 * rows):
        cache.aim(columns)
    footprint = cache.footprint()
    cache.aim(3 + 3 * rows)
    cache.place(torch.from_numpy(3 + 3 * rows))
    assert cache.footprint() == footprint, "what is computed within a step is no part of it"

    def moved(owner: Any, name: str, tensor: Any) -> bool:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, tensor)
            return cache.footprint() != footprint

    (prompt, readers), (answer, _) = cache._prompt_readers[0], cache._answer_readers[0]
    assert moved(cache, "_before", cache._before.clone())
    for name in ("members", "rows", "at"):
        replaced = replace(readers, **{name: getattr(readers, name).clone()})
        assert moved(cache, "_prompt_readers", [(prompt, replaced), *cache._prompt_readers[1:]])
    sight = prompt.sights[None]
    assert sight is not None
    assert sight.bias is not None
    assert moved(prompt, "sights", {None: sight._replace(bias=sight.bias.clone())})
    assert moved(answer, "layers", [Layer(*map(torch.clone, answer.layers[0]))])
    target = cache._targets[0]
    assert moved(cache, "_targets", [target._replace(places=target.places.clone()), *cache._targets[1:]])
    assert isinstance(target.rows, torch.Tensor)
    assert moved(cache, "_targets", [target._replace(rows=target.rows.clone()), *cache._targets[1:]])


def test_a_step_is_captured_when_its_form_has_come_back(model: Any, replaying: type[Replaying]) -> None:
    answers(model, prompts(1), SamplingParams(max_tokens=5, n=2, ignore_eos=True), graphs=True, rows=8)
    (graphs,) = replaying.made  # four steps decode, all in the first four columns
    assert graphs.replayed == 4 - PATIENCE


def test_a_step_that_cannot_be_captured_is_launched_and_said_once(
    model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(action: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    class Refusing(Graphs):
        def __init__(self) -> None:
            super().__init__(refuse)

    params = SamplingParams(max_tokens=30, n=2, ignore_eos=True)
    expected = answers(model, prompts(2), params, graphs=False, rows=8)
    stand_in(monkeypatch, Refusing)
    with caplog.at_level(logging.WARNING, "r1"):
        for _ in range(2):  # a second call of the process does not try again
            found = answers(model, prompts(2), params, graphs=True, rows=8)
            assert [said for said, _ in found] == [said for said, _ in expected]
    (said,) = [record.message for record in caplog.records if "CUDA graphs" in record.message]
    assert "decodes without CUDA graphs: operation not permitted when stream is capturing. If" in said
    assert not Graphs.failed


def test_after_a_failed_capture_the_stream_is_that_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own context leaves the capture's stream current if the end of a capture raises (torch 2.13)."""
    now = ["the thread's own"]

    class Stream:
        def wait_stream(self, other: Any) -> None:
            pass

    @contextmanager
    def graph(graph: Any, **options: Any) -> Iterator[None]:
        assert options == {"capture_error_mode": "thread_local"}
        now.append("the capture's")
        yield
        raise RuntimeError("cudaErrorStreamCaptureInvalidated")

    own = Stream()
    stand_ins = {
        "Stream": Stream, "current_stream": lambda: own, "stream": lambda stream: nullcontext(), "graph": graph,
        "CUDAGraph": object, "set_stream": lambda stream: now.append("the thread's own" if stream is own else "?"),
    }  # fmt: skip
    for name, fake in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    with pytest.raises(RuntimeError, match="Invalidated"):
        capture_cuda(partial(torch.zeros, 1))
    assert now == ["the thread's own", "the capture's", "the thread's own"]


def test_too_little_memory_ends_the_call_as_elsewhere(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(action: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    class Full(Graphs):
        def __init__(self) -> None:
            super().__init__(full)

    stand_in(monkeypatch, Full)
    with pytest.raises(Exception, match="out of memory with"):
        answers(model, prompts(1), SamplingParams(max_tokens=30, n=2, ignore_eos=True), graphs=True, rows=8)


def test_processors_launch_their_steps(model: Any) -> None:
    assert not engine_for(copy.deepcopy(model))._graphs


def test_graphs_outlive_samples_that_end_at_random(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a graph for each set of running samples two in five steps are replays."""
    captured, steps, rows = [0], [0], [0]

    class Counting(Replaying):
        def run(self, key: Any, action: Any) -> None:
            steps[0] += 1
            rows[0] += len(action.args[0])
            super().run(key, action)

        def _try_capture(self, action: Any) -> Any:
            captured[0] += 1
            return super()._try_capture(action)

    stand_in(monkeypatch, Counting)
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(Qwen2Config(**TEXT))  # ends a sample with one of its 64 tokens
    found = answers(plain, prompts(32), SamplingParams(max_tokens=200, n=4), graphs=True, rows=64)
    lengths = {len(tokens) for tokens, _ in found}
    assert len(lengths) > 40, "samples of all lengths"
    graphs = Counting.made[-1]
    assert graphs.replayed > 0.8 * steps[0]
    assert captured[0] < steps[0] / 12
    assert sum(len(tokens) for tokens, _ in found) > 0.75 * rows[0], "ended samples keep others waiting"


class Kernels(TorchDispatchMode):
    """Counts the operations that compute: views and casts to the same precision launch nothing."""

    free = frozenset({
        "alias", "as_strided", "detach", "expand", "flatten", "movedim", "promote_types", "reshape", "select", "slice",
        "split", "split_with_sizes", "squeeze", "to", "transpose", "unbind", "unflatten", "unsqueeze", "view",
    })  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ not in self.free
        return func(*args, **(kwargs or {}))


def kernels_of(layers: int, monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """By the tokens of all answers, of one decoding step: in segments of 16, 16 and 32 columns beside the prompt's."""
    counts: dict[int, int] = {}
    right = step.DecodingStep.run

    def count(self: Any, rows: Any, cache: Any) -> None:
        tokens = int(rows.counts.max())
        with Kernels() as kernels:
            right(self, rows, cache)
        counts[tokens] = kernels.count

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen2Config(**{**TEXT, "num_hidden_layers": layers}))
    with monkeypatch.context() as patch:
        patch.setattr(step.DecodingStep, "run", count)
        patch.setattr("r1_rollout.embedded.segments.FIRST", 16)
        answers(model, prompts(2), SamplingParams(max_tokens=40, n=2, ignore_eos=True), graphs=False, rows=8)
    return counts


def test_a_layers_kernels_grow_with_the_segments_of_answers_and_with_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few, many = kernels_of(2, monkeypatch), kernels_of(6, monkeypatch)
    of_a_layer = {tokens: (many[tokens] - few[tokens]) / 4 for tokens in few}
    assert {of_a_layer[tokens] for tokens in range(3, 15)} == {of_a_layer[3]}
    assert of_a_layer[3] < 52  # projections 7, norms 2, rotations 6, MLP 3, keys and values 2, attention the rest
    assert of_a_layer[24] - of_a_layer[3] < 22
    assert of_a_layer[38] - of_a_layer[24] < 22
