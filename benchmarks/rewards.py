"""What it costs to score in killable processes: beside plain Math-Verify, with hanging samples, and in memory.

uv run python benchmarks/rewards.py [--samples 10000] [--runs 3] [--memory-samples 100000]

- speed: ordinary mathematical answers on two workers, per worker, to Math-Verify alone in one process on the same
  answers, and to our own verifier alone in one process;
- hanging: a batch in which 1 % of the samples hang, half asleep and half in a busy loop, to the same batch without; the
  bound is 1.5 times the clean time plus the deadline;
- memory: of this process and all workers (proportional set size) over many samples.

Rounds alternate, so that a slow moment of the machine meets all; the best of each counts. The last line is one JSON
object with the ratios.
"""

import argparse
import json
import logging
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from math_verify import parse, verify

from r1_rewards import PooledVerifier, RewardInput, load, math

WORKERS = 2
DEADLINE = 5.0  # seconds
HANGING = """
import time
from r1_rewards import math
REWARD_TYPE = "sequential"
def compute_score(reward_input):
    if reward_input["response"] == "sleep":
        time.sleep(3600)
    while reward_input["response"] == "spin":
        pass
    return math.score(reward_input["response"], reward_input["ground_truth"]).parts
"""


def ordinary_answers(count: int, seed: int = 0) -> list[RewardInput]:
    """Answers as models give them: numbers, fractions, expressions, sets, intervals; a third of them wrong."""
    draw = random.Random(seed)
    inputs = []
    for _ in range(count):
        a, b, c = draw.randint(2, 99), draw.randint(2, 99), draw.randint(2, 9)
        truth, answer, wrong = draw.choice(
            [
                (str(a * b), f"{a * b}", f"{a * b + 1}"),
                (f"{a / 8}", rf"\frac{{{a}}}{{8}}", rf"\frac{{{a}}}{{9}}"),
                (rf"\frac{{{a}}}{{{b}}}", rf"\dfrac{{{a * c}}}{{{b * c}}}", rf"\frac{{{b}}}{{{a + b}}}"),
                (rf"{c}\sqrt{{{b}}}", rf"\sqrt{{{b * c * c}}}", rf"\sqrt{{{b}}}"),
                (f"x^2+{a + b}x+{a * b}", f"(x+{a})(x+{b})", f"(x+{a})(x-{b})"),
                (rf"\{{{a}, {b + 100}\}}", rf"\{{{b + 100}, {a}\}}", rf"\{{{a}\}}"),
                (rf"[{a}, {a + b})", rf"[{a}, {a + b})", rf"({a}, {a + b})"),
                (rf"{a}\pi", rf"{a} \pi", rf"{b}\pi + 1"),
            ]
        )
        said = wrong if draw.random() < 1 / 3 else answer
        inputs.append(RewardInput(rf"First we simplify, and so the answer is \boxed{{{said}}}.", rf"\boxed{{{truth}}}"))
    return inputs


def plain_math_verify(inputs: list[RewardInput]) -> None:
    for item in inputs:
        gold = parse(item.ground_truth, parsing_timeout=None)
        verify(gold, parse(item.response, parsing_timeout=None), timeout_seconds=None)


def our_own(inputs: list[RewardInput]) -> None:
    for item in inputs:
        math.score(item.response, item.ground_truth)


def best(tasks: dict[str, Callable[[], object]], runs: int) -> dict[str, float]:
    """Return the least seconds of each task, in turns."""
    seconds = dict.fromkeys(tasks, float("inf"))
    for _ in range(runs):
        for name, task in tasks.items():
            start = time.perf_counter()
            task()
            seconds[name] = min(seconds[name], time.perf_counter() - start)
    return seconds


def measure_speed(samples: int, runs: int) -> dict[str, float]:
    inputs = ordinary_answers(samples)
    with load("math", timeout=DEADLINE, workers=WORKERS) as verifier:
        verifier(inputs[:200])
        seconds = best(
            {
                "math_verify": lambda: plain_math_verify(inputs),
                "in_process": lambda: our_own(inputs),
                "pool": lambda: verifier(inputs),
            },
            runs,
        )
    return {
        "math_verify_ms": 1000 * seconds["math_verify"] / samples,
        "in_process_ms": 1000 * seconds["in_process"] / samples,
        "pool_ms": 1000 * seconds["pool"] / samples,
        "worker_to_math_verify": seconds["math_verify"] / seconds["pool"] / WORKERS,
        "worker_to_in_process": seconds["in_process"] / seconds["pool"] / WORKERS,
    }


def measure_hanging(samples: int, runs: int) -> dict[str, float]:
    clean = ordinary_answers(samples)
    hanging = list(clean)
    for number, index in enumerate(random.Random(1).sample(range(samples), samples // 100)):
        hanging[index] = RewardInput("spin" if number % 2 else "sleep", "1")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "reward.py"
        file.write_text(HANGING)
        with load(f"{file}:compute_score", timeout=DEADLINE, workers=WORKERS) as verifier:
            verifier(clean[:200])

            def with_hanging() -> None:
                scores = verifier(hanging)
                lost = [
                    a
                    for a, b in zip(hanging, scores, strict=True)
                    if (a.response in ("spin", "sleep")) != bool(b.error)
                ]
                if lost:
                    raise SystemExit(f"{len(lost)} samples were misjudged, such as {lost[0]}")

            seconds = best({"clean": lambda: verifier(clean), "hanging": with_hanging}, runs)
    return {
        "clean_s": seconds["clean"],
        "hanging_s": seconds["hanging"],
        "deadline_s": DEADLINE,
        "hanging_to_bound": seconds["hanging"] / (1.5 * seconds["clean"] + DEADLINE),
    }


def measure_memory(samples: int) -> dict[str, float]:
    """Score in ten parts; the growth is from the second part's end to the last's."""
    used = []
    with load("math", timeout=DEADLINE, workers=WORKERS) as verifier:
        for part in range(10):
            inputs = ordinary_answers(samples // 10, seed=part)
            verifier(inputs)
            used.append(proportional_set_size(verifier))
    return {"memory_mib": used[-1], "memory_growth": used[-1] / used[1]}


def proportional_set_size(verifier: PooledVerifier) -> float:
    """Return MiB used by this process and the verifier's."""
    total = 0
    for pid in ["self", *map(str, verifier.pids())]:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--memory-samples", type=int, default=100_000)
    options = parser.parse_args()
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    result = measure_speed(options.samples, options.runs)
    print(json.dumps(result))
    result |= measure_hanging(options.samples, options.runs)
    print(json.dumps(result))
    if options.memory_samples:
        result |= measure_memory(options.memory_samples)
    print(json.dumps({"benchmark": "rewards", "workers": WORKERS, "samples": options.samples, **result}))


if __name__ == "__main__":
    main()
