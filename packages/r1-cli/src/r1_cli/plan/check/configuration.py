"""Check the configuration, the disk and the memory."""

from collections.abc import Iterator

from r1_cli.config import ConfigError, unavailable, without_effect
from r1_cli.hardware import find_card, free_memory
from r1_cli.plan.announce import find_oddities
from r1_cli.plan.batches import count, make_plan
from r1_cli.plan.check.findings import Finding, Subject
from r1_cli.plan.disk import require_disk_space, size_text
from r1_cli.plan.phases import find_peak, find_remedies


def problems(error: ConfigError) -> list[Finding]:
    return [Finding(f"config.{problem.key}", "error", str(problem)) for problem in error.problems]


def check_settings(subject: Subject) -> Iterator[Finding]:
    config, provenance = subject.config, subject.provenance
    for limit in unavailable(config, provenance):
        yield Finding(f"config.{limit.key}", "error", f"{limit.key}={limit.value} is not available: {limit.reason}")
    for limit in () if subject.tunes else without_effect(config, provenance):
        yield Finding(f"config.{limit.key}", "note", f"{limit} has no effect: {limit.reason}")
    oddities, total = provenance.notices, None
    try:
        rows, val_rows, outside = count(config)
        plan = None if subject.tunes else make_plan(config, rows, val_rows, outside)
    except ConfigError as error:
        yield from problems(error)
        return
    if outside:
        read = f"{sum(rows or ())} of {sum(rows or ()) + outside} rows"
        message = f"{read} have a pass rate in data.curriculum.band={config.data.curriculum.read}"
        yield Finding("data.curriculum", "note", message)
    if plan:
        oddities, total = (*find_oddities(config, plan), *oddities), plan.total_steps
    for text in oddities:
        yield Finding("config.odd", "warning", text)
    if config.trainer.save_freq <= 0:
        yield Finding(
            "config.nothing saved", "warning", "the run ends without a model", "set trainer.save_freq above 0"
        )
    if total == 0:
        yield Finding("config.no steps", "error", "the run has no step", "raise trainer.total_epochs or max_steps")


def check_disk(subject: Subject) -> Iterator[Finding]:
    try:
        require_disk_space(subject.config)
    except ConfigError as error:
        fix = "free some, or name another disk in trainer.save_checkpoint_path"
        yield from (Finding("environment.disk", "error", str(problem), fix) for problem in error.problems)


def check_memory(subject: Subject) -> Iterator[Finding]:
    from r1_cli.plan.estimate.estimate import CPU_REMEDIES, as_on_cpu

    card, config = find_card(), subject.config
    if card is None:
        config = as_on_cpu(config)
        capacity, remedies = free_memory() // config.trainer.devices, CPU_REMEDIES
        peak = find_peak(config, None, on_gpu=False)
        where = "of free memory for each process"
        settings = find_remedies(config, capacity, remedies=remedies, on_gpu=False)
    else:
        capacity, peak, where = card, find_peak(config, card), "of this GPU"
        settings = find_remedies(config, card)
    if peak is not None and peak > capacity:
        fix = f"set {' '.join(settings)}" if settings else "take a smaller model, LoRA, or more devices"
        yield Finding(
            "environment.memory",
            "error",
            f"a step takes {size_text(peak)}, more than the {size_text(capacity)} {where}",
            fix,
        )
