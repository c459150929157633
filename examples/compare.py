"""The algorithms on the quickstart's task, GSPO twice, each from the same model with the same number of samples.

    uv run python examples/compare.py run                  # all that is missing, seed by seed; killed, it goes on
    uv run python examples/compare.py run grpo rlpr --seeds 1
    uv run python examples/compare.py show                 # the page's table, and its picture

A row is one run of `r1 train`. What came out of it is a line of `--results`, written when the run has ended: who stops
this loses the run that is under way. A step has 16 prompts × 8 sampled answers and four optimizer steps: with one, no
ratio of probabilities would ever leave 1, and clipping, which is what tells most losses apart, would do nothing.
"""

import argparse
import io
import json
import os
import resource
import tempfile
import time
from contextlib import redirect_stdout
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # models this small take longer with more; read when torch is loaded
ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results/compare.jsonl"
PROMPTS, ANSWERS, STEPS, EVERY = 16, 8, 24, 8  # a step's prompts, answers to each, steps, steps between validations
COMMON = [
    "examples/quickstart/config.yaml", "worker.actor.global_batch_size=4", "trainer.save_freq=-1",
    "trainer.logger=[file]", "trainer.find_last_checkpoint=false", "data.filter_overlong_prompts_workers=1",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """An algorithm: the name on the page, and what its run sets beside `COMMON`."""

    title: str
    words: tuple[str, ...] = ()


ROWS = {
    "grpo": Row("GRPO"),
    "dr_grpo": Row(
        "Dr.GRPO", ("algorithm.adv_estimator=dr_grpo", "worker.actor.loss_avg_mode=seq-mean-token-sum-norm")
    ),
    # Groups are drawn until 16 of them have both right and wrong answers, so a step has more samples than others'.
    "dapo": Row("DAPO", ("algorithm.adv_estimator=dapo", "algorithm.filter_key=accuracy")),
    "gspo": Row("GSPO", ("worker.actor.loss_type=gspo",)),
    # Its paper's range is for long sequences: of short ones, whose mean log-ratio is large, it clips most.
    "gspo_wide": Row(
        "GSPO, 0.03 to 0.04",
        ("worker.actor.loss_type=gspo", "worker.actor.clip_ratio_low=0.03", "worker.actor.clip_ratio_high=0.04"),
    ),
    "cispo": Row("CISPO", ("worker.actor.loss_type=cispo",)),
    "sapo": Row("SAPO", ("worker.actor.loss_type=sapo",)),
    "rloo": Row("RLOO", ("algorithm.adv_estimator=rloo",)),
    "reinforce_plus_plus": Row("REINFORCE++", ("algorithm.adv_estimator=reinforce_plus_plus",)),
    # The greedy answer to each prompt is the eighth.
    "remax": Row("ReMax", ("algorithm.adv_estimator=remax", f"worker.rollout.n={ANSWERS - 1}")),
    "ppo": Row(
        "PPO with critic",
        ("algorithm.adv_estimator=gae", "worker.critic.optim.lr=3e-4", "worker.critic.optim.lr_warmup_steps=5"),
    ),
    "rlpr": Row(
        "RLPR, no verifier",
        (
            "worker.reward.reward_function=reference_probability",
            "worker.reward.reward_function_kwargs={format_mode: think_box, format_weight: 0.1}",
            "data.val_files=null",
            "data.val_sources=[{files: examples/quickstart/val.parquet, "
            "reward_function: 'examples/quickstart/reward.py:compute_score'}]",
        ),
    ),
    **{
        name: Row(title, (f"algorithm.adv_estimator={name}",))
        for name, title in {
            "gdpo": "GDPO", "grpo_passk": "Pass@k", "lite_ppo": "Lite PPO", "maxrl": "MaxRL", "opo": "OPO",
            "optimal_token_baseline": "Optimal token baseline", "reinforce_baseline": "REINFORCE, group baseline",
            "reinforce_plus_plus_baseline": "REINFORCE++, group baseline",
        }.items()
    },
    "gpg": Row("GPG", ("algorithm.adv_estimator=gpg", "worker.actor.loss_type=gpg")),
    # The default share, 0.0002, is a single token of an update as small as these.
    "clip_cov": Row("Clip-Cov", ("worker.actor.loss_type=clip_cov", "worker.actor.clip_cov_ratio=0.02")),
    **{
        name: Row(title, (f"worker.actor.loss_type={name}",))
        for name, title in {
            "kl_cov": "KL-Cov", "dppo_tv": "DPPO-TV", "dppo_kl": "DPPO-KL", "gmpo": "GMPO", "luspo": "LUSPO",
            "gspo_token": "GSPO-token", "vespo": "VESPO",
        }.items()
    },
}  # fmt: skip


def words_of(name: str, seed: int, steps: int, folder: str) -> list[str]:
    """The words behind `r1 train` of one run."""
    seeds = [f"data.seed={seed}", f"worker.rollout.seed={seed}"]
    length = [f"trainer.max_steps={steps}", f"trainer.val_freq={EVERY}", f"trainer.save_checkpoint_path={folder}"]
    return [*COMMON, *seeds, *length, *ROWS[name].words]


def curve_of(log: list[dict[str, Any]]) -> list[tuple[int, float]]:
    """Samples drawn so far, and the accuracy on the validation rows then."""
    drawn = [0, *accumulate(round(one.get("rollout/groups_sampled", PROMPTS)) * ANSWERS for one in log[1:])]
    return [
        (samples, one["val/accuracy_reward"])
        for samples, one in zip(drawn, log, strict=True)
        if one.get("val/accuracy_reward") is not None
    ]


def run_row(name: str, seed: int, steps: int, *more: str) -> dict[str, Any]:
    """Train once, in this process; return what is kept of it. Raises SystemExit where the run is refused or fails."""
    from r1_cli.main import main as r1

    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        begun, used = time.monotonic(), processor_seconds()
        r1(["train", *words_of(name, seed, steps, folder), *more], standalone_mode=False)
        spent = processor_seconds() - used
        log = [json.loads(line) for line in Path(folder, "experiment_log.jsonl").read_text().splitlines()]
    trained = log[1:]
    return {
        "row": name, "seed": seed, "steps": steps, "curve": curve_of(log),
        "processor_s": round(spent),
        "wall_s": round(time.monotonic() - begun),
        "step_s": round(sum(one["timing_s/step"] for one in trained)),
        "entropy": [round(one["actor/entropy_loss"], 4) for one in trained],
        "clipped": [round(one.get("actor/pg_clipfrac_higher", 0), 4) for one in trained],
        "reward": [round(one["critic/score/mean"], 4) for one in trained],
    }  # fmt: skip


def processor_seconds() -> float:
    """What this process and those that it waited for have taken."""
    spent = [resource.getrusage(of) for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in spent)


def read_results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run(names: list[str], seeds: list[int], steps: int, results: Path) -> None:
    """Run what `results` does not have yet."""
    os.chdir(ROOT)
    for seed in seeds:
        for name in names:
            if any((one["row"], one["seed"], one["steps"]) == (name, seed, steps) for one in read_results(results)):
                continue
            one = run_row(name, seed, steps)
            with results.open("a") as file:
                file.write(json.dumps(one) + "\n")
            print(f"{ROWS[name].title}, seed {seed}: {at(one['curve'], 0):.3f} → {final(one):.3f}", flush=True)


def at(curve: list[list[float]], samples: float) -> float:
    """Accuracy after so many samples, on the line between the validations before and behind."""
    for (left, low), (right, high) in pairwise(curve):
        if left <= samples <= right:
            return low + (high - low) * (samples - left) / (right - left)
    return curve[-1][1]


def final(one: dict[str, Any]) -> float:
    return at(one["curve"], one["steps"] * PROMPTS * ANSWERS)


def spread(values: list[float]) -> str:
    """Mean and standard deviation, as the page writes them."""
    return f"{fmean(values):.3f} ± {stdev(values):.3f}" if len(values) > 1 else f"{fmean(values):.3f}"


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """The rows of the page, in the order of `ROWS`."""
    lines = ["| algorithm | runs | before | after half | after | processor time |", "|---|---|---|---|---|---|"]
    for name, ones in found.items():
        budget = ones[0]["steps"] * PROMPTS * ANSWERS
        halves = [[at(one["curve"], share * budget) for one in ones] for share in (0, 0.5, 1)]
        minutes = fmean(one["processor_s"] for one in ones) / 60
        cells = [ROWS[name].title, str(len(ones)), *map(spread, halves), f"{minutes:.1f} min"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def picture(found: dict[str, list[dict[str, Any]]]) -> str:
    """An SVG with a panel for each algorithm: its runs, their mean, and in grey the means of all others."""
    wide, high, columns = 190, 130, 4
    panels = []
    for place, name in enumerate(found):
        x, y = 40 + place % columns * (wide + 25), 30 + place // columns * (high + 45)
        title = f'<text y="-8" font-weight="bold">{ROWS[name].title}</text>'
        panels.append(f'<g transform="translate({x} {y})">{panel(found, name, [*found], wide, high)}{title}</g>')
    rows = -(-len(found) // columns)
    return svg(40 + columns * (wide + 25), 30 + rows * (high + 45), "".join(panels))


def curves(found: dict[str, list[dict[str, Any]]], name: str, beside: str = "grpo") -> str:
    """An SVG of one algorithm: its runs, their mean, and in grey the mean of another."""
    wide, high = 420, 200
    legend = [f'<text x="{wide - 8}" y="{high - 30}" text-anchor="end" fill="#1f4e8c">{ROWS[name].title}</text>']
    if name != beside:
        legend.append(f'<text x="{wide - 8}" y="{high - 12}" text-anchor="end" fill="#777">{ROWS[beside].title}</text>')
    title = '<text x="-4" y="-10">accuracy on the validation rows</text>'
    inside = panel(found, name, [beside], wide, high, other_style='stroke="#999" stroke-dasharray="5 3"')
    return svg(wide + 60, high + 50, f'<g transform="translate(40 30)">{inside}{"".join(legend)}{title}</g>')


def svg(wide: int, high: int, inside: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}" font-family="sans-serif" '
        f'font-size="11"><rect width="100%" height="100%" fill="white"/>{inside}</svg>\n'
    )


def panel(
    found: dict[str, list[dict[str, Any]]],
    name: str,
    others: list[str],
    wide: int,
    high: int,
    other_style: str = 'stroke="#ccc"',
) -> str:
    """The axes, the means of `others`, the runs of one algorithm, and their mean."""
    budget = max(one["steps"] for ones in found.values() for one in ones) * PROMPTS * ANSWERS
    grid = [budget * i / 8 for i in range(9)]

    def line(values: list[float], xs: list[float], style: str) -> str:
        points = " ".join(f"{x / budget * wide:.1f},{(1 - y) * high:.1f}" for x, y in zip(xs, values, strict=True))
        return f'<polyline fill="none" points="{points}" {style}/>'

    def mean(of: str, style: str) -> str:
        return line([fmean(at(one["curve"], x) for one in found[of]) for x in grid], grid, style)

    lines = [mean(other, other_style) for other in others if other != name]
    for one in found[name]:
        points = [(samples, value) for samples, value in one["curve"] if samples < budget] + [(budget, final(one))]
        xs, values = zip(*points, strict=True)
        lines.append(line(list(values), list(xs), 'stroke="#7aa6d8"'))
    lines += [mean(name, 'stroke="#1f4e8c" stroke-width="2.5"')]
    lines += [f'<path d="M0 0V{high}H{wide}" fill="none" stroke="#555"/>']
    lines += [f'<text x="-4" y="{(1 - v) * high + 4}" text-anchor="end">{v:g}</text>' for v in (0, 0.5, 1)]
    return "".join([*lines, f'<text x="{wide}" y="{high + 13}" text-anchor="end">{budget:,} samples</text>'])


def read_found(results: Path = RESULTS) -> dict[str, list[dict[str, Any]]]:
    """The stored runs of each row that has some, in the order of `ROWS`."""
    ones = read_results(results)
    found = {name: [one for one in ones if one["row"] == name] for name in ROWS}
    return {name: rows for name, rows in found.items() if rows}


def show(results: Path) -> None:
    """Print the table of what there is, and write the picture beside the results."""
    found = read_found(results)
    print(table(found))
    results.with_suffix(".svg").write_text(picture(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["run", "show"])
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)}; none: all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--results", type=Path, default=RESULTS, help="a line of JSON for each run")
    arguments = parser.parse_args()
    arguments.results = arguments.results.resolve()
    if unknown := sorted({*arguments.rows} - {*ROWS}):
        parser.error(f"no row is called {unknown[0]!r}; there are {', '.join(ROWS)}")
    if arguments.what == "run":
        run(arguments.rows or [*ROWS], arguments.seeds, arguments.steps, arguments.results)
    else:
        show(arguments.results)


if __name__ == "__main__":
    main()
