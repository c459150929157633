"""Model inputs that lie elsewhere are brought one micro-batch ahead, each once, and none for other ranks."""

import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
import torch
from core_models import in_float64, picture_samples, qwen25_vl
from torch import Tensor

from r1_core.learner import Learner
from r1_core.learner.batching import Batching, MicroLimit, rounds
from r1_core.learner.optim import build_optimizer
from r1_core.learner.passes import prefetch
from r1_core.types import Sample


class Far(Mapping[str, Tensor]):
    """Tensors that are brought when the first is read."""

    def __init__(self, inputs: Mapping[str, Tensor], number: int, brought: list[tuple[int, bool]]) -> None:
        self._inputs, self._number, self._brought, self._here = inputs, number, brought, False
        self.fails = False

    def __getitem__(self, name: str) -> Tensor:
        if self.fails:
            raise ConnectionError(f"picture {self._number} is gone")
        if not self._here:
            self._brought.append((self._number, threading.current_thread() is threading.main_thread()))
            self._here = True
        return self._inputs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._inputs)

    def __len__(self) -> int:
        return len(self._inputs)


def far_samples(brought: list[tuple[int, bool]]) -> list[Sample]:
    """Samples each of which has its pictures elsewhere, if it has any."""
    return [
        replace(sample, model_inputs=Far(sample.model_inputs, number, brought) if sample.model_inputs else {})
        for number, sample in enumerate(picture_samples())
    ]


def test_each_micro_batch_is_here_when_it_comes_and_the_next_one_on_its_way():
    brought: list[tuple[int, bool]] = []
    samples = far_samples(brought)
    with_pictures = [number for number, sample in enumerate(samples) if sample.model_inputs]
    batches = prefetch([[sample] for sample in samples])
    for number, (batch,) in enumerate(batches):
        assert batch is samples[number]
        assert {one for one, _ in brought} >= {one for one in with_pictures if one <= number}
        assert {one for one, _ in brought} <= {one for one in with_pictures if one <= number + 1}
    assert [one for one, _ in brought] == with_pictures
    assert [here for _, here in brought] == [number == 0 for number in with_pictures]


def own_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("r1-model-inputs")]


def test_nothing_elsewhere_starts_no_thread():
    for _ in prefetch([[sample] for sample in picture_samples()]):
        assert own_threads() == []


def test_what_cannot_be_brought_is_raised_where_it_would_have_come_and_the_thread_ends():
    samples = far_samples([])
    samples[2].model_inputs.fails = True
    batches = prefetch([[sample] for sample in samples])
    assert [next(batches), next(batches)] == [samples[:1], samples[1:2]]
    with pytest.raises(ConnectionError, match="picture 2 is gone"):
        next(batches)
    assert own_threads() == []


def test_pictures_behind_the_prompt_are_loaded_ahead_too():
    brought: list[tuple[int, bool]] = []
    samples = [replace(one, model_inputs={}, later_inputs=one.model_inputs) for one in far_samples(brought)]
    with_pictures = [number for number, one in enumerate(samples) if one.later_inputs]
    list(prefetch([[one] for one in samples]))
    assert brought == [(number, number == 0) for number in with_pictures]


def test_a_learner_computes_the_same_and_reads_what_its_micro_batches_have(monkeypatch):
    model, limit = qwen25_vl(0), MicroLimit(1)
    in_float64(model, monkeypatch)
    optimizer = build_optimizer(model.named_parameters(), lr=1e-2)
    learner = Learner(model, optimizer, lambda step: 1.0, batching=Batching(True, limit, limit))
    brought: list[tuple[int, bool]] = []
    expected = learner.add_logprobs(picture_samples(), ["old_logprobs"])
    found = learner.add_logprobs(far_samples(brought), ["old_logprobs"])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.old_logprobs, other.old_logprobs, atol=0, rtol=0)
    order = [part[0] for (part,) in rounds(expected, limit, 1)]
    assert [one for one, _ in brought] == [number for number in order if expected[number].model_inputs]
    assert not any(here for _, here in brought[1:])
