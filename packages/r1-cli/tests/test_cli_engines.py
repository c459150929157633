"""The keys of `worker.rollout` as options of a vLLM engine in the run's own process."""

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, cast

import pytest
from transformers import PreTrainedConfig

from r1_cli.build.engines import EngineSetup, embedded
from r1_cli.build.engines.vllm import vllm_options
from r1_cli.config import RunConfig, load_config
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
    assert vllm_options(setup_of(config, PreTrainedConfig())).tensor_parallel_size == devices


def setup_of(config: RunConfig, hf_config: PreTrainedConfig) -> EngineSetup:
    model = cast(Any, SimpleNamespace(vision_language=False, config=hf_config))
    return EngineSetup(config, Hardware("cpu"), model, frozenset(), frozenset(), 256, lambda: None)


@pytest.mark.parametrize(
    ("words", "expected"),
    [([], {"quantization_config": None}), (["worker.actor.model.lora.rank=8", "trainer.n_gpus_per_node=1"], {})],
)
def test_vllm_holds_plain_weights_of_a_model_published_in_few_bits_unless_it_reads_the_files(
    words: list[str], expected: dict[str, object]
) -> None:
    quantized = PreTrainedConfig(quantization_config={"quant_method": "mxfp4"})
    assert vllm_options(setup_of(load_config([*BASE, *words])[0], quantized)).hf_overrides == expected


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
