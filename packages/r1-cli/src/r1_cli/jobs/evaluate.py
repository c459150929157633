"""`r1 eval`: evaluate a model on the validation rows, as a table and as JSON."""

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from r1_cli.build.prompts import build_prompts, build_validation
from r1_cli.build.rendering import build_renderer, open_rendering
from r1_cli.build.rewards.connect import connect_models, in_evaluation
from r1_cli.build.rewards.dispatch import open_verifier, require_columns
from r1_cli.build.rows import open_sources
from r1_cli.build.sampler import build_engine, build_sampler, build_sampling, load_engine_weights, open_player
from r1_cli.config import ConfigError, Problem, RunConfig
from r1_cli.config.model import LoraConfig
from r1_cli.config.sources import validation_sources
from r1_cli.hardware import find_hardware
from r1_cli.models.files import open_model
from r1_cli.plan.announce import show_table
from r1_cli.runs.track.console import ConsoleReporter, configure_logging
from r1_cli.train.metrics.step import by_source, length_metrics, reward_metrics
from r1_cli.train.metrics.validate import Validation, mean_score, summarise
from r1_rollout.weights import LocalWeights


def evaluate_model(model: str, config: RunConfig, json_path: Path | None = None) -> dict[str, float]:
    """Sample `data.val_files` as validation does; print and return the metrics.

    Args:
        model: a Hugging Face folder, a hub name, or a checkpoint of r1.
        json_path: also write the metrics to this file.

    Raises:
        ConfigError, DataError, ModelError: something cannot work.
    """
    config = with_all_weights(config)
    sources = validation_sources(config.data)
    if not sources:
        raise ConfigError([Problem("data.val_files", "names no rows to evaluate on; set it", "null")])
    console = Console()
    configure_logging(console)
    checkpoint = Path(model) / "actor"
    files = open_model(config, str(checkpoint) if checkpoint.is_dir() else model)
    hardware, (_, sampling) = find_hardware(), build_sampling(config)
    with ExitStack() as stack:
        reporter = stack.enter_context(ConsoleReporter(console, step_lines=False))
        renderer = build_renderer(config, files)
        player = open_player(config, files, renderer, stack)
        rendering = stack.enter_context(open_rendering(config, renderer))
        rendering = replace(rendering, prepare=player.prepare if player else None)
        prompts = build_prompts(config, open_sources(sources), rendering, reporter.counter)
        weights = load_engine_weights(config, hardware, files)
        verifier = open_verifier(config, sources, stack)
        require_columns(verifier, sources, prompts.parts)
        engine = build_engine(config, hardware, files, lambda: weights, stack)
        connect_models(config, files, verifier.asking, in_evaluation(config, hardware, files, engine))
        sampler = build_sampler(config, files, verifier, engine, player)
        sets = build_validation(prompts, sources, sampling)
        validation = Validation(sampler, sets, config.data.val_batch_size, shown=0, progress=reporter.progress)
        with sampler.generator.active(LocalWeights(weights.state_dict, 0)):
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


def with_all_weights(config: RunConfig) -> RunConfig:
    actor = config.worker.actor
    model = actor.model.model_copy(update={"lora": LoraConfig()})
    worker = config.worker.model_copy(update={"actor": actor.model_copy(update={"model": model})})
    return config.model_copy(update={"worker": worker})


def render(result: dict[str, float]) -> Table:
    table = Table("", "", box=box.SIMPLE, show_header=False, pad_edge=False)
    for name, value in result.items():
        table.add_row("accuracy (of first responses)" if name == "accuracy" else name, f"{value:.4g}")
    return table
