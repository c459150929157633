"""Known problems in the recorded answers of a run's last steps."""

from collections import Counter
from statistics import fmean

from r1_cli.runs.diagnose.episodes import diagnose_episodes
from r1_cli.runs.diagnose.findings import Diagnosis, causes_first
from r1_cli.runs.diagnose.signatures import diagnose
from r1_cli.runs.reader import Row, RunReader

STEPS = 3  # the last ones that are looked at
LEAST_PROMPTS = 8
COLUMNS = ["prompt_id", "prompt", "answer", "ground_truth", "media", "group", "score", "finish_reason",
           "turns", "stop_reason"]  # fmt: skip


def diagnose_run(run: RunReader) -> list[Diagnosis]:
    """Return the known problems in a run's numbers and answers, causes before symptoms."""
    return causes_first([*diagnose(run.history), *diagnose_answers(run)])


def diagnose_answers(run: RunReader) -> list[Diagnosis]:
    """Return the known problems in the last steps' recorded answers; [] without a record."""
    steps = run.recorded_steps()[-STEPS:]
    groups: dict[tuple[int, int], list[Row]] = {}
    for step in steps:
        for row in run.readable_samples(step, "train", COLUMNS):
            groups.setdefault((step, row["group"]), []).append(row)
    if not groups:
        return []
    where = f"steps {steps[0]} to {steps[-1]}"
    found = [repeated_answers([*groups.values()], where), dead_media([*groups.values()], where)]
    episodes = diagnose_episodes([row for group in groups.values() for row in group], where)
    return [*(one for one in found if one is not None), *episodes]


def repeated_answers(groups: list[list[Row]], where: str) -> Diagnosis | None:
    """All answers of a group are the same text, and not all are right."""
    several = [group for group in groups if len(group) > 1]
    shares = [Counter(row["answer"] for row in group).most_common(1)[0][1] / len(group) for group in several]
    if len(several) < LEAST_PROMPTS or fmean(shares) < 0.9:
        return None
    score = fmean(row["score"] for group in several for row in group if row["score"] == row["score"])
    if score > 0.9:
        return None
    example = several[0][0]["answer"][:60]
    return Diagnosis(
        "repeated_answers",
        "the answers of a group are the same text",
        f"{fmean(shares):.0%} of a group are its most frequent answer ({where}), such as {example!r}",
        "a higher worker.rollout.temperature; worker.actor.entropy_coef; look at entropy in the log",
    )


def dead_media(groups: list[list[Row]], where: str) -> Diagnosis | None:
    """The answer to a question does not depend on the picture."""
    asked: dict[str, list[list[Row]]] = {}
    for group in groups:
        if group[0]["media"]:
            asked.setdefault(group[0]["prompt"], []).append(group)
    for same in asked.values():
        pictures = {tuple(group[0]["media"]) for group in same}
        truths = {group[0]["ground_truth"] for group in same}
        said = [Counter(row["answer"] for row in group).most_common(1)[0][0] for group in same]
        answer, times = Counter(said).most_common(1)[0]
        if len(pictures) >= LEAST_PROMPTS and len(truths) > 1 and times >= 0.95 * len(same):
            return Diagnosis(
                "dead_media",
                "pictures make no difference",
                f"{len(same)} different pictures with one question get the answer {answer[:60]!r} most often "
                f"({where}), though their right answers are {len(truths)} different ones",
                "r1 data show config.yaml --row 0: does the picture stand in the prompt? is the tower frozen or stale?",
            )
    return None
