"""All rules that fields' types cannot express, in reporting order.

Each rule is in its section's class or module.
"""

from collections.abc import Iterator
from typing import Literal

from r1_cli.config.actor import UpdateConfig
from r1_cli.config.distillation import unscored_problems
from r1_cli.config.files import function_problems
from r1_cli.config.fine_tuning import fine_tuning_problems
from r1_cli.config.options import ESTIMATOR_OPTIONS, LOSS_OPTIONS, range_problems
from r1_cli.config.problems import KeyProblem, Problem, Provenance
from r1_cli.config.root import RunConfig, masked, masked_keys
from r1_cli.config.section import lookup
from r1_cli.config.sources import (
    row_problems,
    source_actor_problems,
    source_actors,
    source_problems,
    source_reward_problems,
    training_sources,
    validation_sources,
)

Command = Literal["train", "sft", "eval", "data", "sample", "rows", "chat", "overlap"]
READ_ONLY = ("data", "rows", "chat", "overlap")  # commands that score nothing


def find_problems(config: RunConfig, provenance: Provenance, command: Command) -> list[Problem]:
    """Return all problems that would stop the run, without loading anything."""
    if command == "chat":
        return [_problem(config, provenance, key, message) for key, message in _prompt_problems(config)]
    tuned = command == "sft" or (command in ("data", "overlap") and provenance.is_set("sft"))  # rows are conversations
    found = [*_input_problems(config, command, config.data.max_length if tuned else None)]
    if command == "train":
        found += _training_problems(config, provenance)
    if command == "sft":
        found += fine_tuning_problems(config)
    secrets = _secrets(config) if command not in READ_ONLY else []
    return [_problem(config, provenance, key, message) for key, message in found] + [*secrets]


def _prompt_problems(config: RunConfig) -> Iterator[KeyProblem]:
    """Yield the problems of a model and of its prompts, for a command that reads no rows and scores nothing."""
    data, model = config.data, config.worker.actor.model
    if not model.model_path:
        yield "worker.actor.model.model_path", "is missing: name a Hugging Face folder or hub model"
    yield from config.worker.rollout.sampling_problems(data.max_response_length)
    yield from data.pixel_problems()
    yield from data.file_problems()
    yield from model.file_problems("worker.actor.model")


def _input_problems(config: RunConfig, command: Command, max_length: int | None) -> Iterator[KeyProblem]:
    data, model, reward, rollout = config.data, config.worker.actor.model, config.worker.reward, config.worker.rollout
    yield from row_problems(data, command)
    if not model.model_path and command != "overlap":
        yield "worker.actor.model.model_path", "is missing: name a Hugging Face folder or hub model"
    scores = command not in READ_ONLY and (command != "sft" or config.sft.val_generations)
    judged = rollout.multi_turn.has_environment or not config.learns_task  # without a reward function
    if scores and not reward.reward_function and not judged:
        yield from source_reward_problems(data, command)
    yield from source_problems(data)
    yield from rollout.sampling_problems(data.max_response_length)
    sources = [*training_sources(data), *validation_sources(data)] if command != "eval" else validation_sources(data)
    rewards = [reward.reward_function, *(source.reward_function for source in sources)]
    named = source_actors(data)
    of_sources = bool(named) and all(source.name in named for source in sources)
    tools = any(source.tools for source in named.values())
    found = rollout.multi_turn.problems(
        data.max_response_length, rewards, of_sources=of_sources, tools_of_sources=tools
    )
    yield from found
    yield from source_actor_problems(data, rollout.multi_turn)
    yield from rollout.server_problems(need_token=command not in READ_ONLY)
    yield from data.pixel_problems()
    yield from data.file_problems()
    yield from data.curriculum.problems()
    for source in sources:
        yield from source.file_problems(data)
    yield from model.file_problems("worker.actor.model")
    yield from config.trainer.file_problems(saves=command in ("train", "sft"))
    yield from model.position_problems("worker.actor.model", data.max_response_length, max_length)
    yield from reward.file_problems()
    pixels, sync = (data.min_pixels, data.max_pixels), config.algorithm.distillation.sync
    yield from config.worker.teacher.all_problems(rollout.temperature, sync, pixels)
    yield from function_problems("algorithm.adv_estimator", config.algorithm.adv_estimator)
    yield from function_problems("worker.actor.loss_type", config.worker.actor.loss_type)


def _training_problems(config: RunConfig, provenance: Provenance) -> Iterator[KeyProblem]:
    data, algorithm, trainer = config.data, config.algorithm, config.trainer
    actor, critic, rollout = config.worker.actor, config.worker.critic, config.worker.rollout
    prompts, n = data.rollout_batch_size, rollout.n
    yield from data.batch_problems()
    yield from actor.batch_problems("worker.actor", prompts, n, config.data_ranks())
    if config.has_critic:  # what it has of the actor is reported for the actor
        found = critic.batch_problems("worker.critic", prompts, n, config.data_ranks("critic"))
        yield from (problem for problem in found if provenance.is_set(problem[0]))
    trained: dict[str, UpdateConfig] = {"actor": actor, "critic": critic}
    for owner, section in trained.items():
        if owner == "actor" or config.has_critic:
            yield from section.sequence_problems(f"worker.{owner}", trainer.n_gpus_per_node)
    yield from actor.fsdp.problems("worker.actor.fsdp", trainer.devices)
    for nodes in range(trainer.min_nodes or trainer.nnodes, trainer.nnodes):
        fewer = config.with_nodes(nodes)
        unfit = [*actor.batch_problems("worker.actor", prompts, n, fewer.data_ranks())]
        unfit += actor.fsdp.problems("worker.actor.fsdp", fewer.trainer.devices)
        yield from (("trainer.min_nodes", f"does not fit: with {nodes} nodes, {key} {told}") for key, told in unfit)
    yield from rollout.device_problems(trainer.n_gpus_per_node, provenance, on_cluster=config.on_cluster)
    yield from rollout.length_problems(data.max_prompt_length + data.max_response_length)
    yield from algorithm.clip_problems()
    yield from rollout.training_problems()
    yield from algorithm.problems(samples=prompts * n)
    yield from actor.loss_problems()
    yield from algorithm.need_problems(n, actor.loss_type, learns_task=config.learns_task)
    yield from range_problems(algorithm, ESTIMATOR_OPTIONS, algorithm.adv_estimator)
    yield from range_problems(actor, LOSS_OPTIONS, actor.loss_type)
    if config.worker.teacher.used:
        yield from algorithm.distillation.problems(
            config.worker.teacher,
            full_kl=algorithm.kl_penalty == "full" and not algorithm.disable_kl,
            kl_in_reward=not (algorithm.use_kl_loss or algorithm.disable_kl),
            critic=config.has_critic,
        )
        if not (config.learns_task or has_reward(config)):
            yield from unscored_problems(algorithm.online_filtering, data.curriculum.by == "online")
    yield from algorithm.filter_problems(n)
    yield from algorithm.rollout_correction.problems()
    yield from config.worker.reward.overlong_buffer.problems(data.max_response_length)
    for owner, section in trained.items():
        yield from section.optim.problems(f"worker.{owner}", section.kept_dtype)
    yield from actor.adapter_problems(samples_from_base=rollout.name != "vllm" and not rollout.servers.used)
    yield from actor.replay_problems(rollout.engine)
    yield from trainer.problems(validates=bool(validation_sources(data)))
    yield from trainer.staleness_problems(rollout, provenance, colocated=config.colocated)


def has_reward(config: RunConfig) -> bool:
    """Whether the answers to every training row are scored."""
    own = all(source.reward_function for source in training_sources(config.data))
    environment = config.worker.rollout.multi_turn.has_environment
    return bool(config.worker.reward.reward_function) or own or environment


def _problem(config: RunConfig, provenance: Provenance, key: str, message: str) -> Problem:
    value = masked(lookup(config, key))
    if value is None or key.endswith("sources"):  # sections, whose message names the entry
        return Problem(key, message)
    return Problem(key, message, str(value), provenance.origins.get(key, "default"))


def _secrets(config: RunConfig) -> Iterator[Problem]:
    for key in masked_keys(config):
        again = "name a configuration file that has it, as config=FILE" if "[" in key else f"give it again, as +{key}=…"
        yield Problem(key, f"a secret, which is masked in what a run saves of its configuration: {again}")
