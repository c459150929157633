"""An engine is trusted only for the weights whose bytes are the learner's, and a run says what it takes on trust."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from r1_cli.train.sampling.weight_check import CheckedGenerator, LearnerReference
from r1_rollout.errors import EngineError, StaleWeights
from r1_rollout.probes import text_probes
from r1_rollout.types import Comparison, Expected, SamplingParams
from r1_rollout.weight_checks import Canary, compare
from r1_rollout.weights import LocalWeights, WeightSource

PROBES = text_probes(range(60), longest_prompt=4, longest_response=2)
CANARY = Canary(PROBES, PROBES, tolerance=0.06)
SAME = [[-1.0] * len(response) for response in PROBES.responses]  # log-probs that hide every difference


class Engine:
    """Agrees by its log-probs whatever its weights are, as one in half precision that is a little behind does."""

    precisions = ("float32",)

    def __init__(self, *, keeps_layout: bool, deaf: Sequence[str] = (), turned: Sequence[str] = ()) -> None:
        self.keeps_layout, self.deaf, self.turned = keeps_layout, deaf, turned
        self.own: dict[str, Tensor] = {name: torch.zeros(4) for name in deaf}

    @contextmanager
    def active(self, source: WeightSource) -> Iterator[None]:
        for name, tensor in cast(Any, source.tensors()):
            if name not in self.deaf:
                self.own[name] = tensor.flip(0) if name in self.turned else tensor.clone()
        yield

    def compare(self, expected: Mapping[str, Expected]) -> Comparison:
        return compare(self.own, expected)

    def logprobs_of(self, *_: Any) -> list[list[float]]:
        return SAME


class Reference(LearnerReference):
    def __init__(self) -> None: ...

    def logprobs_of(self, *_: Any) -> list[list[float]]:
        return SAME


def weights(step: int) -> LocalWeights:
    named = {f"model.layers.{layer}.mlp.up_proj.weight": torch.arange(4.0) + layer + step for layer in range(3)}
    return LocalWeights(named.items(), step)


def sync(proven: CheckedGenerator, *steps: int) -> None:
    for step in steps:
        with proven.active(weights(step)):
            pass


def proven(engine: Engine) -> CheckedGenerator:
    return CheckedGenerator(cast(Any, engine), Reference(), CANARY)


def test_a_checked_engine_opens_a_session_if_it_has_sessions() -> None:
    engine, params = Engine(keeps_layout=True), SamplingParams(max_tokens=3)
    with pytest.raises(EngineError, match="Engine has no open_session"):
        proven(engine).open_session(params)
    engine.open_session = lambda of: ("a session", of)  # type: ignore[attr-defined]
    assert proven(engine).open_session(params) == ("a session", params)  # type: ignore[comparison-overlap]


LAYER_1 = ["model.layers.1.mlp.up_proj.weight"]


def test_the_embedded_engine_stops_at_the_first_sync_that_leaves_a_tensor_behind() -> None:
    with pytest.raises(StaleWeights, match=r"weight version 1 the bytes of 1 of the.*At fault: layer 1"):
        sync(proven(Engine(keeps_layout=True, deaf=LAYER_1)), 1)


def test_the_embedded_engine_must_show_every_tensor() -> None:
    engine = Engine(keeps_layout=True, deaf=LAYER_1)
    engine.own[LAYER_1[0]] = torch.zeros(0)
    with pytest.raises(EngineError, match=r"1 of the engine's weights cannot be compared.*layers.1.mlp"):
        sync(proven(engine), 1)


def test_a_stale_tensor_does_not_pass_for_a_layout_of_the_engines_own() -> None:
    engine = proven(Engine(keeps_layout=False, deaf=LAYER_1))
    sync(engine, 1, 1)  # the same weights again prove nothing
    with pytest.raises(StaleWeights, match=r"weight version 2 the bytes of 1 of the.*At fault: layer 1"):
        sync(engine, 2)


def test_what_bytes_cannot_prove_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "r1")
    sync(proven(Engine(keeps_layout=False, turned=LAYER_1)), 1, 2, 3)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "1 of 3 weights in a layout of its own, model.layers.1.mlp.up_proj.weight first" in line
    caplog.clear()
    sync(proven(Engine(keeps_layout=False)), 1, 2)
    assert not caplog.records


def test_what_bytes_no_longer_prove_is_said_when_it_shows(caplog: pytest.LogCaptureFixture) -> None:
    name = LAYER_1[0]
    engine = proven(Engine(keeps_layout=False, turned=LAYER_1))
    caplog.set_level(logging.WARNING, "r1")
    with engine.active(LocalWeights({name: torch.zeros(4)}.items(), 0)):
        assert not caplog.records
    with engine.active(LocalWeights({name: torch.arange(4.0)}.items(), 1)):
        assert "1 of 1 weights in a layout of its own" in caplog.records[0].getMessage()


class Blind(Engine):
    """Its log-probs of the pictures are `seen`, of all else as the learner's."""

    def __init__(self, seen: list[list[float]]) -> None:
        super().__init__(keeps_layout=True)
        self.seen = seen

    def logprobs_of(self, prompts: Any, *_: Any) -> list[list[float]]:
        return self.seen if prompts == PICTURES.prompts else SAME


class Sighted(Reference):
    def logprobs_of(self, prompts: Any, *_: Any) -> list[list[float]]:
        return [[-1.0, -1.0], [-1.04, -1.0]] if prompts == PICTURES.prompts else SAME


PICTURES = text_probes(range(60), longest_prompt=3, longest_response=2, variant=1)


@pytest.mark.parametrize("seen", [[[-1.0, -1.0], [-1.0, -1.0]], [[-1.0, -1.0], [-1.0001, -1.0]]])
def test_an_engine_that_pictures_do_not_reach_is_refused_within_the_tolerance_of_half_precision(seen: Any) -> None:
    engine = CheckedGenerator(cast(Any, Blind(seen)), Sighted(), replace(CANARY, pictures=PICTURES))
    with pytest.raises(EngineError, match=r"two different pictures the same log-probs.*name=embedded"):
        sync(engine, 1)


def test_the_gap_of_the_first_sync_is_of_the_same_probes_as_any_other_so_that_a_replay_finds_it_again() -> None:
    """A replay, or a run that goes on from a checkpoint, begins where the run did not."""
    opening = replace(CANARY, probes=PICTURES)
    off = Blind([[-1.0, -1.0], [-1.05, -1.0]])
    engine = CheckedGenerator(cast(Any, off), Sighted(), replace(CANARY, opening=opening))
    sync(engine, 1)
    assert opening.gap(cast(Any, off), Sighted().logprobs_of(PICTURES.prompts)) > 0
    assert engine.gap == 0.0


def test_pictures_are_compared_at_the_first_sync_only() -> None:
    blind = Blind([[-1.0, -1.0], [-1.03, -1.0]])
    engine = CheckedGenerator(cast(Any, blind), Sighted(), replace(CANARY, pictures=PICTURES))
    sync(engine, 1)
    blind.seen = []
    sync(engine, 2)
