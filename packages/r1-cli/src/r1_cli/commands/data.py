"""`r1 data`: check or show the rows of a configuration."""

from pathlib import Path

import click

from r1_cli.commands.common import ANY_WORDS, Existing, share_processors, user_errors, writing


@click.group(short_help="Check the rows of a configuration, or show one.")
def data() -> None:
    """Check or show the rows of a configuration. Needs no GPU, and no model beyond its processor."""


@data.command(short_help="Check every row; exit code 1 if some cannot be used.", context_settings=ANY_WORDS)
@click.argument("settings", nargs=-1, type=click.UNPROCESSED, metavar="[CONFIG.yaml | ROWS] [KEY=VALUE]...")
@click.option(
    "--against", metavar="A,B", help="Suites, files of rows, or `val`: find training rows that repeat theirs."
)
@click.option("--data-root", type=Existing(folder=True), help="Folder with the rows of suites, instead of the hub.")
@click.option("--strict", is_flag=True, help="Rows that a run would leave out, or that overlap, are errors, too.")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write a page with thumbnails here, too.")
@click.option(
    "--rows", type=click.Path(dir_okay=False, path_type=Path), help="Write every bad row or pair here, one a line."
)
def check(
    settings: tuple[str, ...],
    against: str | None,
    data_root: Path | None,
    strict: bool,
    html: Path | None,
    rows: Path | None,
) -> None:
    """Check every training and validation row as a run would read it.

    Finds missing columns, empty answers, broken media, markers without media, prompts that are too long, duplicates
    within and between training and validation, and answers that the reward cannot read. For each it says what a run
    would do: refuse to start, or leave the rows out, which is a warning.

    If a key of sft is set, rows are those of r1 sft. The check then finds conversations without an answer, roles out of
    order, pairs that cannot be compared, and reasoning that the chat template drops; it counts answers and trained
    tokens, and shows what is trained.

    With --against, it only compares training rows with those of benchmarks, of files, or of validation (val): equal and
    nearly equal texts, the same problem with other numbers or names, and pictures that look the same. It prints the
    pairs, with both texts. It then needs no model, and takes a file of rows in place of a configuration.

    \b
      r1 data check config=run.yaml
      r1 data check run.yaml data.val_files=null --html report.html --rows bad.jsonl
      r1 data check train.parquet --against gsm8k,my_test.jsonl --rows pairs.jsonl
    """
    if against:
        _compare(settings, against.split(","), data_root, html, rows, strict=strict)
        return
    from r1_cli.config import ConfigError, load_config
    from r1_data.types import DataError
    from r1_rewards.types import RewardSpecError

    with user_errors(ConfigError, DataError, RewardSpecError):
        config, provenance = load_config(settings, command="data")

        share_processors()
        from rich.console import Console

        from r1_cli.models.load import ModelError
        from r1_cli.plan.data_check.run import run_check
        from r1_cli.runs.track.console import configure_logging

        console = Console()
        configure_logging(console)
        with user_errors(ModelError):
            of_sft = provenance.is_set("sft")
            report, page = run_check(
                config, console, conversations=of_sft, strict=strict, rows=rows, with_page=html is not None
            )
    if html:
        with writing(html):
            html.write_text(page, encoding="utf-8")
    if report.failed:
        raise SystemExit(1)


def _compare(
    settings: tuple[str, ...],
    against: list[str],
    data_root: Path | None,
    html: Path | None,
    rows: Path | None,
    *,
    strict: bool,
) -> None:
    from r1_cli.config import ConfigError, load_config
    from r1_data.types import DataError

    words = [
        word if "=" in word or word.endswith((".yaml", ".yml")) else f"data.train_files={word}" for word in settings
    ]
    with user_errors(ConfigError, DataError):
        config, provenance = load_config(words, command="overlap")
        share_processors()
        from rich.console import Console

        from r1_cli.plan.data_check.overlap import check_overlap, render_pairs, write_pairs

        tuned = provenance.is_set("sft")
        report = check_overlap(config, against, Console(), conversations=tuned, data_root=data_root)
    with writing(rows):
        if rows:
            write_pairs(report, rows)
    with writing(html):
        if html:
            html.write_text(render_pairs(report), encoding="utf-8")
    if strict and report.pairs:
        raise SystemExit(1)


@data.command(short_help="Show one row as the model will see it.", context_settings=ANY_WORDS)
@click.argument("settings", nargs=-1, type=click.UNPROCESSED, metavar="[CONFIG.yaml] [KEY=VALUE]...")
@click.option("--row", required=True, help="Its number, counted from 1 over all sources, or its id (train.parquet:12).")
@click.option("--val", "validation", is_flag=True, help="Among the validation rows.")
def show(settings: tuple[str, ...], row: str, validation: bool) -> None:
    """Show one row: columns, messages, media, rendered text, tokens.

    \b
      r1 data show config=run.yaml --row 12
      r1 data show run.yaml --row train.parquet:12
    """
    from r1_cli.config import ConfigError, load_config
    from r1_data.types import DataError

    with user_errors(ConfigError, DataError):
        config, provenance = load_config(settings, command="data")

        share_processors()
        from r1_cli.models.load import ModelError
        from r1_cli.plan.data_check.show import describe_row

        with user_errors(ModelError):
            tuned = provenance.is_set("sft")
            click.echo(describe_row(config, row, validation=validation, conversations=tuned))
