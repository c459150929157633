"""The whole configuration of a run, `RunConfig`, and plain views of it."""

import re
from collections.abc import Iterator
from functools import reduce
from operator import getitem
from typing import Any

from r1_cli.config.algorithm import AlgorithmConfig
from r1_cli.config.data import DataConfig
from r1_cli.config.options import ESTIMATOR_OPTIONS, LOSS_OPTIONS, own_defaults
from r1_cli.config.section import Section
from r1_cli.config.trainer import TrainerConfig
from r1_cli.config.worker import WorkerConfig
from r1_core import catalogue

SECRET = re.compile(r"(api_?key|secret|password|passwd|credential|(^|_)token)$", re.IGNORECASE)


class RunConfig(Section):
    """One run. Defaults are those of EasyR1's example, which is what people copy."""

    data: DataConfig = DataConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    worker: WorkerConfig = WorkerConfig()
    trainer: TrainerConfig = TrainerConfig()


def lookup(config: RunConfig, key: str) -> Any:
    """Return the value of a dotted key, e.g. `worker.rollout.n`."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def own_values(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """Yield the key and the value of what is left to the chosen estimator and loss, as each has it of its own."""
    algorithm, actor = config.algorithm, config.worker.actor
    yield from own_defaults(algorithm, ESTIMATOR_OPTIONS, algorithm.adv_estimator)
    yield from own_defaults(actor, LOSS_OPTIONS, actor.loss_type)
    if actor.loss_avg_mode is None and actor.loss_type in catalogue.losses():
        yield "worker.actor.loss_avg_mode", catalogue.losses()[actor.loss_type].aggregation


def printable(config: RunConfig) -> dict[str, Any]:
    """Return the configuration as plain values to print and log: as a run uses it, with secrets masked."""
    values = config.model_dump(mode="json")
    for key, value in own_values(config):
        section, _, name = key.rpartition(".")
        reduce(getitem, section.split("."), values)[name] = value
    reward, model = values["worker"]["reward"], values["worker"]["actor"]["model"]
    reward["reward_function_kwargs"] = _masked(reward["reward_function_kwargs"])
    model["override_config"] = _masked(model["override_config"])
    for source in [*(values["data"]["sources"] or []), *(values["data"]["val_sources"] or [])]:
        source["reward_function_kwargs"] = _masked(source["reward_function_kwargs"])
    return values


def _masked(options: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _masked(value) if isinstance(value, dict) else "***" if SECRET.search(name) and value else value
        for name, value in options.items()
    }
