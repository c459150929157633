"""The HTML page of a report: numbers, findings, answers. All text of models, rows and file names is escaped."""

import math
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from r1_cli.runs.conversation import write_turns
from r1_cli.runs.diagnose.answers import diagnose_run
from r1_cli.runs.evaluation.logged import read_logged
from r1_cli.runs.history import History, JsonObject
from r1_cli.runs.html import render_page, table
from r1_cli.runs.reader import Phase, Row, RunReader
from r1_cli.runs.report.chart import draw, number
from r1_cli.runs.report.validation import Measured, measure

CURVES = (
    "val/nll", "val/rewards/accuracies", "val/accuracy", "sft/nll", "rewards/margins", "rewards/accuracies",
    "reward_loss", "margin", "reward/overall", "reward/accuracy", "reward/format", "response_length/mean",
    "response_length/clip_ratio",
    "reward/groups_without_variance", "actor/entropy_loss", "actor/kl_loss", "actor/grad_norm", "actor/lr",
    "actor/expert_load_max", "actor/experts_unused", "rollout/logprob_gap_mean", "staleness/mean", "timing_s/step",
)  # fmt: skip
# The stages of a step that follow one another; what is beside them is not counted twice.
STAGES = ("sync", "gen", "wait", "reward", "old", "ref", "values", "adv", "update_critic", "update_actor")
SETTINGS = (
    "worker.actor.model.model_path", "algorithm.adv_estimator", "worker.actor.loss_type", "worker.actor.optim.lr",
    "data.train_files", "data.rollout_batch_size", "worker.rollout.n", "data.max_response_length",
    "worker.rollout.temperature", "algorithm.kl_coef", "worker.teacher.model.model_path",
    "worker.reward.reward_function", "trainer.max_staleness",
)  # fmt: skip
SFT_SETTINGS = (
    "worker.actor.model.model_path", "sft.loss", "sft.turns", "sft.epochs", "sft.beta", "worker.actor.optim.lr",
    "worker.actor.model.lora.rank", "data.train_files", "data.max_length", "worker.actor.global_batch_size",
)  # fmt: skip
LONGEST = 4_000  # characters of a text
EACH = 3  # best, typical and worst answers
MOST_BYTES = 400_000  # of a picture
MOST_PICTURES = 6  # of an answer
COLUMNS = ["group", "sample", "prompt", "answer", "ground_truth", "media", "score", "parts", "reason", "failure",
           "turns", "stop_reason"]  # fmt: skip


def write_report(path: Path) -> str:
    """Raises NoHistoryError without a run."""
    run = RunReader(path)
    history, starts, validations = run.history, run.starts(), measure(run)
    parts = [
        f"<h1>{escape(path.resolve().name)}</h1>", *summary(history, starts, validations), *what_ran(history, starts),
        *curves(history, validations), *evaluations(history), *time_and_tokens(history), *findings(run),
        *faults(history, starts),
        *samples(run),
    ]  # fmt: skip
    return render_page(path.resolve().name, "".join(parts))


def summary(history: History, starts: Sequence[JsonObject], validations: Sequence[Measured]) -> Iterator[str]:
    last = int(history.steps[-1]["step"])
    told = [f"{last:,} steps"]
    if starts:
        told.append(f"{starts[0]['began']} to {starts[-1]['ended'] or 'now'}, {starts[-1]['end']}")
    if reward := history.series("reward/overall"):
        told.append(f"reward {number(reward[0][1])} to {number(reward[-1][1])}")
    if losses := history.series("sft/nll") or history.series("reward_loss"):
        told.append(f"loss {number(losses[0][1])} to {number(losses[-1][1])}")
    if validations:
        best = max(validations, key=lambda one: one.value)
        told.append(f"best validation {best.value:.3f} ({best.low:.3f} to {best.high:.3f}) at step {best.step}")
    yield f"<p class=lead>{escape(' · '.join(told))}</p>"


def what_ran(history: History, starts: Sequence[JsonObject]) -> Iterator[str]:
    yield "<h2>What ran</h2>"
    settings = SFT_SETTINGS if history.names("sft/") else SETTINGS
    yield table([(key, value) for key in settings if (value := history.setting(key)) is not None])
    if not starts:
        return
    last = starts[-1]
    git = last.get("git") or {}
    host = last["host"]
    yield table(
        [
            ("command", last["command"]),
            ("commit", f"{git.get('commit', 'none')}{', changed' if git.get('changed') else ''}"),
            ("packages", ", ".join(f"{name} {version}" for name, version in last["packages"].items())),
            ("machine", f"{host['system']}, {host['processors']} processors, {', '.join(host['devices'])}"),
            ("seeds", ", ".join(f"{name} {seed}" for name, seed in last["seeds"].items())),
            ("rows", ", ".join(f"{name}: {digest}" for name, digest in last["rows"].items())),
        ]
    )


def curves(history: History, validations: Sequence[Measured]) -> Iterator[str]:
    yield "<h2>Curves</h2><div class=grid>"
    if validations:
        points = [(one.step, one.value) for one in validations]
        yield draw("validation, 95 % intervals", points, [(one.step, one.low, one.high) for one in validations])
    elif points := history.series("val/reward_score"):
        yield draw("val/reward_score", points)
    for name in CURVES:
        yield draw(name, history.series(name))
    yield "</div>"
    rows = [(one.step, one.rows, f"{one.value:.4f}", f"{one.low:.4f} to {one.high:.4f}") for one in validations]
    yield table(rows, ("step", "rows", "validation", "95 % interval"))


def evaluations(history: History) -> Iterator[str]:
    """Yield the figures of `r1 eval --watch`: a curve for each set, and a table of all."""
    logged = read_logged(history)
    if not logged:
        return
    yield "<h2>Evaluations of checkpoints</h2><div class=grid>"
    for name in dict.fromkeys((one.set, one.figure) for one in logged):
        of_set = [one for one in logged if (one.set, one.figure) == name]
        points = [(one.step, one.value[0]) for one in of_set]
        yield draw(f"{' '.join(name)}, 95 % intervals", points, [(one.step, *one.value[1:]) for one in of_set])
    yield "</div>"
    rows = []
    for one in sorted(logged, key=lambda one: one.step):
        value, low, high = one.value
        since = "{:+.4f} ({:+.4f} to {:+.4f})".format(*one.change) if one.change else ""
        told = f"warning: lost, p {one.p:.3g}" if one.lost else ""
        rows.append((one.step, one.set, f"{one.figure} {value:.4f}", f"{low:.4f} to {high:.4f}", since, told))
    yield table(rows, ("step", "suite", "figure", "95 % interval", "since the start", ""))


def time_and_tokens(history: History) -> Iterator[str]:
    yield "<h2>Time and tokens</h2>"
    spent = {stage: sum(value for _, value in history.series(f"timing_s/{stage}")) for stage in STAGES}
    whole = sum(value for _, value in history.series("timing_s/step"))
    spent["rest of the steps"] = max(whole - sum(spent.values()), 0.0)
    spent |= {
        name: sum(value for _, value in history.series(f"timing_s/{name}"))
        for name in ("validation", "save_checkpoint")
    }
    total = sum(spent.values())
    shown = {name: seconds for name, seconds in spent.items() if total and seconds / total > 0.0005}
    yield "".join(
        f'<div class=share><span>{escape(name)}</span><i style="width:{70 * seconds / total:.2f}%"></i>'
        f"{seconds:,.1f} s, {seconds / total:.1%}</div>"
        for name, seconds in sorted(shown.items(), key=lambda one: -one[1])
    )
    tokens, sampled = (
        sum(v for _, v in history.series(n)) for n in ("perf/total_num_tokens", "rollout/tokens_sampled")
    )
    rate = history.late("perf/samples_per_second")
    rows = [("tokens trained on, prompts included", f"{tokens:,.0f}"), ("tokens sampled", f"{sampled:,.0f}")]
    rows += [("answers a second, last quarter", f"{rate.mean:.4g}")] if rate else []
    yield table([row for row in rows if row[1] != "0"])


def findings(run: RunReader) -> Iterator[str]:
    found = diagnose_run(run)
    yield "<h2>Diagnosis</h2>"
    yield table([(one.what, one.evidence, one.advised) for one in found], ("found", "by", "try"))
    yield "" if found else "<p>Nothing of what is known to go wrong.</p>"


def faults(history: History, starts: Sequence[JsonObject]) -> Iterator[str]:
    rows = [(f"start {at}, from step {one['from_step']}", one["end"]) for at, one in enumerate(starts, start=1)]
    rows = rows if len(rows) > 1 or any(row[1] != "complete" for row in rows) else []
    rows += [describe_restart(one["restart"]) for one in starts if "restart" in one]
    for name in [name for prefix in ("reward/failures", "val/failures") for name in history.names(prefix)]:
        if count := sum(value for _, value in history.series(name)):
            rows.append((name, f"{count:,.0f} answers"))
    for name in ("actor/skipped_steps", "critic/skipped_steps"):
        if (known := history.series(name)) and known[-1][1]:
            rows.append((name, f"{known[-1][1]:,.0f} optimizer steps"))
    yield "<h2>Faults survived</h2>"
    yield table(rows) or "<p>None.</p>"


def describe_restart(restart: JsonObject) -> tuple[str, str]:
    again = f"{restart['steps_again']} steps taken again, {restart['seconds_lost']:,.0f} s lost"
    return f"restart at step {restart['step']}", f"{restart['cause']}; {again}"


def samples(run: RunReader) -> Iterator[str]:
    step, chosen = choose(run)
    if step is None:
        return
    yield f"<h2>Answers of step {step}</h2>"
    for kind, rows in chosen.items():
        yield f"<h3>{kind}</h3><div class=grid>"
        for row in rows:
            shown = pictures_of(run, row)
            pictures = "".join(f'<img src="{address}" alt="of the prompt">' for address in shown)
            left = len(row["media"] or ()) - len(shown)
            parts = ", ".join(f"{name} {number(value)}" for name, value in row["parts"].items() if math.isfinite(value))
            said = [f"score {row['score']:.4g}", parts, row["failure"] or row["reason"]]
            said += [f"truth {row['ground_truth']}"] if row["ground_truth"] else []
            said += [f"stopped: {row['stop_reason']}"] if row.get("stop_reason") else []
            said.append(f"{left} pictures left out" if left else "")
            yield (
                f"<article>{pictures}<pre>{escape(row['prompt'][-LONGEST:])}</pre>{answer_of(row)}"
                f"<p>{escape(' · '.join(filter(None, said)))}</p></article>"
            )
        yield "</div>"


def answer_of(row: Row) -> str:
    """Return an answer's text, or the turns of an episode: the policy's as answers, the environment's plain."""
    turns, left = write_turns(row) or [("assistant", row["answer"])], LONGEST
    shown = []
    for role, text in turns:
        kind = " class=answer" if role == "assistant" else ""
        shown.append(f"<pre{kind}>{escape(text[:left])}</pre>")
        left = max(left - len(text), 0)
    return "".join(shown)


def choose(run: RunReader) -> tuple[int | None, dict[str, list[Row]]]:
    """Return the last recorded step and its best, median and worst answers, one per prompt."""
    phases: tuple[Phase, ...] = ("train", "sft", "sample")
    phase = next((one for one in phases if run.recorded_steps(one)), phases[-1])
    for step in reversed(run.recorded_steps(phase)):
        if rows := run.readable_samples(step, phase, COLUMNS):
            break
    else:
        return None, {}
    rows.sort(key=lambda row: row["score"] if math.isfinite(row["score"]) else -math.inf, reverse=True)
    places = sorted(range(len(rows)), key=lambda place: abs(place - len(rows) // 2))
    middle = [rows[place] for place in places]
    return step, {
        "best": _of_different_prompts(rows),
        "typical": _of_different_prompts(middle),
        "worst": _of_different_prompts(rows[::-1]),
    }


def _of_different_prompts(rows: list[Row]) -> list[Row]:
    chosen: dict[int, Row] = {}
    for row in rows:
        chosen.setdefault(row["group"], row)
        if len(chosen) == EACH:
            break
    return [*chosen.values()]


def pictures_of(run: RunReader, row: Row) -> list[str]:
    names = (row["media"] or ())[:MOST_PICTURES]
    return [found for name in names if (found := run.embed_media(name, MOST_BYTES))]
