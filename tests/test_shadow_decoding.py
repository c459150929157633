"""Decoding steps on a simulated GPU: what the host launches for a token, and where it waits."""

from collections import Counter
from typing import Any

import families
import pytest
import torch
from family_prompts import make_prompts
from replays import LateCopies, Replaying, capture, stand_in
from shadow_device import DEVICE, ShadowMode, move, shadow_device

from r1_rollout import sampling
from r1_rollout.embedded import EmbeddedEngine, decoding, kv
from r1_rollout.types import Completion, SamplingParams
from r1_rollout.weights import LocalWeights

SETTINGS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "greedy": {"temperature": 0.0},
    "top_k and top_p": {"top_k": 20, "top_p": 0.8},
    "top_p": {"top_p": 0.9},  # of nuclei that are sorted
    "all, many stop tokens": {"temperature": 1.3, "top_p": 0.95, "min_p": 0.01, "stop_token_ids": (*range(60, 90),)},
}
ROWS = 6  # of 4 prompts with 3 samples each


class Steps:
    """What each call of `Decoding._advance` launched, and where it waited."""

    def __init__(self, mode: ShadowMode, patch: pytest.MonkeyPatch) -> None:
        self.replays: list[tuple[Counter[str], Counter[str]]] = []
        right = decoding.Decoding._advance

        class Graphs(Replaying):
            def __init__(self) -> None:
                super().__init__()
                self._capture = self.capture

            def capture(self, action: Any) -> Any:
                replay = capture(action)

                def launch() -> None:
                    with mode.one_launch("graph"):
                        replay()

                return launch

        def advance(decoding: Any, rows: Any, cache: Any) -> None:
            if decoding._graphs is None:
                return right(decoding, rows, cache)
            before, removed = decoding._graphs.replayed, id(rows.ages)
            mode.waits.clear()
            mode.launches.clear()
            right(decoding, rows, cache)
            if decoding._graphs.replayed > before and id(rows.ages) == removed:  # and no rows left
                self.replays.append((mode.launches.copy(), mode.waits.copy()))

        stand_in(patch, Graphs)
        patch.setattr(decoding.Decoding, "_advance", advance)


def sample(device: torch.device | None, params: SamplingParams) -> list[list[Completion]]:
    model = families.make_model("qwen2")
    engine = EmbeddedEngine(
        model if device is None else move(model),
        end_token_ids={258}, banned_token_ids=(3, 4), device=device or "cpu", max_sequences=ROWS,
    )  # fmt: skip
    engine._graphs = device is not None
    weights = [(name, tensor.clone()) for name, tensor in families.make_model("qwen2").state_dict().items()]
    prompts = make_prompts("qwen2", ())[:4]
    with engine.active(LocalWeights(weights, 1)):
        groups = dict(engine.generate(prompts, params))
    return [groups[index] for index in range(len(prompts))]


@pytest.fixture(autouse=True)
def short_nuclei(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_NUCLEUS", 16)
    monkeypatch.setattr(kv, "GRAIN", 16)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_replayed_step_is_a_launch_and_a_copy_and_waits_for_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=24, n=3, **SETTINGS[name])
    expected = sample(None, params)
    with shadow_device() as mode:
        steps = Steps(mode, monkeypatch)
        found = sample(DEVICE, params)
    for ours, theirs in zip(found, expected, strict=True):
        assert [one.token_ids.tolist() for one in ours] == [one.token_ids.tolist() for one in theirs]
        assert [one.finish_reason for one in ours] == [one.finish_reason for one in theirs]
    assert len(steps.replays) > 5
    for launches, waits in steps.replays:
        assert launches == {"graph": 1, "aten::clone": 1}, "the clone stands for the copy of the report"
        assert not waits


def test_the_host_reads_a_steps_tokens_while_the_device_computes_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    with shadow_device() as mode:
        Steps(mode, monkeypatch)
        groups = sample(DEVICE, SamplingParams(max_tokens=40, n=3))
    assert len({len(one.token_ids) for group in groups for one in group}) > 3, "samples end at random"
    asked = unread = idle = 0
    for what in LateCopies.log:
        if what == "asked":
            asked, unread = asked + 1, unread + 1
            assert unread <= 2, "a buffer is written to before it was read"
        else:
            idle += unread == 1  # the device has nothing to do meanwhile
            unread -= 1
    assert idle < asked / 5, (idle, asked)


def test_requests_enter_together_where_steps_are_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []  # steps between two admissions, where rows are still decoding
    admit, run, steps = decoding.Decoding._admit, decoding.DecodingStep.run, 0

    def counted_run(*args: Any) -> None:
        nonlocal steps
        steps += 1
        run(*args)

    def counted_admit(decoding: Any, rows: Any, cache: Any) -> Any:
        nonlocal steps
        waits.extend([steps] if rows else [])
        steps = 0
        return admit(decoding, rows, cache)

    monkeypatch.setattr(decoding.Decoding, "_admit", counted_admit)
    monkeypatch.setattr(decoding.DecodingStep, "run", counted_run)
    params = SamplingParams(max_tokens=96, n=3, stop_token_ids=(*range(5, 20),))  # some end early, some late
    sample(None, params)
    assert min(waits) < 16, "on a processor they enter once there is room"
    waits.clear()
    with shadow_device() as mode:
        Steps(mode, monkeypatch)
        sample(DEVICE, params)
    assert min(waits) >= 16, waits
