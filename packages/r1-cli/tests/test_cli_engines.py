"""The keys of `worker.rollout` as options of a vLLM engine in the run's own process."""

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, cast

import pytest

from r1_cli.build.engines import EngineSetup, embedded
from r1_cli.build.engines.vllm import vllm_options
from r1_cli.config import load_config
from r1_cli.hardware import Hardware

BASE = [
    "data.train_files=owner/rows@train",
    "worker.actor.model.model_path=owner/model",
    "worker.reward.reward_function=math",
    "worker.rollout.name=vllm",
]


@pytest.mark.parametrize("devices", [1, 2])
def test_the_default_of_two_workers_is_as_many_as_there_are_devices(devices: int) -> None:
    config, _ = load_config([*BASE, f"trainer.n_gpus_per_node={devices}"])
    assert config.worker.rollout.tensor_parallel_size == 2
    model = cast(Any, SimpleNamespace(vision_language=False))
    setup = EngineSetup(config, Hardware("cpu"), model, frozenset(), frozenset(), 256, lambda: None)
    assert vllm_options(setup).tensor_parallel_size == devices


def test_the_embedded_engine_has_the_tokenizer_that_stop_strings_of_a_request_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: dict[str, object] = {}
    monkeypatch.setattr("r1_rollout.embedded.EmbeddedEngine", lambda weights, **options: given.update(options))
    config, _ = load_config([*BASE[:3], "worker.rollout.name=embedded"])
    model = cast(Any, SimpleNamespace(tokenizer=object()))
    setup = EngineSetup(config, Hardware("cpu"), model, frozenset(), frozenset(), 256, lambda: None)
    embedded.open_engine(setup, ExitStack())
    assert given["tokenizer"] is model.tokenizer
