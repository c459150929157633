"""The keys of `worker.rollout.servers` reach the servers, and what cannot be is said before one is started."""

import importlib.util
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from r1_cli.build.engines import EngineSetup, servers
from r1_cli.build.engines.vllm import vllm_options
from r1_cli.build.learner import ModelFiles
from r1_cli.config import ConfigError, RunConfig, load_config, unavailable, without_effect
from r1_cli.hardware import Hardware
from r1_cli.models.load import ModelError
from r1_rollout.vllm.servers.pool import ServerPool

BASE = [
    "data.train_files=owner/rows@train",
    "worker.actor.model.model_path=owner/model",
    "worker.reward.reward_function=math",
    "trainer.n_gpus_per_node=1",
]
CPU, GPUS = Hardware("cpu"), Hardware("cuda", ("3", "4", "5", "6", "7"))
URLS = "worker.rollout.servers.urls=[http://127.0.0.1:8000, http://127.0.0.1:8001]"


def config_of(*words: str) -> RunConfig:
    return load_config([*BASE, *words])[0]


def model() -> Any:
    tokenizer = SimpleNamespace(get_vocab=dict, convert_tokens_to_ids={}.get)
    hf_config = SimpleNamespace(to_dict=lambda: {"image_token_id": 60}, vision_config=None)
    return ModelFiles("owner/model", hf_config, tokenizer, tokenizer)


def setup(config: RunConfig, hardware: Hardware, sequences: int = 256) -> EngineSetup:
    return EngineSetup(config, hardware, model(), frozenset({2}), frozenset({60}), sequences, lambda: None)


@contextmanager
def opened(config: RunConfig, hardware: Hardware, sequences: int = 256) -> Iterator[ServerPool]:
    with ExitStack() as stack:
        yield cast(ServerPool, servers.open_engine(setup(config, hardware, sequences), stack))


def options_of(config: RunConfig, hardware: Hardware) -> dict[str, Any]:
    transfer = servers.transfer_backend(config, hardware)
    return vllm_options(setup(config, hardware)).server_options(on_cpu=not hardware.on_gpu, transfer=transfer)


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("R1_SERVERS_TOKEN", "secret")


def test_given_servers_become_a_pool_with_its_deadlines() -> None:
    config = config_of(URLS, "worker.rollout.servers.stall_timeout=7.5")
    with opened(config, CPU, 300) as pool:
        assert isinstance(pool, ServerPool)
        assert [server.endpoint.url for server in pool._supervisor.servers] == [
            "http://127.0.0.1:8000",
            "http://127.0.0.1:8001",
        ]
        assert {server.endpoint.token for server in pool._supervisor.servers} == {"secret"}
        assert pool._supervisor.deadlines.stall == 7.5
        assert pool._max_sequences == 300
        assert pool._dtype is torch.float32
        assert pool._supervisor.servers[0]._banned == {60}


BROADCAST = "worker.rollout.servers.transfer=broadcast"


@pytest.mark.parametrize(("words", "backend"), [([], None), ([BROADCAST], "r1_tcp")])
def test_the_way_of_the_weights_reaches_the_pool_and_the_servers(words: list[str], backend: str | None) -> None:
    config = config_of(URLS, *words)
    with opened(config, CPU) as pool:
        assert pool._broadcast == backend
    options = options_of(config, CPU)
    assert options["weight_transfer_config"] == ({"backend": backend} if backend else None)


def test_gpus_get_their_weights_over_nccl_for_which_the_learner_needs_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(URLS, BROADCAST)
    options = options_of(config, GPUS)
    assert options["weight_transfer_config"] == {"backend": "nccl"}
    monkeypatch.setattr(servers, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="transfer=broadcast on GPUs needs vLLM here"), opened(config, GPUS):
        pass


def test_given_servers_need_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("R1_SERVERS_TOKEN")
    with pytest.raises(ConfigError, match=r"servers.urls.*needs the servers' token .* R1_SERVERS_TOKEN"):
        config_of(URLS)
    load_config([*BASE, URLS], command="data")  # to which no server is of interest


def test_the_engines_keys_become_options_of_the_servers() -> None:
    words = ["worker.rollout.enforce_eager=true", "worker.rollout.limit_images=3", "worker.rollout.max_model_len=5000"]
    config = config_of(URLS, *words, "worker.rollout.tensor_parallel_size=4", "trainer.n_gpus_per_node=8")
    options = options_of(config, GPUS)
    assert options["dtype"] == "bfloat16"
    assert options["tensor_parallel_size"] == 4
    assert options["enforce_eager"] is True
    assert options["max_model_len"] == 5000
    assert options["limit_mm_per_prompt"] == {"image": 3}
    assert options["additional_config"] == {"r1_banned_token_ids": [60]}
    assert options["load_format"] == "dummy"
    assert options_of(config, CPU)["kv_cache_memory_bytes"] == 2**30


def test_servers_stand_on_the_gpus_behind_the_learners() -> None:
    taken = [servers._device_environment(GPUS, number, 2, 2) for number in range(2)]
    assert taken == [{"CUDA_VISIBLE_DEVICES": "4,5"}, {"CUDA_VISIBLE_DEVICES": "6,7"}]
    with pytest.raises(ModelError, match="need 6 GPUs beside the learner's, and 5 are visible"):
        servers._device_environment(GPUS, 0, 3, 2)


def test_with_servers_the_keys_of_vllm_are_read() -> None:
    words = [
        "worker.rollout.name=auto",
        "worker.rollout.gpu_memory_utilization=0.9",
        "worker.rollout.tensor_parallel_size=1",
    ]
    for extra, unread in (([URLS], False), ([], True)):
        config, provenance = load_config([*BASE, *words, *extra])
        keys = {limit.key for limit in [*without_effect(config, provenance), *unavailable(config, provenance)]}
        assert ("worker.rollout.gpu_memory_utilization" in keys) == unread


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vllm is installed")
def test_servers_of_its_own_need_vllm() -> None:
    with pytest.raises(ConfigError, match=r"needs vLLM here: install r1-rollout\[vllm\]"):
        config_of("worker.rollout.servers.count=2")
