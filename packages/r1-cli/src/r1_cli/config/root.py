"""The whole configuration of a run, `RunConfig`, and plain views of it."""

import re
from typing import Any

from r1_cli.config.algorithm import AlgorithmConfig
from r1_cli.config.data import DataConfig
from r1_cli.config.section import Section
from r1_cli.config.trainer import TrainerConfig
from r1_cli.config.worker import WorkerConfig

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


def printable(config: RunConfig) -> dict[str, Any]:
    """Return the configuration as plain values to print and log, with secrets among the open mappings masked."""
    values = config.model_dump(mode="json")
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
