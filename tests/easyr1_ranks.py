"""The learner of each EasyR1 command, in one process and on two ranks: the same step on random answers."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch.distributed as dist
from easyr1_runs import words_of

from r1_cli.build.algorithm import build_schedule, build_update
from r1_cli.build.canary import draw_example
from r1_cli.build.learner import build_learner
from r1_cli.build.rendering import build_renderer
from r1_cli.config import load_config
from r1_cli.hardware import Hardware
from r1_cli.models.files import open_model
from r1_cli.plan.batches import make_plan
from r1_cli.train.groups.group import Group, Response, to_samples
from r1_cli.train.loop import minibatches
from r1_core.learner.parallel import Parallel
from r1_core.needs import OF_POLICY, OF_REFERENCE
from r1_data.types import Example
from r1_rewards.types import Score
from r1_rollout.types import Completion

HARDWARE = Hardware("cpu")


def take_step(name: str, path: str) -> list[dict[str, float]]:
    """What a command's learner, here or in this rank of it, says of each update of a step of drawn answers."""
    config, _ = load_config(words_of(name, path, Path("unused")))
    schedule, model = build_schedule(config, make_plan(config, [64], 8).total_steps or 0), open_model(config)
    actor = config.worker.actor
    parallel = Parallel()
    if dist.is_initialized():
        parallel = Parallel.join("cpu", shard_size=actor.fsdp.fsdp_size, sequence_size=actor.ulysses_size)
    learner = build_learner(config, HARDWARE, model, schedule, parallel)
    renderer = build_renderer(config, model)
    examples = [draw_example(i, i) if model.vision_language else text(i) for i in range(schedule.rollout_batch_size)]
    groups = [drawn(renderer.render(example), config.worker.rollout.n, seed) for seed, example in enumerate(examples)]
    update = build_update(config, updates_per_step=schedule.updates_per_step)
    samples = learner.add_logprobs(to_samples(groups), update.needs & OF_POLICY)
    samples = update.compute_advantages(learner.add_logprobs(samples, OF_REFERENCE), groups, config.algorithm.kl_coef)
    objective = replace(update.objective, kl_coef=config.algorithm.kl_coef)
    updates = minibatches(samples, schedule.global_batch_size, schedule.ppo_epochs)
    return [learner.forward_backward(some, objective) | learner.optim_step() for some in updates]


def text(number: int) -> Example:
    return Example(f"text:{number}", [{"role": "user", "content": f"What is {number} + 1?"}], (), "")


def drawn(prompt, answers: int, seed: int) -> Group:
    """A group of answers of 3 to 12 tokens that are right by chance."""
    draw = np.random.default_rng(seed)
    return Group(prompt, [response(draw.integers(1, 200, draw.integers(3, 13)), draw.random()) for _ in range(answers)])


def response(tokens: Sequence[int], reward: float) -> Response:
    logprobs = np.full(len(tokens), -5.0, np.float32)
    return Response(Completion(np.array(tokens, np.int32), logprobs, "stop", 0), "", Score(reward), reward)
