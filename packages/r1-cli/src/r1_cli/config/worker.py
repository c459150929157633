"""Configuration section `worker`: the policy, the critic, the reference, the engine and the reward."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from r1_cli.config.engines import AUTO, ENGINES, SERVERS, engine_module
from r1_cli.config.options import LOSS_OPTIONS, LossName, LossSettings, refuse_clashes
from r1_cli.config.section import (
    Count,
    FileFunction,
    NonNegative,
    Positive,
    Precision,
    Ratio,
    Section,
    SizeOrAuto,
    one_of,
)

Aggregation = Literal[
    "token", "seq", "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
]


class LoraConfig(Section):
    """A low-rank adapter that is trained in place of the weights (arXiv 2106.09685)."""

    rank: Annotated[int, Field(ge=0)] = 0  # 0: train all weights
    alpha: Count = 64  # the factors' product weighs alpha / rank
    target_modules: str | list[str] = "all-linear"  # ends of modules' names, or a pattern of whole names
    exclude_modules: str | list[str] | None = ".*visual.*"
    path: str | None = None  # an adapter to start from, whose rank, alpha and modules it keeps

    @property
    def used(self) -> bool:
        """Whether an adapter is trained."""
        return bool(self.rank or self.path)


class ModelConfig(Section):
    model_path: str | None = None  # a Hugging Face folder or hub name
    tokenizer_path: str | None = None  # null: the model's own
    override_config: dict[str, Any] = Field(default_factory=dict)  # entries of the model's config.json
    enable_gradient_checkpointing: bool = True  # compute activations again going backward: less memory, more time
    enable_activation_offload: bool = False  # checkpointed layers' inputs wait in the processor's memory
    trust_remote_code: bool = False
    freeze_vision_tower: bool = False  # train the rest only
    quantization: Literal["nf4"] | None = None  # keep the base under an adapter in 4 bits, on one device
    freeze: list[str] = Field(default_factory=list)  # patterns of whole names of parameters that are not trained
    lora: LoraConfig = LoraConfig()


class RateConfig(Section):
    """Parameters that are trained at a rate of their own."""

    pattern: str  # of whole names
    lr: NonNegative  # of these
    weight_decay: NonNegative | None = None  # null: that of the others
    name: str | None = None  # of its metrics; null: the pattern


class OptimConfig(Section):
    lr: NonNegative = 1e-6  # the learning rate, after the warm-up
    betas: Annotated[tuple[Ratio, Ratio], Field(strict=False)] = (0.9, 0.999)  # of AdamW
    weight_decay: NonNegative = 1e-2  # of AdamW
    strategy: Literal["adamw", "adamw_bf16"] = "adamw"  # adamw_bf16 keeps weights and states in bfloat16
    lr_warmup_ratio: Ratio = 0.0  # share of all optimizer steps
    lr_warmup_steps: Annotated[int, Field(ge=0)] | None = None  # training steps; wins over lr_warmup_ratio
    min_lr_ratio: Ratio | None = None  # of lr, where cosine and linear end; null: 0
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = "constant"
    num_cycles: Positive = 0.5  # waves of the cosine
    groups: list[RateConfig] = Field(default_factory=list)  # a parameter belongs to the first that it matches


class FSDPConfig(Section):
    enable_full_shard: bool = True  # a layer's gathered weights go after it; false: only in the backward pass
    enable_cpu_offload: bool = False  # weights and states lie in the processor's memory, layers visit the device
    enable_rank0_init: bool = True
    use_orig_params: bool = False
    torch_dtype: Precision | None = None  # of the weights that are kept; null: fp32, bf16 with adamw_bf16
    fsdp_size: int = -1  # devices that share one copy of the weights; -1: all
    mp_param_dtype: Precision = "bf16"  # of the forward and backward passes
    mp_reduce_dtype: Precision = "fp32"  # in which gradients are added up over devices
    mp_buffer_dtype: Precision = "fp32"


class OffloadConfig(Section):
    """Whether states lie in the processor's memory while an engine samples on the device, and the reference's ever."""

    offload_params: bool = True  # weights
    offload_optimizer: bool = True  # the optimizer's states


class UpdateConfig(Section):
    """What the actor and the critic have in common. Batches are prompts, micro-batches are sequences."""

    strategy: Literal["fsdp", "fsdp2"] = "fsdp"
    global_batch_size: Count = 128  # prompts per optimizer step
    micro_batch_size_per_device_for_update: SizeOrAuto = 1
    micro_batch_size_per_device_for_experience: SizeOrAuto = 2
    max_grad_norm: Positive = 1.0  # a longer gradient is scaled down to it
    loss_avg_mode: Aggregation | None = None  # null: the one that the loss is meant for
    ppo_epochs: Count = 1  # passes over a step's samples
    padding_free: bool = True
    share_prompts: bool = True  # compute a prompt once for all its answers in a micro-batch; packed rows only
    dynamic_batching: bool = True  # micro-batches by token budget: micro batch size × longest sequence
    ulysses_size: Count = 1
    model: ModelConfig = ModelConfig()
    optim: OptimConfig = OptimConfig()
    fsdp: FSDPConfig = FSDPConfig()
    offload: OffloadConfig = OffloadConfig()

    @property
    def update_size(self) -> int:
        """Sequences of a micro-batch with a gradient; where it chooses itself, what it has at least."""
        size = self.micro_batch_size_per_device_for_update
        return size if isinstance(size, int) else 1

    @property
    def experience_size(self) -> int:
        """The same of one without a gradient."""
        size = self.micro_batch_size_per_device_for_experience
        return size if isinstance(size, int) else 2

    @property
    def kept_dtype(self) -> Precision:
        """Precision of the weights, their gradients and the optimizer's states."""
        return self.fsdp.torch_dtype or ("bf16" if self.optim.strategy == "adamw_bf16" else "fp32")

    @property
    def shares_prompts(self) -> bool:
        """Whether a micro-batch has a prompt once for all its answers, if the model can read it so."""
        return self.padding_free and self.share_prompts


class ActorConfig(UpdateConfig, LossSettings):
    loss_type: LossName | FileFunction = "default"  # a name, or `file.py:function` from LossInputs to losses
    entropy_coef: NonNegative = 0.0  # of an entropy bonus
    loss_scale_factor: Count | None = None  # seq-mean-token-sum-norm divides by it; null: data.max_response_length
    use_torch_compile: bool = True


refuse_clashes(ActorConfig, LOSS_OPTIONS)


class CriticConfig(UpdateConfig):
    """Batch sizes that are not set are the actor's, and so is a model that is not named (`config.critic`)."""

    cliprange_value: Positive = 0.5  # of values, around those before the step


class RefConfig(Section):
    strategy: Literal["fsdp", "fsdp2"] = "fsdp"
    fsdp: FSDPConfig = FSDPConfig(enable_cpu_offload=True)
    offload: OffloadConfig = OffloadConfig(offload_params=False, offload_optimizer=False)


class ValOverrideConfig(Section):
    """How validation samples; null: as training does."""

    n: Count = 1  # answers per prompt
    temperature: NonNegative | None = 0.6  # 0: greedy
    top_p: Annotated[float, Field(gt=0, le=1)] | None = 0.95  # as worker.rollout.top_p
    top_k: int | None = None  # as worker.rollout.top_k
    seed: int | None = None  # as worker.rollout.seed
    max_tokens: Count | None = None  # null: data.max_response_length


TOKEN_VARIABLE = "R1_SERVERS_TOKEN"  # the token of given servers: a secret, so not a key of the configuration


class ServersConfig(Section):
    """vLLM servers that sample in place of one engine, where `count` or `urls` says so. Times are in seconds."""

    count: Annotated[int, Field(ge=0)] = 0  # servers that r1 starts, each on tensor_parallel_size GPUs of its own
    urls: list[Annotated[str, Field(pattern=r"^https?://[^/\s]+/?$")]] = Field(default_factory=list)  # that run already
    transfer: Literal["folder", "broadcast"] = "folder"  # weights as files, or by NCCL to GPUs and TCP to processors
    weights_folder: str | None = None  # on a disk that all servers see; null: this machine's temporary folder
    start_timeout: Positive = 600.0  # until a server must be up
    load_timeout: Positive = 600.0  # for new weights
    stall_timeout: Positive = 300.0  # a server with requests that says nothing for so long is started anew
    recovery_timeout: Positive = 900.0  # with no server up, until the run stops

    @property
    def used(self) -> bool:
        """Whether servers sample."""
        return bool(self.count or self.urls)


class EnginesConfig(Section):
    """Where engines compute in a run on several devices: 0, 0 is on those that learn, else on so many more.

    On processors these are further processes, with a CPU each of what the nodes of a cluster offer.
    """

    nnodes: Annotated[int, Field(ge=0)] = 0  # machines
    n_gpus_per_node: Annotated[int, Field(ge=0)] = 0  # devices of each


class RolloutConfig(Section):
    name: Annotated[str, one_of(ENGINES)] = AUTO
    n: Count = 5  # answers per prompt
    temperature: NonNegative = 1.0  # of sampling; log-probs are those at it
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0  # sample from the likeliest tokens of this share; 1: off
    top_k: int = -1  # -1: off
    seed: int = 1  # a sample's noise is a function of it, the prompt and the number of the answer
    dtype: Precision = "bf16"  # of the engine's weights on a GPU; fp32 on processors
    tensor_parallel_size: Count = 2  # devices of one engine
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.6  # share of a GPU that vLLM takes
    max_num_batched_tokens: Count = 8192  # tokens of one of vLLM's passes
    max_model_len: Count | None = None  # of vLLM; null: the longest prompt and answer together
    enforce_eager: bool = False  # sample without CUDA graphs
    enable_chunked_prefill: bool = False  # vLLM cuts long prompts into several passes
    ignore_eos: bool = False  # answers go on to their full length
    limit_images: Annotated[int, Field(ge=0)] = 0  # pictures per prompt that the engine reserves room for; 0: its own
    disable_tqdm: bool = False
    disable_log_stats: bool = True  # vLLM keeps its own figures to itself
    canary: bool = True  # compare log-probs with the learner's after every sync, and stop at a mismatch
    val_override_config: ValOverrideConfig = ValOverrideConfig()
    servers: ServersConfig = ServersConfig()
    engines: EnginesConfig = EnginesConfig()

    @property
    def engine(self) -> str:
        """The engine that samples: servers where there are some, else the one that is named."""
        return SERVERS if self.servers.used else self.name

    @property
    def engine_size(self) -> int:
        """Devices of an engine in a run on several: the embedded one knows no tensor parallelism."""
        return 1 if engine_module(self.engine) is engine_module("embedded") else self.tensor_parallel_size


def _with_function(value: Any) -> Any:
    """A reward file without a function name means its function `main`."""
    return f"{value}:main" if isinstance(value, str) and value.endswith(".py") else value


class OverlongBufferConfig(Section):
    """DAPO's soft overlong punishment: the last `len` tokens before data.max_response_length cost reward."""

    enable: bool = False  # whether long answers are punished
    len: Count | None = None
    penalty_factor: NonNegative = 1.0  # taken off an answer that fills them all


class RewardConfig(Section):
    reward_function: Annotated[str, BeforeValidator(_with_function)] | None = None  # `math` or `file.py:function`
    reward_function_kwargs: dict[str, Any] = Field(default_factory=dict)
    reward_type: Literal["batch", "sequential"] | None = None  # older; the file's own REWARD_TYPE says it today
    skip_special_tokens: bool = True  # leave them out of the text that the reward gets
    num_cpus: Count = 1  # worker processes
    timeout: Positive = 30.0  # seconds per sample
    failure_score: float = 0.0  # of a sample that could not be scored
    failure_policy: Literal["score", "drop", "stop"] = "score"  # what becomes of it: that score, left out, or the end
    overlong_buffer: OverlongBufferConfig = OverlongBufferConfig()


class WorkerConfig(Section):
    hybrid_engine: bool = True
    actor: ActorConfig = ActorConfig()
    critic: CriticConfig = CriticConfig()
    ref: RefConfig = RefConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
