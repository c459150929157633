"""Configuration sections `worker.actor`, `worker.critic` and `worker.ref`."""

from collections.abc import Iterator
from importlib.util import find_spec
from os.path import isfile
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from r1_cli.config.model import LoraConfig, ModelConfig
from r1_cli.config.options import LOSS_OPTIONS, LossName, LossSettings, refuse_clashes
from r1_cli.config.problems import Applies, KeyProblem, KeyRemark, nearest_divisors
from r1_cli.config.rollout import engine_module
from r1_cli.config.section import (
    Count,
    FileFunction,
    NonNegative,
    Positive,
    Precision,
    Ratio,
    Section,
    SizeOrAuto,
    Tree,
    lookup,
)

Aggregation = Literal[
    "token", "seq", "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
]


class RateConfig(Section):
    """Parameters with a learning rate of their own."""

    pattern: str  # of whole parameter names
    lr: NonNegative  # their learning rate
    weight_decay: NonNegative | None = None  # null: worker.actor.optim.weight_decay
    name: str | None = None  # of its metrics; null: the pattern


class OptimConfig(Section):
    lr: NonNegative = 1e-6  # the learning rate, after the warm-up
    betas: Annotated[tuple[Ratio, Ratio], Field(strict=False)] = (0.9, 0.999)  # of AdamW
    weight_decay: NonNegative = 1e-2  # of AdamW
    strategy: Literal["adamw", "adamw_bf16"] = "adamw"  # adamw_bf16: bfloat16 weights and states
    lr_warmup_ratio: Ratio = 0.0  # share of all optimizer steps
    lr_warmup_steps: Annotated[int, Field(ge=0)] | None = None  # training steps; wins over lr_warmup_ratio
    min_lr_ratio: Ratio | None = None  # final rate of cosine and linear, as a share of lr; null: 0
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = "constant"
    num_cycles: Positive = 0.5  # cosine cycles
    groups: list[RateConfig] = Field(default_factory=list)  # a parameter has the rate of the first match

    def problems(self, key: str, kept_dtype: Precision) -> Iterator[KeyProblem]:
        if any(beta >= 1 for beta in self.betas):
            yield f"{key}.optim.betas", "must be below 1"
        if self.strategy == "adamw_bf16" and kept_dtype != "bf16":
            yield (
                f"{key}.fsdp.torch_dtype",
                f"must be bf16 or null: {key}.optim.strategy=adamw_bf16 trains bf16 weights",
            )


class FSDPConfig(Section):
    enable_full_shard: bool = True  # reshard a layer after its forward pass; false: after its backward pass
    enable_cpu_offload: bool = False  # weights and states stay in host memory, each layer is copied to the device
    enable_rank0_init: bool = True
    use_orig_params: bool = False
    torch_dtype: Precision | None = None  # of the stored weights; null: fp32, bf16 with adamw_bf16
    fsdp_size: int = -1  # devices that share one copy of the weights; -1: all
    mp_param_dtype: Precision = "bf16"  # of the forward and backward passes
    mp_reduce_dtype: Precision = "fp32"  # of gradient reduction over devices
    mp_buffer_dtype: Precision = "fp32"

    def problems(self, key: str, devices: int) -> Iterator[KeyProblem]:
        if devices > 1 and self.fsdp_size != -1 and (self.fsdp_size < 1 or devices % self.fsdp_size):
            shown = f"(trainer.nnodes × trainer.n_gpus_per_node = {devices})"
            yield f"{key}.fsdp_size", f"must divide the number of devices {shown}, or be -1 for all of them"


class OffloadConfig(Section):
    """What moves to host memory while engines sample; for the reference: while it is not used."""

    offload_params: bool = True  # weights
    offload_optimizer: bool = True  # the optimizer's states


class UpdateConfig(Section):
    """Settings of actor and critic. Batch sizes are prompts, micro-batch sizes are sequences."""

    strategy: Literal["fsdp", "fsdp2"] = "fsdp"
    global_batch_size: Count = 128  # prompts per optimizer step
    micro_batch_size_per_device_for_update: SizeOrAuto = 1
    micro_batch_size_per_device_for_experience: SizeOrAuto = 2
    max_grad_norm: Positive = 1.0  # gradients are clipped to this norm
    loss_avg_mode: Aggregation | None = None  # null: the loss's own
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
        """Sequences of a training micro-batch; the smallest possible number for `auto`."""
        size = self.micro_batch_size_per_device_for_update
        return size if isinstance(size, int) else 1

    @property
    def experience_size(self) -> int:
        """Sequences of a micro-batch without gradients, likewise."""
        size = self.micro_batch_size_per_device_for_experience
        return size if isinstance(size, int) else 2

    @property
    def kept_dtype(self) -> Precision:
        return self.fsdp.torch_dtype or ("bf16" if self.optim.strategy == "adamw_bf16" else "fp32")

    @property
    def shares_prompts(self) -> bool:
        return self.padding_free and self.share_prompts

    def batch_problems(self, key: str, prompts: int, n: int, replicas: int) -> Iterator[KeyProblem]:
        """Yield batch sizes that do not divide one another; `replicas` are data-parallel devices."""
        update, step = self.global_batch_size * n, prompts * n
        if prompts % self.global_batch_size:
            divisors = nearest_divisors(prompts, self.global_batch_size)
            yield f"{key}.global_batch_size", f"must divide data.rollout_batch_size ({prompts}); {divisors} would do"
        if update % replicas:
            yield (
                f"{key}.global_batch_size",
                f"× worker.rollout.n ({n}) = {update} sequences must be a multiple of the {replicas} data-parallel "
                "devices",
            )
        elif not self.dynamic_batching:
            for name, sequences, of, formula in (
                ("update", update // replicas, "optimizer step", "global_batch_size × n ÷ devices"),
                ("experience", step // replicas, "step", "rollout_batch_size × n ÷ devices"),
            ):
                micro = self.micro_batch_size_per_device_for_update
                if name == "experience":
                    micro = self.micro_batch_size_per_device_for_experience
                if isinstance(micro, int) and sequences % micro:
                    yield (
                        f"{key}.micro_batch_size_per_device_for_{name}",
                        f"must divide the {sequences} sequences per device and {of} ({formula}); "
                        f"{nearest_divisors(sequences, micro)} would do, or set {key}.dynamic_batching=true",
                    )

    def sequence_problems(self, key: str, per_node: int) -> Iterator[KeyProblem]:
        size, key = self.ulysses_size, f"{key}.ulysses_size"
        if size == 1:
            return
        if per_node % size:
            yield key, f"must divide trainer.n_gpus_per_node = {per_node}: a sequence is shared by devices of one node"
            return
        if not self.padding_free:
            yield key, f"cuts packed rows: set {key.replace('ulysses_size', 'padding_free')}=true, or 1"
        try:
            config = self.model.read_config()
        except (OSError, ValueError, TypeError):
            return  # reported for model_path
        text = config.get("text_config") or config
        if "num_attention_heads" in text:  # some families have another name, which only transformers knows
            yield from ((key, message) for message in sharing_problems(text, size, per_node))


class ActorConfig(UpdateConfig, LossSettings):
    loss_type: LossName | FileFunction = "default"  # a name, or `file.py:function` from LossInputs to losses
    entropy_coef: NonNegative = 0.0  # weight of an entropy bonus
    loss_scale_factor: Count | None = None  # seq-mean-token-sum-norm divides by it; null: data.max_response_length
    router_replay: bool = False  # compute each token with the experts that the engine chose for it (R3)
    use_torch_compile: bool = True  # no effect: log-probs are computed eagerly

    def adapter_problems(self, *, samples_from_base: bool) -> Iterator[KeyProblem]:
        key, model, lora = "worker.actor.model", self.model, self.model.lora
        if model.quantization is not None:
            if not lora.used:
                yield f"{key}.quantization", "keeps weights that are not trained; set worker.actor.model.lora.rank"
            if not find_spec("bitsandbytes"):
                yield f"{key}.quantization", "needs bitsandbytes: install r1-cli[qlora]"
            if not samples_from_base:
                message = "needs worker.rollout.name=embedded, whose weights are made of the same 4 bits"
                yield f"{key}.quantization", message
        if not lora.used:
            return
        if not find_spec("peft"):
            yield f"{key}.lora", "needs peft: install r1-cli[lora]"
        if self.optim.strategy == "adamw_bf16":
            message = "trains bf16 weights, and an adapter's factors are fp32; set adamw"
            yield "worker.actor.optim.strategy", message
        if lora.path and not isfile(Path(lora.path) / "adapter_config.json"):
            yield f"{key}.lora.path", "is no folder with an adapter_config.json"

    def replay_problems(self, engine: str) -> Iterator[KeyProblem]:
        if self.router_replay and engine_module(engine) is not engine_module("embedded"):
            yield (
                "worker.actor.router_replay",
                "needs the embedded engine: vLLM 0.32 returns experts by its model runner V2 alone, which runs on GPUs "
                "only and has not been tried here; set worker.rollout.name=embedded, or false",
            )

    def loss_problems(self) -> Iterator[KeyProblem]:
        low, high = lookup(self, "clip_cov_lb"), lookup(self, "clip_cov_ub")
        if low >= high:
            yield "worker.actor.clip_cov_lb", f"must be less than worker.actor.clip_cov_ub ({high})"


refuse_clashes(ActorConfig, LOSS_OPTIONS)


class CriticConfig(UpdateConfig):
    """Batch sizes and model default to the actor's."""

    cliprange_value: Positive = 0.5  # clip range of values, around those before the step


class RefConfig(Section):
    strategy: Literal["fsdp", "fsdp2"] = "fsdp"
    fsdp: FSDPConfig = FSDPConfig(enable_cpu_offload=True)
    offload: OffloadConfig = OffloadConfig(offload_params=False, offload_optimizer=False)


FULL_ATTENTION = "full_attention"


def sharing_problems(text: Tree, size: int, per_node: int) -> Iterator[str]:
    """Yield why `size` of the `per_node` devices of a node cannot share this text model's sequences."""
    heads, family = text.get("num_attention_heads"), text.get("model_type")
    kinds = sorted({*(text.get("layer_types") or [FULL_ATTENTION])} - {FULL_ATTENTION})
    if text.get("sliding_window") and text.get("layer_types") is None and text.get("use_sliding_window", True):
        kinds.append("sliding_attention")
    if kinds:
        yield f"takes layers that attend to all tokens, {family} has others ({', '.join(kinds)}): set 1"
    elif not heads:
        yield f"shares attention heads, and {family} names none: set 1"
    else:
        key_heads = text.get("num_key_value_heads") or heads
        fitting = [n for n in range(1, heads + 1) if per_node % n == 0 and divide_heads(heads, key_heads, n)]
        if size not in fitting:
            would = " or ".join(map(str, fitting))
            yield (
                f"must divide the {heads} heads of attention, and divide its {key_heads} key heads or be "
                f"a multiple of them; on nodes of {per_node} devices {would} would do"
            )


def divide_heads(heads: int, key_heads: int, size: int) -> bool:
    """Whether heads and key heads can be divided among `size` devices."""
    return heads % size == 0 and (key_heads % size == 0 or size % key_heads == 0)


def _critic_asks(value: object, config: Any) -> bool:
    return config.has_critic and bool(value)


def _has_critic(_: object, config: Any) -> bool:
    return bool(config.has_critic)


def _is_not_checkpointed(owner: str) -> Applies:
    return lambda v, c: not lookup(c, f"worker.{owner}.model.enable_gradient_checkpointing")


UNSUPPORTED = (
    *(
        KeyRemark(f"worker.actor.fsdp.{key}", f"losses are not scaled, set bf16 or {other}", lambda v, c: v == "fp16")
        for key, other in (("torch_dtype", "null"), ("mp_param_dtype", "fp32"))
    ),
    *(
        KeyRemark(
            f"worker.critic.fsdp.{key}", "losses are not scaled, set bf16", lambda v, c: c.has_critic and v == "fp16"
        )
        for key in ("torch_dtype", "mp_param_dtype")
    ),
    KeyRemark("worker.critic.optim.groups", "the critic has one learning rate, set []", _critic_asks),
    KeyRemark("worker.critic.model.lora.rank", "all the critic's weights train, set 0", _critic_asks),
    KeyRemark("worker.critic.model.lora.path", "all the critic's weights train, set null", _critic_asks),
    KeyRemark("worker.critic.model.quantization", "the critic's weights train, set null", _critic_asks),
)
REMARKS = (
    *(
        KeyRemark(f"worker.{owner}.{key}", reason, when)
        for owner, when in (("actor", None), ("critic", _has_critic))
        for key, reason in (
            ("strategy", "both names mean FSDP2"),
            ("fsdp.enable_rank0_init", "each rank reads its own shard of the model's files"),
            ("fsdp.use_orig_params", "FSDP2 always does"),
            ("fsdp.mp_buffer_dtype", "buffers keep the model's own precision"),
        )
    ),
    KeyRemark("worker.ref.strategy", "both names mean FSDP2"),
    KeyRemark("worker.ref.offload.offload_optimizer", "the reference is not trained"),
    *(
        KeyRemark(f"worker.ref.fsdp.{key}", "the reference has the actor's precision and ranks")
        for key in FSDPConfig.model_fields
        if key not in ("enable_cpu_offload", "enable_full_shard")
    ),
    KeyRemark("worker.critic.model.tokenizer_path", "the critic reads the actor's tokens", _has_critic),
    *(
        KeyRemark(f"worker.critic.model.lora.{key}", "all the critic's weights train", _has_critic)
        for key in LoraConfig.model_fields
        if key not in ("rank", "path")
    ),
    KeyRemark("worker.critic.fsdp.fsdp_size", "the critic is sharded like the actor", _has_critic),
    KeyRemark("worker.critic", "the estimator needs no critic", lambda v, c: not c.has_critic),
    KeyRemark("worker.actor.fsdp.fsdp_size", "there is one device", lambda v, c: c.trainer.devices == 1),
    KeyRemark(
        "worker.actor.ulysses_size",
        "there is one device",
        lambda v, c: c.trainer.devices == 1,
    ),
    KeyRemark(
        "worker.critic.ulysses_size",
        "there is one device",
        lambda v, c: c.has_critic and c.trainer.devices == 1,
    ),
    *(
        KeyRemark(f"worker.actor.model.lora.{key}", reason, applies)
        for key in ("alpha", "target_modules", "exclude_modules")
        for reason, applies in (
            ("lora.path's own holds", lambda v, c: c.worker.actor.model.lora.path),
            ("lora.rank is 0", lambda v, c: not c.worker.actor.model.lora.used),
        )
    ),
    *(
        KeyRemark(
            f"worker.{owner}.model.enable_activation_offload",
            "it is for checkpointed layers, set enable_gradient_checkpointing",
            _is_not_checkpointed(owner),
        )
        for owner in ("actor", "critic")
    ),
    KeyRemark(
        "worker.actor.loss_scale_factor",
        "only loss_avg_mode=seq-mean-token-sum-norm uses it",
        lambda v, c: c.worker.actor.loss_avg_mode != "seq-mean-token-sum-norm",
    ),
    KeyRemark(
        "worker.actor.optim.num_cycles",
        "only lr_scheduler_type=cosine uses it",
        lambda v, c: c.worker.actor.optim.lr_scheduler_type != "cosine",
    ),
    # On by default, so only shown if the user sets it.
    KeyRemark("worker.actor.use_torch_compile", "log-probs are computed eagerly", lambda v, c: v, only_if_set=True),
    KeyRemark("worker.actor.optim.lr", "no weight changes", lambda v, c: v == 0, only_if_set=True),
    *(
        KeyRemark(
            f"worker.actor.offload.{key}",
            "nothing else uses the actor's devices",
            lambda v, c: v and not c.shares_devices,
            only_if_set=True,
        )
        for key in ("offload_params", "offload_optimizer")
    ),
    KeyRemark(
        "worker.actor.offload.offload_params",
        "the embedded engine samples from the adapter's base, which stays on the device",
        lambda v, c: v and c.shares_base(on_gpu=True),
        only_if_set=True,
    ),
    KeyRemark(
        "worker.ref.offload.offload_params",
        "worker.ref.fsdp.enable_cpu_offload=true keeps the reference in host memory already",
        lambda v, c: v and c.worker.ref.fsdp.enable_cpu_offload,
        only_if_set=True,
    ),
)
