"""Sample answers to rows, score them, and write them to a folder: `r1 sample`, and `r1 eval` of validation rows."""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import pyarrow as pa
from rich.console import Console

from r1_cli.build.endpoint import EndpointEngine
from r1_cli.build.sampler import build_sampling
from r1_cli.checkpoint.folders import write_json
from r1_cli.checkpoint.locks import exclusive
from r1_cli.config import RunConfig, printable
from r1_cli.config.sources import Source, training_sources
from r1_cli.jobs.inference import Inference, open_inference
from r1_cli.models.files import find_file
from r1_cli.models.frozen_base import digest
from r1_cli.runs.history import CONFIG_FILE, LOG_FILE, JsonObject
from r1_cli.runs.manifest import record_start
from r1_cli.runs.reader import MEDIA
from r1_cli.runs.rows.parts import KEY, Block, RowShard, SampleFolder, digest_identity, key_of, split_blocks
from r1_cli.runs.track.files import JsonLines
from r1_cli.runs.track.timing import Stopwatch
from r1_cli.train.groups.group import Group
from r1_cli.train.metrics.step import length_metrics, reward_metrics, source_metrics
from r1_cli.train.recorder import MediaFolder, to_table
from r1_cli.train.sampling.generate import DrainRule, render_prompts, sample_groups
from r1_cli.train.types import Sampler
from r1_rewards.services.endpoint import HttpEndpoint
from r1_rewards.types import RewardFailure
from r1_rollout.errors import EngineError
from r1_rollout.types import SamplingParams

log = logging.getLogger("r1")

MOST_GROUPS, MOST_ANSWERS = 1_000, 2_048  # of a block: it is sampled in one call, and lost if the command is killed
PAID_ANSWERS = 256  # the same of an endpoint
MOST_UNSCORED = 0.05  # share of the answers, above which `r1 sample` ends
NAMED = 3  # rows in a message


@dataclass(frozen=True, slots=True)
class SampleOptions:
    output: Path
    shard: RowShard = RowShard()  # noqa: RUF009 (frozen)
    limit: int | None = None  # rows; None: all
    block: int | None = None  # rows; None: `block_size`
    endpoint: HttpEndpoint | None = None  # samples in place of a model of this machine
    served_name: str = ""  # of the endpoint's model
    most_unscored: float = MOST_UNSCORED
    adapter: Path | None = None  # a folder of an adapter that is merged into the model

    @property
    def replies(self) -> Path:
        """What an endpoint has answered of groups that are not in the folder yet."""
        return self.output / f"replies-{self.shard.number}-of-{self.shard.count}.jsonl"


@dataclass(slots=True)
class Counts:
    """Of one start of the command."""

    there: int = 0  # groups that were there before
    groups: int = 0  # sampled
    answers: int = 0
    unscored: int = 0  # answers
    unreadable: int = 0  # rows
    undone: int = 0  # groups that the endpoint did not answer
    changed: list[str] = field(default_factory=list)  # rows that are others than when they were sampled


def sample_rows(config: RunConfig, options: SampleOptions) -> Counts:
    """Sample the training rows of the shard whose answers are not in the folder yet.

    Raises:
        ConfigError: another process has the shard, or the folder's answers were sampled otherwise.
        DataError, ModelError: something cannot work.
        EngineError: a server has not answered all.
        RewardFailure: more than MOST_UNSCORED of the answers could not be scored.
    """
    sources, (params, _) = training_sources(config.data), build_sampling(config)
    console = Console()
    counts = sample_sources(keep_unscored(config), sources, [params] * len(sources), options, console)
    console.print(
        f"{options.output}: {counts.groups} groups sampled, {counts.there} were there ({options.shard} of the rows)",
        highlight=False, markup=False, soft_wrap=True,
    )  # fmt: skip
    if counts.undone:
        raise EngineError(f"{counts.undone} groups are not done: run the same command again")
    return counts


def sample_sources(
    config: RunConfig,
    sources: Sequence[Source],
    params: Sequence[SamplingParams],
    options: SampleOptions,
    console: Console,
    describe: Callable[[Inference], JsonObject] = lambda opened: {},
) -> Counts:
    """Sample the rows of `sources`, each with its parameters, whose answers are not in the folder yet.

    Args:
        describe: returns more of what the answers of a folder have in common. It is called before anything is sampled.
    """
    folder, counts = SampleFolder(options.output), Counts()
    size = options.block or block_size(max(one.n for one in params), of_endpoint=options.endpoint is not None)
    with ExitStack() as stack:
        stack.enter_context(folder.locked(options.shard))
        opened = open_inference(config, sources, console, stack)
        name = options.served_name or name_model(opened.context.model.path, options.adapter)
        identity = {"model": name, **describe_sampling(opened, params, size), **describe(opened)}
        with exclusive(folder.path):
            folder.require_same(identity)
            write_json(folder.path / CONFIG_FILE, printable(config))
            if opened.player is not None:
                folder.write_tools({one.name: opened.player.tool_prompt(one.name) for one in opened.data.sources})
        kept = [[part.job(index).row for index in range(len(part))] for part in opened.data.prompts.parts]
        blocks = [b for b in split_blocks(kept, size, options.limit) if options.shard.has(b.number)]
        missing = find_missing(folder, opened, blocks, digest_identity(identity), counts)
        with record_start(folder.path, printable(config), *_record_of(opened), 0) as start:
            start["shard"], start["counts"] = str(options.shard), asdict(counts)
            if missing:
                for number, (sampler, block, keys) in enumerate(_with_engine(opened, options, missing), start=1):
                    what = f"block {number} of {len(missing)}"
                    sample_block(folder, opened, sampler, params[block.source], block, keys, counts, what)
                    start["counts"] = asdict(counts)
                    require_scored(counts, options.most_unscored)
    if not counts.undone:
        options.replies.unlink(missing_ok=True)
    return counts


def _record_of(opened: Inference) -> tuple[dict[str, str], list[str]]:
    """Return a digest of each source's rows, and the names of the devices."""
    parts = zip(opened.data.sources, opened.data.prompts.parts, strict=True)
    hardware = opened.context.hardware
    return {one.name: part.digest for one, part in parts}, [hardware.kind, *hardware.gpus]


def _with_engine(
    opened: Inference, options: SampleOptions, missing: Sequence[tuple[Block, dict[int, str]]]
) -> Iterator[tuple[Sampler, Block, dict[int, str]]]:
    """Yield the blocks with a sampler whose engine has the weights."""
    if options.endpoint is None:
        sampler, weights = opened.open_sampler(options.adapter)
    else:
        sampler, weights = opened.open_endpoint(options.endpoint, options.served_name, options.replies), None
    with sampler.generator.active(weights):
        for block, keys in missing:
            yield sampler, block, keys


def block_size(n: int, *, of_endpoint: bool = False) -> int:
    """Return the rows of a block for n answers a row: the same for all shards."""
    answers = PAID_ANSWERS if of_endpoint else MOST_ANSWERS
    return max(16, min(MOST_GROUPS, answers // n))


def keep_unscored(config: RunConfig) -> RunConfig:
    """Return the configuration so that answers that cannot be scored are recorded as such."""
    worker = config.worker
    reward = worker.reward.model_copy(update={"failure_policy": "drop"})
    return config.model_copy(update={"worker": worker.model_copy(update={"reward": reward})})


# --- what the answers depend on ---------------------------------------------------------------------------------------


def describe_sampling(opened: Inference, params: Sequence[SamplingParams], size: int) -> JsonObject:
    """Return what all answers of a folder have in common, but the model."""
    reward, rollout = opened.context.config.worker.reward, opened.context.config.worker.rollout
    rewards = {
        one.name: digest_reward(*(one.reward if one.reward_function else (reward.reward_function, {})))
        for one in opened.data.sources
    }
    own = {one.name: asdict(each) for one, each in zip(opened.data.sources, params, strict=True)}
    same = all(each == params[0] for each in params)
    return {
        "sampling": json.loads(json.dumps(asdict(params[0]) if same else own)),
        "rendering of prompts": opened.renderer.fingerprint(),
        "reward": rewards,
        "options of the reward": digest_text(json.dumps(reward.reward_function_kwargs, sort_keys=True, default=str)),
        "multi_turn": rollout.multi_turn.model_dump(mode="json") if rollout.multi_turn.enable else None,
        "tools and environments": {one.name: list(one.actor) for one in opened.data.sources if one.has_actor},
        "rows of a block": size,
    }


def name_model(path: str, adapter: Path | None = None) -> str:
    """Return a digest of a folder's weights, or the name and commit of a model of the hub; with that of an adapter."""
    more = f"+{digest(adapter, adapters=True)}" if adapter else ""
    if Path(path).is_dir():
        return digest(Path(path), adapters=True) + more
    file = find_file(path, "config.json")
    return f"{path}@{file.parent.name if file else None}{more}"


def digest_reward(function: str | None, kwargs: Mapping[str, object]) -> str:
    """Return the name of a reward, with a digest of its options, and of its file if it is the user's."""
    file = Path((function or "").rpartition(":")[0])
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    return f"{function} {digest_text(json.dumps(kwargs, sort_keys=True, default=str) + text)}"


def digest_grader(config: RunConfig, source: Source) -> str:
    """Return `digest_reward` of a source's own reward, or of the run's."""
    reward = config.worker.reward
    own = source.reward if source.reward_function else (reward.reward_function, reward.reward_function_kwargs)
    return digest_reward(*own)


def digest_text(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "backslashreplace"), digest_size=8).hexdigest()


def find_missing(
    folder: SampleFolder, opened: Inference, blocks: Sequence[Block], identity: str, counts: Counts
) -> list[tuple[Block, dict[int, str]]]:
    """Return the blocks that lack groups, each with the keys of these by place. Logs rows that have changed."""
    missing = []
    for block in blocks:
        source = opened.data.opened[block.source]
        part, rows, reader = opened.data.prompts.parts[block.source], source.rows, source.reader
        there = folder.keys(block.number)
        lacking: dict[int, str] = {}
        for place, index in block.rows.items():
            row_id, row = rows[part.job(index).row]
            if there.get(place) == (key := key_of(reader(row_id, row), identity)):
                counts.there += 1
                continue
            lacking[place] = key
            if place in there:
                counts.changed.append(row_id)
        if lacking:
            missing.append((block, lacking))
    if counts.changed:
        more = len(counts.changed) - NAMED
        log.warning(
            "%d rows have changed since they were sampled, and are sampled again: %s%s; the old answers are in %s",
            len(counts.changed), ", ".join(counts.changed[:NAMED]), f" and {more} more" if more > 0 else "",
            folder.path / "aside",
        )  # fmt: skip
    return missing


# --- sampling ---------------------------------------------------------------------------------------------------------


def sample_block(
    folder: SampleFolder,
    opened: Inference,
    sampler: Sampler,
    params: SamplingParams,
    block: Block,
    keys: Mapping[int, str],
    counts: Counts,
    what: str,
) -> None:
    """Sample the groups of `keys`, by place, in one call of the engine, and write them."""
    dataset, places = opened.data.prompts.parts[block.source], {block.rows[place]: place for place in keys}
    rendered = list(render_prompts(dataset, list(places)))
    prompts = [prompt for _, prompt in rendered]
    # A server may leave groups unanswered.
    rule = DrainRule(0, lambda group: True) if isinstance(sampler.generator, EndpointEngine) else None
    found = sample_groups(sampler, prompts, params, Stopwatch(), opened.context.reporter.progress, what, rule)
    counts.undone += len(rendered) - len(found)
    groups = [found[number] for number in sorted(found)]
    counts.unreadable += len(places) - len(rendered)
    if not groups:
        return
    table = to_part(block.number, groups, [places[rendered[number][0]] for number in sorted(found)], keys, folder.path)
    folder.add(block.number, table)
    scores = [score for group in groups for score in group.scores]
    counts.groups += len(groups)
    counts.answers += len(scores)
    counts.unscored += sum(score.error is not None for score in scores)
    numbers = {**reward_metrics(groups), **source_metrics(groups, "reward/"), **length_metrics(groups)}
    JsonLines(folder.path / LOG_FILE).append([{"step": block.number, **numbers}])


def to_part(
    number: int, groups: Sequence[Group], places: Sequence[int], keys: Mapping[int, str], folder: Path
) -> pa.Table:
    """Return the rows of a block's file: the record's columns, and the key of each group."""
    table = to_table(number, "sample", groups, (), partial(MediaFolder.save, MediaFolder(folder / MEDIA)))
    of_rows = [places[group] for group in table["group"].to_pylist()]
    column = table.schema.get_field_index("group")
    table = table.set_column(column, table.schema.field(column), pa.array(of_rows, pa.int32()))
    return table.append_column(KEY, pa.array([keys[place] for place in of_rows], KEY.type))


def require_scored(counts: Counts, most: float) -> None:
    if counts.unscored > most * counts.answers:
        raise RewardFailure(
            f"{counts.unscored} of {counts.answers} answers could not be scored, more than {most:.0%}. They "
            "are recorded: correct the reward, and score them again with `r1 rows --rescore`"
        )
