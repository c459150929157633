"""How long each advantage estimator takes at 1536 sequences × 2096 tokens, beside the least that any could take.

uv run python benchmarks/advantages.py [--runs 5]

The floor is one row sum plus one broadcast to the tokens, in the same run: an estimator that gives all tokens of an
answer one number cannot do with less. REINFORCE++ and GAE are set against the textbook loop, as veRL does it: one
Python step per token from the last to the first, the integer mask multiplied in; it is written out below. All in
float32, with a mask of answers of different lengths in groups of 8. The last line is one JSON object with the ratios.
"""

import argparse
import json
import time
from collections.abc import Callable

import torch
from torch import Tensor

from r1_core.advantages import ESTIMATORS, GAE, AdvantageInputs, ReinforcePlusPlus

SEQUENCES, TOKENS, GROUP = 1536, 2096, 8
GAMMA, LAM = 0.99, 0.95
# These give every token of an answer one number, so that the floor is theirs; the others work on every token.
OUTCOME = (
    "grpo", "dr_grpo", "grpo_passk", "gdpo", "rloo", "opo", "gpg", "maxrl", "lite_ppo", "reinforce_baseline",
    "reinforce_plus_plus_baseline",
)  # fmt: skip


def make_inputs() -> AdvantageInputs:
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(TOKENS // 8, TOKENS + 1, (SEQUENCES,), generator=draw)
    rewards = torch.zeros(SEQUENCES, TOKENS)
    rewards[torch.arange(SEQUENCES), lengths - 1] = torch.rand(SEQUENCES, generator=draw)
    return AdvantageInputs(
        rewards,
        torch.arange(SEQUENCES) // GROUP,
        torch.arange(TOKENS) < lengths[:, None],
        values=torch.rand(SEQUENCES, TOKENS, generator=draw),
        baselines=torch.rand(SEQUENCES, generator=draw),
        old_logprobs=-torch.rand(SEQUENCES, TOKENS, generator=draw),
        squared_probs=torch.rand(SEQUENCES, TOKENS, generator=draw),
        parts=torch.rand(SEQUENCES, 2, generator=draw),
    )


def floor(inputs: AdvantageInputs) -> Tensor:
    return torch.where(inputs.loss_mask, inputs.token_rewards.sum(-1)[:, None], 0.0)


def loop_reinforce_plus_plus(inputs: AdvantageInputs) -> Tensor:
    rewards, mask = inputs.token_rewards, inputs.loss_mask.long()
    returns, carried = torch.zeros_like(rewards), torch.zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        carried = rewards[:, t] + GAMMA * carried
        returns[:, t] = carried
        carried = carried * mask[:, t]
    return plain_whiten(returns, mask)


def loop_gae(inputs: AdvantageInputs) -> Tensor:
    rewards, mask, values = inputs.token_rewards, inputs.loss_mask.long(), inputs.require("values", "the loop")
    carried, following, columns = torch.zeros(len(rewards)), torch.zeros(len(rewards)), []
    for t in reversed(range(rewards.shape[1])):
        here = mask[:, t]
        step = rewards[:, t] + GAMMA * following - values[:, t] + GAMMA * LAM * carried
        following = values[:, t] * here + (1 - here) * following
        carried = step * here + (1 - here) * carried
        columns.append(carried)
    return plain_whiten(torch.stack(columns[::-1], dim=1), mask)


def plain_whiten(values: Tensor, mask: Tensor) -> Tensor:
    count = mask.sum()
    mean = (values * mask).sum() / count
    variance = ((values - mean).square() * mask).sum() / (count - 1)
    return (values - mean) * torch.rsqrt(variance + 1e-8) * mask


def measure(tasks: dict[str, Callable[[AdvantageInputs], Tensor]], inputs: AdvantageInputs, runs: int) -> dict:
    """Return the least seconds of each; in turn rather than one after the other, so a slow moment meets them all."""
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(runs + 1):
        for name, task in tasks.items():
            start = time.perf_counter()
            task(inputs)
            times[name].append(time.perf_counter() - start)
    return {name: min(values[1:]) for name, values in times.items()}  # the first fills caches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    inputs = make_inputs()
    estimators = {name: ESTIMATORS.get(name)() for name in ESTIMATORS}
    estimators |= {"gae": GAE(GAMMA, LAM), "reinforce_plus_plus": ReinforcePlusPlus(GAMMA)}
    times = measure({"floor": floor, **estimators}, inputs, runs)
    loops = {"gae": loop_gae, "reinforce_plus_plus": loop_reinforce_plus_plus}
    peers = measure(loops, inputs, min(runs, 2))
    apart = {name: float((loop(inputs) - estimators[name](inputs)).abs().max()) for name, loop in loops.items()}

    to_floor = {name: seconds / times["floor"] for name, seconds in times.items()}
    to_loop = {name: times[name] / seconds for name, seconds in peers.items()}
    print(f"{SEQUENCES} × {TOKENS}, {torch.get_num_threads()} threads, best of {runs}")
    print(f"{'estimator':30} {'ms':>8}  ratio to floor  ratio to loop")
    for name, seconds in times.items():
        loop = f"{to_loop[name]:.2f} of {peers[name] * 1000:.0f} ms" if name in peers else ""
        print(f"{name:30} {seconds * 1000:8.2f}  {to_floor[name]:14.2f}  {loop}".rstrip())
    result = {
        "benchmark": "advantages",
        "floor_ms": times["floor"] * 1000,
        "worst_outcome_to_floor": max(to_floor[name] for name in OUTCOME),
        "to_floor": {name: to_floor[name] for name in estimators},
        "to_loop": to_loop,
        "apart_from_loop": apart,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
