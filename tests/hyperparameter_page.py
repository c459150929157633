"""The tables of docs/hyperparameters.md: what benchmarks/hyperparameters.py measured, and what recipes set."""

import contextlib
import io
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
PAGE = "docs/hyperparameters.md"
SMALL = ("quickstart", "look", "sums", "reasoning_gym", "rlpr/vision")  # tiny models, made for two cores
BLOCK = re.compile(r"(<!-- (?:measured: ([^\n]+?)|recipes) -->)(?:\n\n\|[^\n]*(?:\n\|[^\n]*)*)?")


def page() -> str:
    """The page as it should be: its text as it is, with the tables behind their marks."""
    measured = dict(tables())

    def table(match: re.Match[str]) -> str:
        return f"{match[1]}\n\n{measured[match[2]] if match[2] else recipes()}"

    return BLOCK.sub(table, (ROOT / PAGE).read_text(encoding="utf-8"))


def tables() -> Iterator[tuple[str, str]]:
    measured = runpy.run_path(str(ROOT / "benchmarks/hyperparameters.py"))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        measured["show"](measured["RESULTS"])
    for block in printed.getvalue().strip().split("\n\n"):
        yield block[2:].partition(" | ")[0], block.strip()


def recipes() -> str:
    """A row for each configuration of examples/ that trains a published model."""
    lines = ["| recipe | model | learning rate | prompts × answers | optimizer steps | KL | temperature | tokens |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for path in sorted((ROOT / "examples").glob("*/*.yaml")):
        name = path.relative_to(ROOT / "examples").with_suffix("").as_posix().removesuffix("/config")
        read = yaml.safe_load(path.read_text(encoding="utf-8"))
        if name not in SMALL and "optim" in read.get("worker", {}).get("actor", {}):
            lines.append(f"| [{name}](../examples/{path.parent.name}/README.md) | {' | '.join(values(read))} |")
    return "\n".join(lines)


def values(read: dict) -> Iterator[str]:
    """Model, learning rate, batch, optimizer steps, KL, temperature and tokens of an answer in a configuration."""
    data, algorithm, actor, rollout = (
        read["data"],
        read["algorithm"],
        read["worker"]["actor"],
        read["worker"]["rollout"],
    )
    yield actor["model"]["model_path"].rpartition("/")[2]
    yield f"{float(actor['optim']['lr']):g}".replace("e-0", "e-") + (", LoRA" if "lora" in actor["model"] else "")
    yield f"{data['rollout_batch_size']} × {rollout['n']}"
    yield str(data["rollout_batch_size"] // actor["global_batch_size"])
    yield "none" if algorithm.get("disable_kl") else f"{float(algorithm.get('kl_coef', 0)):g}"
    yield f"{float(rollout.get('temperature', 1)):g}"
    yield f"{data['max_response_length']:,}"
