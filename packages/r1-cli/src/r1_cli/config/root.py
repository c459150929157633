"""The whole configuration of a run, `RunConfig`, and views of it."""

from collections.abc import Iterator
from functools import reduce
from operator import getitem
from typing import Any, Literal

from r1_cli.config.actor import ActorConfig, CriticConfig, RefConfig, UpdateConfig, sharing_problems
from r1_cli.config.algorithm import AlgorithmConfig
from r1_cli.config.data import DataConfig
from r1_cli.config.distillation import TeacherConfig
from r1_cli.config.options import ESTIMATOR_OPTIONS, LOSS_OPTIONS, needs_of, own_defaults
from r1_cli.config.problems import MASK, SECRET, ConfigError, KeyRemark, Problem, hide_url_passwords
from r1_cli.config.reward import RewardConfig
from r1_cli.config.rollout import RolloutConfig, engine_module
from r1_cli.config.section import Section, Tree, lookup, with_value
from r1_cli.config.sft import LEARNED, SftConfig
from r1_cli.config.trainer import OWN_DEVICES, STALENESS, TrainerConfig
from r1_core import registry

Owner = Literal["actor", "critic"]  # of a model that is trained


class WorkerConfig(Section):
    hybrid_engine: bool = True
    actor: ActorConfig = ActorConfig()
    critic: CriticConfig = CriticConfig()
    ref: RefConfig = RefConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    teacher: TeacherConfig = TeacherConfig()


REMARKS = (KeyRemark("worker.hybrid_engine", "one process both samples and trains"),)


class RunConfig(Section):
    """One run. The defaults are those of EasyR1's example, which users copy."""

    data: DataConfig = DataConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    worker: WorkerConfig = WorkerConfig()
    trainer: TrainerConfig = TrainerConfig()
    sft: SftConfig = SftConfig()

    @property
    def on_cluster(self) -> bool:
        # With min_nodes, one device may be left of several.
        several = self.trainer.devices > 1 or self.trainer.min_nodes is not None
        return several or self.worker.rollout.engines.nnodes > 0

    def with_nodes(self, learner: int, apart: int | None = None) -> "RunConfig":
        """Return the configuration for so many nodes of the learner, and of engines apart."""
        config = with_value(self, "trainer.nnodes", learner)
        return config if apart is None else with_value(config, "worker.rollout.engines.nnodes", apart)

    @property
    def has_critic(self) -> bool:
        return "values" in needs_of(registry.estimators(), self.algorithm.adv_estimator)

    @property
    def learns_task(self) -> bool:
        """Whether rewards enter the advantages; a teacher may replace them."""
        teacher = self.worker.teacher
        return not teacher.covers_all or self.algorithm.distillation.task_reward

    def trained(self, owner: Owner) -> UpdateConfig:
        return self.worker.actor if owner == "actor" else self.worker.critic

    def sequence_ranks(self, owner: Owner = "actor") -> int:
        return self.trained(owner).ulysses_size if self.trainer.devices > 1 else 1

    def data_ranks(self, owner: Owner = "actor") -> int:
        """Data-parallel shards of a step's samples."""
        return max(1, self.trainer.devices // self.sequence_ranks(owner))

    @property
    def shard_ranks(self) -> int:
        """Devices that share one copy of the weights."""
        size = self.worker.actor.fsdp.fsdp_size
        return size if 0 < size < self.trainer.devices else self.trainer.devices

    @property
    def samples(self) -> bool:
        """Whether the run has an engine; `r1 sft` may have none, see `fine_tuning.as_training`."""
        return self.worker.actor.loss_type not in LEARNED or self.sft.val_generations

    @property
    def colocated(self) -> bool:
        rollout = self.worker.rollout
        return self.samples and not rollout.servers.used and not rollout.engines.nnodes

    @property
    def importance_weights(self) -> Literal["token", "sequence", "geometric"] | None:
        """The level of the importance weights between engine and learner, or None.

        With `auto`, samples of older weights are corrected per token: the optimizer step is relative to the learner's
        previous policy, and each token's loss is weighted by that policy's ratio to the sampling one (decoupled PPO of
        AReaL, arXiv 2505.24298; truncation as in arXiv 1802.01561).
        """
        level = self.algorithm.rollout_correction.rollout_is
        if level == "auto":
            return "token" if self.trainer.max_staleness or self.keeps_surplus else None
        return level

    @property
    def keeps_surplus(self) -> bool:
        """Whether filtered groups that a step does not need are carried over."""
        return self.algorithm.online_filtering and self.algorithm.surplus_max_age > 0

    @property
    def shares_devices(self) -> bool:
        """Whether engines or a critic use the actor's devices between its calls."""
        return self.colocated or self.has_critic

    @property
    def reads_media(self) -> bool:
        """Whether worker processes are used, and the model may have a vision part."""
        return self.data.filter_overlong_prompts_workers != 1 and self.worker.actor.model.has_vision()

    def why_copied(self, *, on_gpu: bool) -> str | None:
        """Return why the engine copies the base of the learner's adapter; None if it does not."""
        actor, rollout = self.worker.actor, self.worker.rollout
        kept = actor.fsdp.mp_param_dtype if on_gpu and actor.kept_dtype == "fp32" else actor.kept_dtype
        sampled = rollout.dtype if on_gpu else "fp32"
        if engine_module(rollout.engine) is not engine_module("embedded"):
            return "only the embedded engine samples from the learner's"
        if self.on_cluster or self.trainer.max_staleness:
            return "it is in a process of its own"
        if actor.model.quantization is not None:
            return f"the learner's is in 4 bits (worker.actor.model.quantization={actor.model.quantization})"
        if on_gpu and actor.fsdp.enable_cpu_offload:
            return "the learner's is in the processor's memory (worker.actor.fsdp.enable_cpu_offload=true)"
        if kept != sampled:
            return f"it samples in {sampled}, and the learner's is in {kept}"
        return None

    def shares_base(self, *, on_gpu: bool) -> bool:
        """Whether an adapter is trained, and engine and learner use one base."""
        return self.worker.actor.model.lora.used and self.why_copied(on_gpu=on_gpu) is None


READ_OF_ATTENTION = ("model_type", "num_attention_heads", "num_key_value_heads", "layer_types", "sliding_window")


def require_shareable(config: RunConfig, text: Any, owner: Owner = "actor") -> None:
    """Raise ConfigError, with sizes that work, if ranks cannot share the sequences of a model.

    Args:
        text: the Hugging Face configuration of its text part.
    """
    size = config.sequence_ranks(owner)
    if size > 1:
        read = {name: getattr(text, name, None) for name in READ_OF_ATTENTION}
        found = sharing_problems(read, size, config.trainer.n_gpus_per_node)
        problems = [Problem(f"worker.{owner}.ulysses_size", message, str(size)) for message in found]
        if problems:
            raise ConfigError(problems)


def require_own_devices(config: RunConfig) -> None:
    """Raise ConfigError if asynchronous engines share the devices of several ranks."""
    if config.trainer.max_staleness and config.on_cluster and config.colocated:
        raise ConfigError([Problem(STALENESS, OWN_DEVICES, str(config.trainer.max_staleness))])


def own_values(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """Yield key and value of settings that the estimator, the loss or `auto` decides."""
    algorithm, actor = config.algorithm, config.worker.actor
    yield from own_defaults(algorithm, ESTIMATOR_OPTIONS, algorithm.adv_estimator)
    yield from own_defaults(actor, LOSS_OPTIONS, actor.loss_type)
    if actor.loss_avg_mode is None and actor.loss_type in registry.losses():
        yield "worker.actor.loss_avg_mode", registry.losses()[actor.loss_type].aggregation
    if algorithm.rollout_correction.rollout_is == "auto":
        yield "algorithm.rollout_correction.rollout_is", config.importance_weights
    if config.has_critic and config.worker.critic.loss_avg_mode is None:
        yield "worker.critic.loss_avg_mode", "token"


def printable(config: RunConfig) -> Tree:
    """Return the configuration as plain values, as used, with secrets masked."""
    values = config.model_dump(mode="json")
    for key, value in own_values(config):
        section, _, name = key.rpartition(".")
        reduce(getitem, section.split("."), values)[name] = value
    for _, holder, option in _open_mappings(values):
        holder[option] = masked(holder[option])
    for key in ("sources", "val_sources"):  # of which a null is an answer, and what is not there is as `data` has it
        for shown, source in zip(values["data"][key] or [], lookup(config.data, key) or [], strict=True):
            for unset in shown.keys() - source.model_fields_set:
                del shown[unset]
    return _without_url_passwords(values)


def _without_url_passwords(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_url_passwords(inside) for name, inside in value.items()}
    if isinstance(value, list):
        return [_without_url_passwords(inside) for inside in value]
    return hide_url_passwords(value) if isinstance(value, str) else value


def masked_keys(config: RunConfig) -> list[str]:
    """Return the keys whose secrets a saved configuration has masked."""
    found = []
    for key, section, name in _open_mappings(config.model_dump(mode="json")):
        found += [f"{key}{place}" for place, value in _leaves(section[name]) if value == MASK]
    return found


def _open_mappings(values: Tree) -> Iterator[tuple[str, Tree, str]]:
    yield "worker.reward.reward_function_kwargs", values["worker"]["reward"], "reward_function_kwargs"
    for name in ("tool_kwargs", "environment_kwargs"):
        yield f"worker.rollout.multi_turn.{name}", values["worker"]["rollout"]["multi_turn"], name
    for owner in ("actor", "critic"):
        yield f"worker.{owner}.model.override_config", values["worker"][owner]["model"], "override_config"
    for key in ("sources", "val_sources"):
        for index, source in enumerate(values["data"][key] or []):
            yield f"data.{key}[{index}].reward_function_kwargs", source, "reward_function_kwargs"


def masked(options: Any) -> Any:
    if isinstance(options, list):
        return [masked(option) for option in options]
    if not isinstance(options, dict):
        return options
    return {name: MASK if SECRET.search(name) and value else masked(value) for name, value in options.items()}


def _leaves(options: object) -> Iterator[tuple[str, object]]:
    """Yield place and value of nested options, with places such as `.judges[0].api_key`."""
    if isinstance(options, dict | list):
        inside = options.items() if isinstance(options, dict) else enumerate(options)
        for name, value in inside:
            step = f".{name}" if isinstance(options, dict) else f"[{name}]"
            yield from ((step + place, leaf) for place, leaf in _leaves(value))
    else:
        yield "", options
