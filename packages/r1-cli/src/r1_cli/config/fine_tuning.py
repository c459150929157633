"""A fine-tuning run as its learner sees it: a training run with one answer per row, or two to compare."""

from collections.abc import Iterator

from r1_cli.config.problems import KeyProblem
from r1_cli.config.rollout import EnginesConfig, ServersConfig
from r1_cli.config.root import RunConfig
from r1_cli.config.section import with_value

AVERAGES = {"token": "token", "sequence": "seq"}


def as_training(config: RunConfig) -> RunConfig:
    """Return the configuration of a training run whose steps are those of `r1 sft`, for learner, plan and checks.

    `data.max_length` is divided between prompt and response, which profiling, memory and the plan read.
    """
    sft, rows, longest = config.sft, config.worker.actor.global_batch_size, config.data.max_length
    prompt = max(1, longest // 2)
    values: dict[str, object] = {
        "data.rollout_batch_size": rows,
        "data.mini_rollout_batch_size": None,
        "data.max_prompt_length": prompt,
        "data.max_response_length": max(1, longest - prompt),
        "algorithm.adv_estimator": "grpo",
        "algorithm.disable_kl": not sft.needs_reference,
        "algorithm.use_kl_loss": False,
        "algorithm.kl_type": "fixed",
        "algorithm.online_filtering": False,
        "algorithm.off_policy_mask_threshold": None,
        "algorithm.rollout_correction.rollout_is": None,
        "algorithm.rollout_correction.rollout_rs": None,
        "worker.actor.loss_type": sft.learned,
        "worker.actor.loss_avg_mode": "seq-mean-token-sum" if sft.compares else AVERAGES[sft.aggregation],
        "worker.actor.entropy_coef": 0.0,
        "worker.actor.ppo_epochs": 1,
        "worker.rollout.n": 2 if sft.has_pairs else 1,
        "worker.rollout.temperature": 1.0,
        "trainer.total_epochs": sft.epochs,
        "trainer.max_staleness": 0,
        "trainer.critic_warmup": 0,
    }
    if not sft.val_generations:
        values |= {
            "worker.rollout.servers": ServersConfig(),
            "worker.rollout.engines": EnginesConfig(),
            "worker.rollout.name": "embedded",
            "worker.actor.offload.offload_params": False,  # nothing else uses the devices
            "worker.actor.offload.offload_optimizer": False,
        }
    for key, value in values.items():
        config = with_value(config, key, value)
    return config


def fine_tuning_problems(config: RunConfig) -> Iterator[KeyProblem]:
    sft, actor = config.sft, config.worker.actor
    if sft.needs_reference and config.algorithm.disable_kl:
        message = f"sft.loss={sft.loss} compares with a reference: set false, or sft.loss=simpo, which needs none"
        yield "algorithm.disable_kl", message
    if sft.label_smoothing >= 0.5:
        yield "sft.label_smoothing", "must be below 0.5"
    if config.data.curriculum.by == "online":
        message = "reads the answers that r1 train samples: set pass_rate, a column that r1 rows writes"
        yield "data.curriculum.by", message
    if config.data.max_length < 2:
        yield "data.max_length", "must be at least 2: a token and its answer"
    if sft.compares and sft.train_on_prompt:
        yield "sft.train_on_prompt", f"cannot be used with sft.loss={sft.loss}, which compares endings: set false"
    if sft.compares and sft.turns == "each":
        yield "sft.turns", f"cannot be each with sft.loss={sft.loss}, which compares endings: set last or all"
    if sft.loss == "reward" and sft.val_generations:
        yield "sft.val_generations", "cannot be used with sft.loss=reward: a reward model samples no answers: set false"
    if sft.loss == "reward" and actor.model.lora.used:
        message = (
            "cannot be used with sft.loss=reward, because what serves a reward model loads no adapter: set 0, and "
        )
        yield "worker.actor.model.lora.rank", f"{message}name weights to keep in worker.actor.model.freeze"
    if config.worker.rollout.multi_turn.enable and sft.val_generations:
        yield "sft.val_generations", "samples single answers: set worker.rollout.multi_turn.enable=false"
    if config.trainer.val_only:
        yield "trainer.val_only", "is for r1 train: score a model with r1 eval"
    view = as_training(config)
    yield from view.worker.actor.sequence_problems("worker.actor", config.trainer.n_gpus_per_node)
    yield from actor.fsdp.problems("worker.actor.fsdp", config.trainer.devices)
    yield from actor.optim.problems("worker.actor", actor.kept_dtype)
    if actor.router_replay:
        yield "worker.actor.router_replay", "replays what an engine chose, and demonstrations have none: set false"
    samples_from_base = not sft.val_generations or config.worker.rollout.name != "vllm"
    yield from actor.adapter_problems(samples_from_base=samples_from_base)
