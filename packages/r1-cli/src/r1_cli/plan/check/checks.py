"""All checks, in order."""

from collections.abc import Collection, Iterator, Sequence

from r1_cli.config import ConfigError, load_config
from r1_cli.plan.check.configuration import check_disk, check_memory, check_settings, problems
from r1_cli.plan.check.data import check_rewards, check_rows
from r1_cli.plan.check.environment import check_gpus, check_limits, check_servers, check_versions
from r1_cli.plan.check.episodes import check_episodes
from r1_cli.plan.check.findings import Check, Finding, Subject, examine
from r1_cli.plan.check.model import (
    check_dtype,
    check_files,
    check_lengths,
    check_teacher,
    check_template,
    check_tokenizer,
)
from r1_cli.plan.check.step import check_step

PARTS: dict[str, tuple[Check, ...]] = {
    "config": (check_settings,),
    "environment": (check_versions, check_gpus, check_limits, check_servers, check_disk, check_memory),
    "model": (check_files, check_tokenizer, check_template, check_lengths, check_dtype, check_teacher),
    "data": (check_rows,),
    "reward": (check_rewards,),
    "episodes": (check_episodes,),
    "step": (check_step,),
}


def run_checks(words: Sequence[str], parts: Collection[str] = tuple(PARTS)) -> Iterator[Finding]:
    """Yield findings part by part; only a configuration's problems if it is refused.

    The step is skipped after an error. Equal failures are reported once. `parts` are keys of PARTS.
    """
    try:
        subject = Subject(words, *load_config(words, command=None))
    except ConfigError as error:
        yield from problems(error)
        return
    seen: set[Finding] = set()
    scored = not subject.tunes or subject.written.sft.val_generations
    for part in parts:
        if (part == "episodes" and subject.tunes) or (part == "reward" and not scored):
            continue
        if part == "step" and any(found.level == "error" for found in seen):
            continue
        for check in PARTS[part]:
            for found in examine(part, check, subject):
                if found.message not in {one.message for one in seen}:
                    yield found
                seen.add(found)
