"""Print a dry run: settings that differ from the defaults, plan, sources, memory, warnings."""

import json
import textwrap
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from r1_cli.config import ConfigError, Problem, Provenance, RunConfig, printable
from r1_cli.config.files import is_url, where_or_near
from r1_cli.config.section import flatten
from r1_cli.hardware import find_card
from r1_cli.placement import plan_placement
from r1_cli.plan.announce import (
    announce,
    memory_warnings,
    render,
    render_placement,
    show_notes,
    show_phases,
    show_table,
)
from r1_cli.plan.batches import Plan
from r1_cli.plan.disk import size_text
from r1_cli.plan.phases import find_phases

PLAIN: Any = {"markup": False, "highlight": False, "soft_wrap": True}  # how text of users is printed
UNCHECKED = "not checked: the lengths of prompts (r1 data check), and whether the model is computed rightly (r1 check)"
WIDTH = 118  # characters of a line of settings
TEMPLATES = ("tokenizer_config.json", "chat_template.jinja", "chat_template.json", "processor_config.json")


def show_settings(console: Console, config: RunConfig) -> None:
    values, defaults = dict(flatten(printable(config))), dict(flatten(printable(RunConfig())))
    sections: dict[str, list[str]] = {}
    for key, value in values.items():
        if key in defaults and defaults[key] == value:
            continue
        parts = key.split(".")
        section = ".".join(parts[: 2 if parts[0] == "worker" else 1])
        shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        sections.setdefault(section, []).append(f"{key.removeprefix(section + '.')}={shown}")
    console.print(f"settings that differ from the defaults, of {len(values)} (--full shows all)", highlight=False)
    for section, words in sections.items():
        lines = textwrap.wrap(" ".join(words), WIDTH, break_long_words=False, break_on_hyphens=False)
        for number, line in enumerate(lines):
            head = f"  {section}: " if number == 0 else "    "
            console.print(head + line, **PLAIN)


def show_screen(console: Console, config: RunConfig, provenance: Provenance, plan: Plan, sources: Table) -> list[str]:
    """Print a dry run on one screen; return a warning if a phase exceeds this machine's GPU memory."""
    show_settings(console, config)
    placement = plan_placement(config)
    for table in (render(plan), *([render_placement(placement)] if placement.ranks else []), sources):
        _show_densely(console, table)
    warnings: list[str] = []
    if plan.memory is not None:
        card = find_card()
        phases = find_phases(config, plan.memory, card)
        sizes = ", ".join(f"{phase.name} {size_text(phase.total)}" for phase in phases)
        console.print(f"memory of a GPU, about: {sizes}", **PLAIN)
        warnings = memory_warnings(config, phases, card)
    show_notes(console, config, provenance, plan)
    return warnings


def show_all(console: Console, config: RunConfig, provenance: Provenance, plan: Plan, sources: Table) -> None:
    console.print(yaml.safe_dump(printable(config), sort_keys=False, allow_unicode=True), **PLAIN)
    announce(console, config, provenance, plan, plan_placement(config))
    show_phases(console, config, plan, find_card())
    show_table(console, sources)


def _show_densely(console: Console, table: Table) -> None:
    out = StringIO()
    show_table(Console(file=out, width=console.width), table)
    for line in out.getvalue().splitlines():
        if line.strip():
            console.print(line.rstrip(), **PLAIN)


def require_template(config: RunConfig) -> None:
    """Raise ConfigError if a local model has no chat template and none is set."""
    folder = Path(config.worker.actor.model.tokenizer_path or config.worker.actor.model.model_path or "")
    if config.data.override_chat_template or not folder.is_dir() or (folder / "chat_templates").is_dir():
        return
    if (folder / "adapter_config.json").is_file():  # its base has the template
        return
    if not any("chat_template" in _read(folder / name) or (name.endswith(".jinja") and (folder / name).is_file())
               for name in TEMPLATES):  # fmt: skip
        message = f"{folder} has no chat template ({', '.join(TEMPLATES)}): give one"
        raise ConfigError([Problem("data.override_chat_template", message)])


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def find_warnings(config: RunConfig) -> Iterator[str]:
    """Yield a warning if the model is neither a folder nor cached; a URL is downloaded at the start."""
    name = config.worker.actor.model.model_path or ""
    if not is_url(name) and not Path(name).is_dir() and not _is_cached(name):
        yield (
            f"worker.actor.model.model_path={name}: no such folder{where_or_near(name)}, and the hub's cache here does "
            "not have it: the run would ask the hub"
        )


def _is_cached(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError:
        return False
