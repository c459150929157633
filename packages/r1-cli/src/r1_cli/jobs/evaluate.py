"""`r1 eval`: evaluate a model on the validation rows, as a table and as JSON."""

import json
from contextlib import ExitStack
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from r1_cli.build.prompts import build_validation
from r1_cli.build.sampler import build_sampling
from r1_cli.config import ConfigError, Problem, RunConfig
from r1_cli.config.sources import validation_sources
from r1_cli.jobs.inference import open_inference
from r1_cli.plan.announce import show_table
from r1_cli.train.metrics.step import by_source, length_metrics, reward_metrics
from r1_cli.train.metrics.validate import Validation, mean_score, summarise


def evaluate_model(model: str, config: RunConfig, json_path: Path | None = None) -> dict[str, float]:
    """Sample `data.val_files` as validation does; print and return the metrics.

    Args:
        model: a Hugging Face folder, a hub name, or a checkpoint of r1.
        json_path: also write the metrics to this file.

    Raises:
        ConfigError, DataError, ModelError: something cannot work.
    """
    sources = validation_sources(config.data)
    if not sources:
        raise ConfigError([Problem("data.val_files", "names no rows to evaluate on; set it", "null")])
    console, (_, sampling) = Console(), build_sampling(config)
    with ExitStack() as stack:
        opened = open_inference(config, sources, console, stack)
        sampler, weights = opened.open_sampler()
        sets = build_validation(opened.data.prompts, sources, sampling)
        validation = Validation(
            sampler, sets, config.data.val_batch_size, shown=0, progress=opened.context.reporter.progress
        )
        with sampler.generator.active(weights):
            groups = validation.sample("evaluation")
    result = {
        **summarise(groups),
        "reward_score": mean_score(groups),
        **reward_metrics(groups, prefix="", suffix="_reward"),
        **length_metrics(groups),
    }
    for source, share in by_source(groups).items():
        result |= {f"{source}/{name}": value for name, value in summarise(share).items()}
    n = min(len(group.responses) for group in groups)
    console.print(f"{model}: {len(groups)} prompts × {n} responses", markup=False, highlight=False, soft_wrap=True)
    show_table(console, render(result))
    if json_path:
        json_path.write_text(json.dumps({"model": model, "prompts": len(groups), "n": n, **result}, indent=2) + "\n")
    return result


def render(result: dict[str, float]) -> Table:
    table = Table("", "", box=box.SIMPLE, show_header=False, pad_edge=False)
    for name, value in result.items():
        table.add_row("accuracy (of first responses)" if name == "accuracy" else name, f"{value:.4g}")
    return table
