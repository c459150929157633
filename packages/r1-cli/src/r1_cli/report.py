"""`r1 eval`: a model's answers to the validation rows, as a table and as JSON."""

import json
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

from r1_cli import assemble
from r1_cli.config import ConfigError, Problem, RunConfig
from r1_cli.console import ConsoleReporter, configure_logging
from r1_cli.evaluate import answer, summarise
from r1_cli.metrics import length_metrics, reward_metrics


def evaluate_model(model: str, config: RunConfig, json_path: Path | None = None) -> dict[str, float]:
    """Sample `data.val_files` as validation does, print what comes of it, and return it.

    Args:
        model: a Hugging Face folder, a hub name, or a checkpoint of r1.
        json_path: also write the numbers there.

    Raises:
        ConfigError, DataError, ModelError: something cannot work.
    """
    if not config.data.val_files:
        raise ConfigError([Problem("data.val_files", "names no rows to evaluate on; set it", "null")])
    console = Console()
    configure_logging(console)
    checkpoint = Path(model) / "actor"
    files = assemble.open_model(config, str(checkpoint) if checkpoint.is_dir() else model)
    _, sampling = assemble.build_sampling(config)
    with ExitStack() as stack:
        reporter = stack.enter_context(ConsoleReporter(console, step_lines=False))
        dataset = assemble.build_dataset(config, "val_files", files, reporter.counter("checking val_files"))
        weights = assemble.load_engine_weights(config, files)
        verifier = stack.enter_context(assemble.build_verifier(config))
        scorer = assemble.build_scorer(config, files, weights, verifier)
        with scorer.generator.awake(weights.state_dict().items(), 0):
            groups = list(
                answer(scorer, dataset, sampling, config.data.val_batch_size, reporter.progress, "evaluation")
            )
    result = {
        **summarise(groups),
        "reward_score": fmean(score.value for group in groups for score in group.scores),
        **reward_metrics(groups, prefix="", suffix="_reward"),
        **length_metrics(groups, sampling.max_tokens),
    }
    console.print(render(model, len(groups), sampling.n, result))
    if json_path:
        json_path.write_text(
            json.dumps({"model": model, "prompts": len(groups), "n": sampling.n, **result}, indent=2) + "\n"
        )
    return result


def render(model: str, prompts: int, n: int, result: dict[str, float]) -> Table:
    """Return the numbers as a table."""
    table = Table("", "", title=f"{model}: {prompts} prompts × {n} answers", title_justify="left", show_header=False)
    for name, value in result.items():
        table.add_row(name, f"{value:.4g}")
    return table
