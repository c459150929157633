"""Build the prompts of a run: check and mix all sources, and order them."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil

from r1_cli.build.rendering import GIGABYTE, Rendering
from r1_cli.build.rows import OpenSource
from r1_cli.config import RunConfig
from r1_cli.config.sources import Source
from r1_cli.train.metrics.validate import ValidationSet
from r1_cli.train.types import PromptStream
from r1_data.curriculum import PassRates, read_pass_rates
from r1_data.dataset import Mixture, PromptDataset
from r1_data.prefetch import PromptMemory
from r1_data.stream import Stream, WeightedStream
from r1_data.types import DataError
from r1_rollout.types import SamplingParams

log = logging.getLogger("r1")

Counter = Callable[[str], Callable[[int, int], None]]  # what is counted -> (done, in all)


def build_prompts(config: RunConfig, opened: Sequence[OpenSource], rendering: Rendering, counter: Counter) -> Mixture:
    """Check every row, and log how many are left out and why. All sources share one memory limit.

    Raises:
        DataError: names the source, and the rows that cannot be used.
    """
    data, parts = config.data, []
    memory = PromptMemory(int(data.media_memory_gb * GIGABYTE))
    for one in opened:
        try:
            dataset = PromptDataset(
                one.rows,
                rendering.renderer,
                workers=rendering.workers,
                remote=rendering.remote,
                memory=memory,
                max_prompt_length=data.max_prompt_length,
                filter_overlong=data.filter_overlong_prompts,
                bad_rows=data.bad_rows,
                known_lengths=data.cache_dir,
                reader=replace(one.reader, prepare=rendering.prepare),
                progress=counter(f"checking {one.source.name}"),
            )
        except DataError as error:
            raise DataError(f"{one.source.label}: {error}") from error
        label, summary = one.source.label, dataset.summary
        if summary.overlong:
            message = "%s: %d of %d rows are left out, their prompts are over data.max_prompt_length=%d tokens"
            log.warning(message, label, summary.overlong, summary.read, data.max_prompt_length)
        if summary.bad:
            message = "%s: %d of %d rows are left out, they cannot be used (data.bad_rows=%s): %s"
            log.warning(message, label, len(summary.bad), summary.read, data.bad_rows, "; ".join(summary.bad[:3]))
        if summary.remarks:
            message = "%s: %d rows are taken as they are, odd as they look: %s"
            log.warning(message, label, len(summary.remarks), "; ".join(summary.remarks[:3]))
        parts.append(dataset)
    return Mixture(parts)


def build_stream(
    config: RunConfig,
    rows: Mixture,
    sources: Sequence[Source],
    rates: PassRates | None,
    batch: int,
    *,
    drop_last: bool = True,
) -> Stream | WeightedStream:
    """Return the order of rows; epochs of sources with weights are not exact, even without `drop_last`."""
    data, weights = config.data, [source.weight for source in sources if source.weight]
    if not weights:
        levels = rates.band.levels(rates.of_rows) if rates else None
        return Stream(len(rows), batch, seed=data.seed, shuffle=data.shuffle, drop_last=drop_last, levels=levels)
    return WeightedStream(
        [len(part) for part in rows.parts],
        weights,
        batch,
        seed=data.seed,
        shuffle=data.shuffle,
        until=data.stopping_strategy,
        levels=rates.levels if rates else None,
    )


def build_training_stream(
    config: RunConfig, prompts: Mixture, sources: Sequence[Source], rates: PassRates | None
) -> PromptStream:
    data, curriculum = config.data, config.data.curriculum
    batch = data.mini_rollout_batch_size or data.rollout_batch_size
    if curriculum.by != "online":
        return build_stream(config, prompts, sources, rates, batch)
    from r1_data.curriculum import OnlineStream

    explored = min(ceil(curriculum.explore * batch), batch - 1)
    nearest = build_stream(config, prompts, sources, None, batch - explored)
    explorer = build_stream(config, prompts, sources, None, explored, drop_last=False) if explored else None
    return OnlineStream(nearest, explorer, target=curriculum.target, prior=curriculum.prior, seed=data.seed)


def prefetch_first_prompts(config: RunConfig, prompts: Mixture, first: Sequence[int], val_prompts: Mixture) -> None:
    """Render the first rows of validation and training in the background."""
    trainer, size = config.trainer, config.data.val_batch_size
    if val_prompts.parts and (trainer.val_before_train or trainer.val_only):
        part = val_prompts.parts[0]
        part.prefetch(range(len(part) if size < 1 else min(size, len(part))))
    if not trainer.val_only:
        prompts.prefetch(first)


def build_validation(prompts: Mixture, sources: Sequence[Source], sampling: SamplingParams) -> list[ValidationSet]:
    return [
        ValidationSet(part, sampling_of(source, sampling)) for part, source in zip(prompts.parts, sources, strict=True)
    ]


def sampling_of(source: Source, sampling: SamplingParams) -> SamplingParams:
    """Return how a source of validation is sampled: as all, but for what it sets itself."""
    return replace(sampling, n=source.n or sampling.n, **source.sampling)


def read_rates(config: RunConfig, opened: Sequence[OpenSource], rows: Mixture) -> PassRates | None:
    """Return the pass rates of the kept rows; None unless the configuration has a band of them.

    Raises DataError naming source and row, if one has no pass rate or a source has no row in the band.
    """
    band = config.data.curriculum.read
    if band is None:
        return None
    found = list[list[float]]()
    for one, part in zip(opened, rows.parts, strict=True):
        try:
            found.append(read_pass_rates((one.rows[part.job(index).row] for index in range(len(part))), band))
        except DataError as error:
            raise DataError(f"{one.source.label}: data.curriculum: {error}") from error
    return PassRates(found, band)
