"""Print the stages of a recorded step for one group: prompt, responses, scores, advantages, update."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from r1_cli.jobs.replay.compare import read_metrics
from r1_cli.jobs.replay.settings import NoReplayError
from r1_cli.runs.reader import RunReader

LONGEST = 2_000  # characters of a text that are shown
TOKENS = 12  # of an answer that are listed, from its beginning and from its end
OF_TOKENS = ("rollout_logprobs", "old_logprobs", "entropies", "ref_logprobs", "advantages")
OF_THE_UPDATE = ("actor/", "critic/vf", "critic/grad", "critic/lr")


def show_group(run: Path, step: int, group: int) -> Iterator[str]:
    """Yield the lines about a group.

    Raises:
        NoReplayError: the step has no such group; says how many it has.
    """
    rows = RunReader(run).samples(step)
    ours = [row for row in rows if row["group"] == group]
    if not ours:
        raise NoReplayError(f"step {step} has groups 0 to {rows[-1]['group']}, not {group}")
    yield from show_prompt(ours[0])
    for row in ours:
        yield from show_answer(row)
    yield from show_comparison(ours)
    yield from show_update(read_metrics(run, step), len({row["group"] for row in rows}))


def show_prompt(row: Mapping[str, Any]) -> Iterator[str]:
    yield f"1. prompt: {row['prompt_id']}, source {row['source']}, truth {_short(row['ground_truth'])!r}"
    yield _indented(_short(row["prompt"]))
    tokens = row["prompt_tokens"]
    yield f"   {len(tokens)} tokens: {_listed(tokens)}"
    if row["media"]:
        yield f"   {len(row['media'])} pictures or videos: {', '.join(f'media/{name}' for name in row['media'])}"


def show_answer(row: Mapping[str, Any]) -> Iterator[str]:
    yield ""
    yield (
        f"2. answer {row['sample']}: {len(row['tokens'])} tokens by weights of version {row['weight_version']}, "
        f"ended by {row['finish_reason']}"
    )
    yield _indented(_short(row["answer"]))
    none = [None] * len(row["tokens"])
    table = [*zip(row["tokens"], *(row[name] or none for name in OF_TOKENS), strict=True)]
    yield f"   {'token':>9} {'engine':>10} {'learner':>10} {'entropy':>10} {'reference':>10} {'advantage':>10}   nats"
    shown = table if len(table) <= 2 * TOKENS else [*table[:TOKENS], None, *table[-TOKENS:]]
    for line in shown:
        yield "           …" if line is None else f"   {line[0]:>9} " + " ".join(_number(value) for value in line[1:])
    parts = ", ".join(f"{name} {value:g}" for name, value in row["parts"].items())
    yield f"3. score {row['score']:g} ({parts or 'no parts'}), reward after shaping {row['reward']:g}"
    for name in ("extracted", "reason", "failure"):
        if row[name]:
            yield f"   {name}: {_short(row[name])}"


def show_comparison(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    rewards = [row["reward"] for row in rows]
    yield ""
    spread = pstdev(rewards)
    yield f"4. group: mean reward {fmean(rewards):.6g}, standard deviation {spread:.6g} over {len(rows)} answers"
    first = [row["advantages"][0] if row["advantages"] else None for row in rows]
    yield "   advantages, of each answer's first token: " + " ".join(_number(value).strip() for value in first)


def show_update(metrics: Mapping[str, Any], groups: int) -> Iterator[str]:
    yield ""
    yield f"5. update, of all {groups} groups of the step:"
    for name, value in metrics.items():
        if name.startswith(OF_THE_UPDATE) and isinstance(value, int | float):
            yield f"   {name:<34} {value:.9g}"


def _number(value: float | None) -> str:
    return f"{'–':>10}" if value is None else f"{value:>10.5f}"


def _listed(tokens: Sequence[int]) -> str:
    shown = [*map(str, tokens[:TOKENS])] + (["…", *map(str, tokens[-TOKENS:])] if len(tokens) > 2 * TOKENS else [])
    return " ".join(shown if len(tokens) > 2 * TOKENS else map(str, tokens))


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({len(text):,} characters)"


def _indented(text: str) -> str:
    return "\n".join(f"   | {line}" for line in text.splitlines() or [""])
