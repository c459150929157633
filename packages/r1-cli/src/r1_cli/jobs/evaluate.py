"""`r1 eval`: sample and grade the validation rows, store the answers, and print figures with intervals."""

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from r1_cli.build.prompts import sampling_of
from r1_cli.build.sampler import build_sampling
from r1_cli.config import ConfigError, Problem, RunConfig
from r1_cli.config.sources import Source, validation_sources
from r1_cli.jobs.inference import Inference
from r1_cli.jobs.sample import SampleOptions, digest_grader, digest_text, sample_sources
from r1_cli.plan.announce import show_table
from r1_cli.runs.evaluation.stored import (
    Budget,
    Evaluation,
    by_budget,
    figures,
    read_evaluation,
    require_complete,
)
from r1_cli.runs.history import JsonObject
from r1_cli.runs.reader import RunReader
from r1_cli.runs.rows.choose import SampledGroup
from r1_cli.runs.rows.parts import SETS, RowGroups, SampleFolder, digest_rows
from r1_cli.runs.statistics import Difficulty, Interval, mean_interval, smallest_difference
from r1_cli.train.metrics.step import mean_of, spread
from r1_rewards.services.endpoint import HttpEndpoint
from r1_rollout.errors import EngineError
from r1_rollout.types import SamplingParams

MOST_GROUPS = 40  # values of a column on the terminal
NO_VALUE = "(none)"  # of a row without the column
EVEN = 0.5  # mean pass rate that is assumed before there are answers: the smallest difference is the largest there


@dataclass(frozen=True, slots=True)
class EvalOptions:
    json_path: Path | None = None  # also writes the figures to this file
    output: Path | None = None  # folder of the answers; None: they are not kept
    partial: bool = False  # print figures and their bounds, however many answers are missing
    endpoint: HttpEndpoint | None = None  # answers in place of a model of this machine
    served_name: str = ""  # of the endpoint's model
    published: Sequence[str] = ()  # lines about published figures of the same rows and prompts
    apart: bool = False  # the sets are benchmarks: print no figure over all of them
    adapter: Path | None = None  # a folder of an adapter that is merged into the model


def evaluate_model(model: str, config: RunConfig, options: EvalOptions = EvalOptions()) -> dict[str, float]:  # noqa: B008 (frozen)
    """Sample `data.val_files` as validation does; print and return the figures.

    Args:
        model: a Hugging Face folder, a hub name, a checkpoint of r1 or the address of a server, as it is printed.

    Raises:
        ConfigError, DataError, ModelError: something cannot work.
        EngineError: a server answers nothing.
        EvaluationError: too many answers are missing.
    """
    console = Console()
    with ExitStack() as stack:
        output = options.output or Path(stack.enter_context(TemporaryDirectory(prefix="r1-eval-")))
        return report(model, sample_evaluation(config, output, options, console), options, console)


def sample_evaluation(
    config: RunConfig, output: Path, options: EvalOptions, console: Console, *, describe: bool = True
) -> Evaluation:
    """Sample the answers that the folder `output` lacks, and return all. Raises as `evaluate_model`.

    Args:
        describe: print the smallest difference that each set can show.
    """
    sources = validation_sources(config.data)
    if not sources:
        raise ConfigError([Problem("data.val_files", "names no rows to evaluate on; set it", "null")])
    _, sampling = build_sampling(config)
    params = [sampling_of(source, sampling) for source in sources]
    asked = SampleOptions(
        output, endpoint=options.endpoint, served_name=options.served_name, most_unscored=1.0, adapter=options.adapter
    )

    def describe_opened(opened: Inference) -> JsonObject:
        sets = describe_sets(config, params, opened)
        SampleFolder(output).write_groups(find_groups(opened))
        if describe:
            print_smallest(sets, output, console)
        return {SETS: sets}

    try:
        sample_sources(config, sources, params, asked, console, describe_opened)
    except EngineError as error:
        if not options.partial or not SampleFolder(output).has_identity:
            raise
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
    return read_evaluation(output)


def describe_sets(config: RunConfig, params: Sequence[SamplingParams], opened: Inference) -> dict[str, JsonObject]:
    """Return of each set what is compared of two evaluations."""
    sets: dict[str, JsonObject] = {}
    for one, part, each in zip(opened.data.opened, opened.data.prompts.parts, params, strict=True):
        source = one.source
        kept = (one.rows[part.job(index).row] for index in range(len(part)))
        sets[source.name] = {
            "rows": len(part),
            "digest": digest_rows(kept, replace(one.reader, format_prompt=None, system_prompt=None)),
            "prompt": digest_prompt(source),
            "grader": digest_grader(config, source),
            "n": each.n,
        }
    return sets


def find_groups(opened: Inference) -> dict[str, RowGroups]:
    """Return the rows of each value of the columns that a source's figures are split by, by source."""
    found: dict[str, RowGroups] = {}
    for one, part in zip(opened.data.opened, opened.data.prompts.parts, strict=True):
        numbers = [part.job(index).row for index in range(len(part))]
        of_source: RowGroups = {column: {} for column in one.source.groups}
        for column, values in of_source.items():
            for number in numbers:
                values.setdefault(str(one.rows[number][1].get(column, NO_VALUE)), []).append(number)
        found |= {one.source.name: of_source} if of_source else {}
    return found


def print_smallest(sets: Mapping[str, JsonObject], output: Path, console: Console) -> None:
    """Print the smallest difference that each set can show."""
    difficulties = known_difficulties(output, sets)
    for name, about in sets.items():
        rows, n, known = about["rows"], about["n"], difficulties.get(name)
        smallest = smallest_difference(known or Difficulty.prior(EVEN), rows, n)
        after = "by the answers that are there" if known else "if half of the answers are right"
        told = f"a paired comparison finds a true difference of {smallest:.3f} with 80 % power, {after}"
        told = told if smallest <= 1 else "too few rows for a comparison"
        console.print(f"{name}: {rows} rows × {n} answers; {told}", markup=False, highlight=False, soft_wrap=True)


def known_difficulties(output: Path, sets: Mapping[str, JsonObject]) -> dict[str, Difficulty]:
    """Return the difficulty of sets that have answers in the folder."""
    if not SampleFolder(output).has_identity or SampleFolder(output).identity().get(SETS) != sets:
        return {}
    found = read_evaluation(output).sets
    marks = {name: [*one.marks().values()] for name, one in found.items()}
    return {name: Difficulty.of_rows(rates, sets[name]["n"]) for name, rates in marks.items() if len(rates) > 1}


def digest_prompt(source: Source) -> str:
    """Return the name of a source's format prompt, and a digest of it and of the system prompt."""
    path = source.format_prompt
    text = Path(path).read_text(encoding="utf-8") if path else ""
    return f"{Path(path).stem if path else 'as in the rows'} {digest_text(f'{text}/{source.system_prompt or str()}')}"


# --- figures ----------------------------------------------------------------------------------------------------------


def report(model: str, evaluation: Evaluation, options: EvalOptions, console: Console) -> dict[str, float]:
    """Print the figures of stored answers, write them as JSON, and return them. Raises EvaluationError."""
    bounds = require_complete(evaluation, partial=options.partial)
    groups = [group for one in evaluation.sets.values() for _, group in sorted(one.groups.items())]
    values = figures(groups)
    result = {name: fmean(rows) for name, rows in values.items()} | reward_parts(evaluation, groups) | lengths(groups)
    for name, share in shares(evaluation, groups).items():
        values |= {f"{name}/{key}": rows for key, rows in figures(share).items() if key != "reward_score"}
    result |= {name: fmean(rows) for name, rows in values.items() if name not in result}
    intervals = {name: mean_interval(rows) for name, rows in values.items()}
    n = min(len(group.answers) for group in groups)
    told = f"{model}: {len(groups)} prompts × {n} responses ({', '.join(evaluation.sets)})"
    console.print(told, markup=False, highlight=False, soft_wrap=True)
    shown = result if not options.apart else {k: v for k, v in result.items() if k.startswith((*evaluation.sets,))}
    show_table(console, render(shown, intervals))
    for name, one in evaluation.sets.items():
        for column, rates in one.by_group().items():
            show_table(console, render_groups(f"{name} by {column}", rates))
    budgets = {name: by_budget(one.whole) for name, one in evaluation.sets.items()}
    for line in [*describe_budgets(budgets if options.output else {}), *bounds, *options.published]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if options.json_path:
        about: JsonObject = {"model": model, "prompts": len(groups), "n": n, **result}
        about["intervals"] = {name: [one.low, one.high] for name, one in intervals.items()}
        about["sets"] = {
            name: {
                **one.about,
                "missing": one.missing,
                "budgets": [budget.to_json() for budget in budgets[name]],
                "groups": {
                    column: {value: [mean.rows, mean.value, mean.low, mean.high] for value, mean in values.items()}
                    for column, values in one.by_group().items()
                },
            }
            for name, one in evaluation.sets.items()
        }
        options.json_path.write_text(json.dumps(about, indent=2) + "\n")
    return result


def shares(evaluation: Evaluation, groups: Sequence[SampledGroup]) -> dict[str, list[SampledGroup]]:
    """Return the groups of each set and of each data source that rows name, if there are several."""
    found: dict[str, list[SampledGroup]] = defaultdict(list)
    for group in groups:
        found[group.source].append(group)
    sets = {name: [*one.groups.values()] for name, one in evaluation.sets.items() if one.groups}
    return (sets if len(sets) > 1 else {}) | (found if len(found) > 1 else {})


def reward_parts(evaluation: Evaluation, groups: Sequence[SampledGroup]) -> dict[str, float]:
    """Return the mean of each part of the score, and the counts of failures, under the names of validation."""
    found = mean_of([mean_of([answer.parts for answer in group.answers]) for group in groups], "", "_reward")
    failures = Counter(answer.cause for group in groups for answer in group.answers if answer.cause)
    found |= {f"failures/{cause}": float(count) for cause, count in failures.items()}
    unusable = sum(record.get("reward/unusable_truths") or 0 for record in RunReader(evaluation.path).records())
    return found | {"failures": float(failures.total()), "unusable_truths": float(unusable)}


def lengths(groups: Sequence[SampledGroup]) -> dict[str, float]:
    answers = [answer for group in groups for answer in group.answers]
    return {
        **spread("response_length", [answer.tokens for answer in answers]),
        "response_length/clip_ratio": fmean(answer.cut for answer in answers),
        **spread("prompt_length", [group.prompt_tokens for group in groups]),
    }


def render(result: Mapping[str, float], intervals: Mapping[str, Interval]) -> Table:
    table = Table("", "", "", box=box.SIMPLE, show_header=False, pad_edge=False)
    for name, value in result.items():
        shown = f"{one.low:.4g} to {one.high:.4g}" if (one := intervals.get(name)) else ""
        table.add_row("accuracy (of first responses)" if name == "accuracy" else name, f"{value:.4g}", shown)
    return table


def render_groups(title: str, values: Mapping[str, Interval]) -> Table:
    """Return a table of the share of right answers of each group of rows."""
    table = Table(escape(title), "rows", "right", "", box=box.SIMPLE_HEAD, pad_edge=False)
    for value, mean in [*values.items()][:MOST_GROUPS]:
        table.add_row(escape(value), f"{mean.rows:,}", f"{mean.value:.4g}", f"{mean.low:.4g} to {mean.high:.4g}")
    if len(values) > MOST_GROUPS:
        table.add_row(f"… and {len(values) - MOST_GROUPS:,} more: --json FILE has all", "", "", "")
    return table


def describe_budgets(budgets: Mapping[str, Sequence[Budget]]) -> list[str]:
    return [
        f"{name}, at most {one.tokens:,} tokens: {one.right}; {one.cut:.1%} of the answers cut"
        for name, of_set in budgets.items()
        for one in of_set[:-1]  # the last has all answers
    ]
