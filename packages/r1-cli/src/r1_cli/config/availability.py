"""Options that this version does not support, or that have no effect; fields declare the reasons."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from r1_cli.config import (
    actor,
    algorithm,
    curriculum,
    distillation,
    multi_turn,
    reward,
    rollout,
    root,
    sources,
    trainer,
)
from r1_cli.config.options import ESTIMATOR_OPTIONS, LOSS_OPTIONS, Option
from r1_cli.config.problems import ConfigError, KeyRemark, Problem, Provenance
from r1_cli.config.rollout import engine_module
from r1_cli.config.root import RunConfig
from r1_cli.config.schema import schema
from r1_cli.config.section import lookup

UNSUPPORTED = (*actor.UNSUPPORTED, *rollout.UNSUPPORTED)
REMARKS = (
    *root.REMARKS,
    *sources.REMARKS,
    *curriculum.REMARKS,
    *algorithm.REMARKS,
    *distillation.REMARKS,
    *actor.REMARKS,
    *rollout.REMARKS,
    *multi_turn.REMARKS,
    *reward.REMARKS,
    *trainer.REMARKS,
)
NO_EFFECT = {remark.key: remark.reason for remark in REMARKS if remark.applies is None}  # in any configuration


@dataclass(frozen=True, slots=True)
class Limit:
    key: str
    value: Any
    reason: str

    def __str__(self) -> str:
        return f"{self.key}={self.value}"


def unavailable(config: RunConfig, provenance: Provenance) -> list[Limit]:
    missing = engine_module(config.worker.rollout.engine).missing()
    absent = [Limit("worker.rollout.name", config.worker.rollout.name, missing)] if missing else []
    found = [remark for remark in UNSUPPORTED if not remark.only_if_set or provenance.is_set(remark.key)]
    return absent + [_limit(config, remark.key, remark.reason) for remark in found if _applies(remark, config)]


def require_available(config: RunConfig, provenance: Provenance) -> None:
    """Raise ConfigError with all options that are not supported."""
    problems = [
        Problem(
            limit.key,
            f"is not available in this version: {limit.reason}",
            str(limit.value),
            provenance.origins.get(limit.key, "default"),
        )
        for limit in unavailable(config, provenance)
    ]
    if problems:
        raise ConfigError(problems)


def without_effect(config: RunConfig, provenance: Provenance) -> list[Limit]:
    """Return the options that the user set and this run does not read."""
    default, reasons = RunConfig(), dict(_unread(config))
    changed = [key for key in schema().values if lookup(config, key) != lookup(default, key)]
    return [
        *(_limit(config, key, reason) for key in changed if (reason := _reason(key, reasons)) is not None),
        *(
            _limit(config, remark.key, remark.reason)
            for remark in REMARKS
            if remark.only_if_set and provenance.is_set(remark.key) and _applies(remark, config)
        ),
    ]


def _unread(config: RunConfig) -> Iterator[tuple[str, str]]:
    for remark in REMARKS:
        if not remark.only_if_set and _applies(remark, config):
            yield remark.key, remark.reason
    for name, reason in engine_module(config.worker.rollout.engine).IGNORES.items():
        yield f"worker.rollout.{name}", reason
    for options, chosen in (
        (ESTIMATOR_OPTIONS, config.algorithm.adv_estimator),
        (LOSS_OPTIONS, config.worker.actor.loss_type),
    ):
        for option in options:
            # Other estimators than its owners are given clipped rewards.
            if chosen not in option.owners and option.key != "algorithm.reward_clip_range":
                yield option.key, _only(option)


def _reason(key: str, reasons: dict[str, str]) -> str | None:
    while key and key not in reasons:
        key = key.rpartition(".")[0]
    return reasons.get(key)


def _applies(remark: KeyRemark, config: RunConfig) -> bool:
    return remark.applies is None or bool(remark.applies(lookup(config, remark.key), config))


def _limit(config: RunConfig, key: str, reason: str) -> Limit:
    return Limit(key, lookup(config, key), reason)


def _only(option: Option) -> str:
    return f"only {', '.join(option.owners)} {'uses' if len(option.owners) == 1 else 'use'} it"
