"""`r1 convert` in an empty folder, and a dry run of what it prints."""

from pathlib import Path
from typing import Any

from click.testing import CliRunner

from r1_cli.config import load_config, require_available
from r1_cli.main import main
from r1_cli.plan.batches import count


def run(*words: str, code: int = 0) -> tuple[str, str]:
    result = CliRunner().invoke(main, list(words))
    assert result.exit_code == code, (result.output, result.exception)
    return result.stdout, result.stderr


def dry_run(text: str) -> Any:
    """What a dry run takes a printed configuration for; it must refuse nothing."""
    Path("converted.yaml").write_text(text)
    config, provenance = load_config(["converted.yaml"])
    require_available(config, provenance)
    assert count(config)[0] is None  # rows of the hub
    return config
