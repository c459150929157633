"""A run samples only from weights that are proven fresh: the canary through the command line."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from endtoend import QUICKSTART, R1, SMALL, read_log

from r1_cli.assembly import canary
from r1_cli.assembly.rendering import build_renderer
from r1_cli.config import load_config
from r1_cli.hardware import Hardware
from r1_cli.models.files import open_model
from r1_rollout import embedded
from r1_rollout.canary import TOLERANCE
from r1_rollout.embedded import EmbeddedEngine
from r1_rollout.handover import LocalWeights, WeightSource
from r1_rollout.lora import Adapter
from r1_rollout.probes import Probes

MORE = ["trainer.val_freq=-1", "trainer.val_before_train=false", "trainer.save_freq=1", "trainer.max_steps=3"]


class ForgetfulEngine(EmbeddedEngine):
    """From the second sync on, some tensors stay what they were."""

    forgets = "layers.1."

    @contextmanager
    def awake(self, source: WeightSource) -> Iterator[None]:
        first, weights = self.__dict__.setdefault("first", {}), source.tensors()
        assert not isinstance(weights, Adapter)
        named = {name: tensor.clone() for name, tensor in weights}
        changed = {name: first.get(name, tensor) if self.forgets in name else tensor for name, tensor in named.items()}
        first.update({name: tensor for name, tensor in named.items() if name not in first})
        with super().awake(LocalWeights(changed.items(), source.version)):
            yield


class BlindEngine(ForgetfulEngine):
    forgets = "visual."


@pytest.mark.parametrize(("engine", "group"), [(ForgetfulEngine, "layer 1"), (BlindEngine, "vision tower")])
def test_a_run_with_a_stale_engine_stops_and_its_last_checkpoint_goes_on(
    r1: R1, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: Any, group: str
) -> None:
    words = ["train", QUICKSTART, *SMALL, *MORE, f"trainer.save_checkpoint_path={tmp_path}"]
    with monkeypatch.context() as patch:
        patch.setattr(embedded, "EmbeddedEngine", engine)
        result = r1(*words, ok=False)
    assert result.exit_code == 2
    assert f"At fault: {group} (" in result.stderr
    assert "after the sync of weight version 1" in result.stderr
    assert [record["step"] for record in read_log(tmp_path)] == [1]
    r1(*words)
    assert [record["step"] for record in read_log(tmp_path)] == [1, 2, 3]
    for record in read_log(tmp_path):
        assert record["rollout/canary_gap"] < TOLERANCE[torch.float32] / 5


def test_an_engine_that_stays_behind_by_less_than_rounding_is_found_by_its_bytes(
    r1: R1, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "EmbeddedEngine", ForgetfulEngine)
    words = [*SMALL, *MORE, "worker.actor.optim.lr=1e-8", f"trainer.save_checkpoint_path={tmp_path}"]
    result = r1("train", QUICKSTART, *words, ok=False)
    assert result.exit_code == 2
    assert "of the engine's weights are not the learner's. At fault: layer 1 (" in result.stderr


def test_without_the_canary_a_stale_engine_samples_on(r1: R1, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "EmbeddedEngine", ForgetfulEngine)
    more = [*MORE, "worker.rollout.canary=false", "trainer.save_freq=-1", f"trainer.save_checkpoint_path={tmp_path}"]
    r1("train", QUICKSTART, *SMALL, *more)
    records = read_log(tmp_path)
    assert all("rollout/canary_gap" not in record for record in records)
    # What remains is the gap that every step logs, which nobody has to look at.
    assert records[0]["rollout/logprob_gap_max"] < 1e-4 < records[2]["rollout/logprob_gap_max"]


def build(*words: str, variant: int = 0) -> Probes:
    config = load_config([QUICKSTART, *words])[0]
    model = open_model(config)
    return canary.build_probes(config, model, build_renderer(config, model), variant=variant)


@pytest.fixture
def in_root(r1: R1) -> None:
    """The quickstart's paths are from the repository's root, where `r1` goes."""


@pytest.mark.usefixtures("in_root")
def test_the_sequences_fit_the_run_and_one_has_a_picture() -> None:
    probes, again, fresh = build(), build(), build(variant=1)
    assert [p.token_ids for p in probes.prompts] == [p.token_ids for p in again.prompts]
    assert all(len(p.token_ids) <= 64 for p in probes.prompts)
    assert all(len(r) <= 20 for r in probes.responses)
    pictures = [p.model_inputs["pixel_values"] for p in (*probes.prompts, *fresh.prompts) if p.model_inputs]
    assert len(pictures) == 2
    assert not pictures[0].equal(pictures[1])


@pytest.mark.usefixtures("in_root")
def test_a_picture_that_does_not_fit_is_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    probes = build("data.max_prompt_length=8")
    assert not any(p.model_inputs for p in probes.prompts)
    assert "without a picture: it takes" in caplog.text


@pytest.mark.usefixtures("in_root")
def test_the_tolerance_is_that_of_the_coarser_side() -> None:
    cases: list[tuple[list[str], float]] = [
        ([], TOLERANCE[torch.float32]),
        (["worker.actor.fsdp.torch_dtype=bf16"], TOLERANCE[torch.bfloat16]),
    ]
    for words, tolerance in cases:
        config = load_config([QUICKSTART, *words])[0]
        model = open_model(config)
        assert canary.build_canary(config, Hardware("cpu"), model, build_renderer(config, model)).tolerance == tolerance
