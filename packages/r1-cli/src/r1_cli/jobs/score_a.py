"""`r1 score-a`: write the training rows with base scores."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from r1_cli.build.prompts import build_prompts
from r1_cli.build.rendering import build_renderer, open_rendering
from r1_cli.build.rewards.base_scores import TERMS_COLUMN, BaseScoreFile, ScoreTerms, fill_bases, terms_of
from r1_cli.build.rewards.connect import (
    FUNCTION,
    base_model_name,
    build_query,
    iterate_prompts,
    open_reward_model,
    padded_batching,
)
from r1_cli.build.rewards.frozen_model import FrozenReading
from r1_cli.build.rewards.mixed import split_parts
from r1_cli.build.rows import open_sources
from r1_cli.config import ConfigError, Problem, RunConfig
from r1_cli.config.sources import training_sources
from r1_cli.hardware import Hardware, find_hardware
from r1_cli.jobs.rows import write_rows
from r1_cli.models.files import ModelFiles, load_weights, open_model
from r1_cli.runs.track.console import ConsoleReporter, configure_logging
from r1_rewards.reference.options import POLICY, REFERENCE, Options, read_options
from r1_rewards.reference.reference_probability import BASE_COLUMN
from r1_rewards.spec import MODEL_REWARDS
from r1_rollout.types import Reading

KINDS = (".parquet", ".jsonl")
AT_ONCE = 1000  # rows to a group of a parquet file


def write_scores(config: RunConfig, output: Path) -> None:
    """Write the training rows with the columns scoreA (null without a score) and scoreA_terms.

    Scores are collected in `OUTPUT.part`, so that an interrupted command continues.

    Raises:
        ConfigError: no reward uses base scores, there are several sources, `output` exists or has another suffix, or
            its part has other terms.
        DataError, ModelError: something cannot work.
    """
    options, sources = options_of(config), training_sources(config.data)
    if len(sources) != 1:
        message = f"names {len(sources)} sources; write the scores of one at a time"
        raise ConfigError([Problem(sources[0].key if sources else "data.train_files", message)])
    if output.suffix not in KINDS or output.exists():
        message = "is there already" if output.exists() else f"must end in {' or '.join(KINDS)}"
        raise ConfigError([Problem("--output", message, str(output))])
    console = Console()
    configure_logging(console)
    files, hardware = open_model(config), find_hardware()
    with ExitStack() as stack:
        reporter = stack.enter_context(ConsoleReporter(console, step_lines=False))
        rendering = stack.enter_context(open_rendering(config, build_renderer(config, files)))
        opened = open_sources(sources)
        prompts = build_prompts(config, opened, rendering, reporter.counter)
        terms = terms_of(options, base_model_name(config, options), config.worker.rollout.temperature)
        part = output.with_name(f"{output.name}.part")
        try:
            file = BaseScoreFile(part, terms)
        except ValueError as error:
            raise ConfigError([Problem("--output", f"{error}: take it away to begin anew", str(output))]) from error
        query = replace(
            build_query(config, files, open_reading(config, hardware, files, options)), temperature=terms.temperature
        )
        fill_bases(file, iterate_prompts(prompts.parts, reporter.progress), query, options)
    scores = file.rows()
    rows = ((row, scores.get(f"{sources[0].name}/{row_id}")) for row_id, row in opened[0].rows)
    write_rows(with_columns(rows, terms), output)
    part.unlink()
    found = [score for score in scores.values() if score is not None]
    told = f"mean {fmean(found):.4f}, from {min(found):.4f} to {max(found):.4f}" if found else "none has a score"
    console.print(f"{output}: {len(found)} of {len(opened[0].rows)} rows have a score, {told}", soft_wrap=True)


def options_of(config: RunConfig) -> Options:
    """Return the options of the reward, or its part, that subtracts base scores. Raises ConfigError without one."""
    reward = config.worker.reward
    if reward.reward_function in MODEL_REWARDS:
        return read_options(reward.reward_function_kwargs)
    if reward.reward_function == "combine":
        for part in split_parts(reward.reward_function_kwargs)[1].values():
            return read_options(part.options)
    message = f"asks no model; base scores are for {MODEL_REWARDS[0]}"
    raise ConfigError([Problem(FUNCTION, message, str(reward.reward_function))])


def open_reading(config: RunConfig, hardware: Hardware, files: ModelFiles, options: Options) -> Reading:
    if options.model not in (POLICY, REFERENCE):
        return open_reward_model(config, hardware, files, options)
    actor = config.worker.actor
    computing = hardware.computing_dtype(actor.kept_dtype, actor.fsdp.mp_param_dtype)
    return FrozenReading(
        load_weights(config, files, computing, hardware.device), padded_batching(config), hardware.device
    )


def with_columns(rows: Iterator[tuple[Mapping[str, Any], float | None]], terms: ScoreTerms) -> Iterator[dict[str, Any]]:
    for row, score in rows:
        yield {**row, BASE_COLUMN: score, TERMS_COLUMN: terms.to_json()}
