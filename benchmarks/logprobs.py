"""Memory and time of log-probs with their gradients, against all logits held at once, TRL's and Liger's way.

uv run python benchmarks/logprobs.py [--tokens 4096] [--vocab 151936] [--hidden 2048] [--runs 1] [--dtype float32]

One forward and backward pass from hidden states [T, H] through a head [V, H] to a token-wise loss, the policy
gradient. Every way runs in a process of its own, one after the other; `plain` computes all logits, as r1 did. Peak
memory is what the process (on a GPU: its allocator) holds at most, less what it held before the call:

- `peak_gib`: with a head that has no gradient yet, so the new gradient, which every way has to leave, is in it;
- `later_gib`: with a head that has one from an earlier micro-batch, as in all but the first.

The default size takes about 11 GiB of memory for `plain`. The last line is one JSON object with the ratios to `plain`,
or to `plain_frozen` where the head is frozen.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from r1_core.learner.linear_head import LOGPROB, HeadSettings, token_stats
from r1_core.learner.logprobs import token_logprobs

PEERS = {"trl": "trl", "liger": "liger_kernel"}
SEQUENCE = 512  # tokens of one sequence, whose advantages are the same; peers want rows of it


@dataclass
class Task:
    hidden: Tensor
    weight: Tensor
    targets: Tensor
    advantages: Tensor

    def loss(self, logprobs: Tensor) -> Tensor:
        return -(self.advantages * logprobs).sum() / len(self.targets)


def plain(task: Task) -> Tensor:
    logits = torch.nn.functional.linear(task.hidden, task.weight)
    return task.loss(token_logprobs(logits, task.targets)[0])


def recomputed(task: Task) -> Tensor:
    stats = token_stats(
        task.hidden, task.weight, None, task.targets, HeadSettings(task.weight.dtype), store=task.weight.grad
    )
    return task.loss(stats[:, LOGPROB])


def token_wise(task: Task) -> Tensor:
    def loss_gradient(stats: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = stats.detach().requires_grad_()
            return torch.autograd.grad(task.loss(leaf[:, LOGPROB]), leaf)[0]

    settings = HeadSettings(task.weight.dtype)
    stats = token_stats(
        task.hidden, task.weight, None, task.targets, settings, loss_gradient=loss_gradient, store=task.weight.grad
    )
    return task.loss(stats[:, LOGPROB])


def trl(task: Task) -> Tensor:
    from trl.trainer.utils import selective_log_softmax

    logits = torch.nn.functional.linear(task.hidden, task.weight)
    rows = logits.view(-1, min(SEQUENCE, len(logits)), logits.shape[-1])
    return task.loss(selective_log_softmax(rows, task.targets.view(rows.shape[:2])).flatten())


def liger(task: Task) -> Tensor:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    shape = (-1, min(SEQUENCE, len(task.hidden)))
    targets = task.targets.view(shape)
    loss = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, loss_type="bnpo", compiled=False)
    advantages = task.advantages.view(shape)[:, 0]
    hidden = task.hidden.view(*targets.shape, -1)
    value: Tensor = loss(hidden, task.weight, targets, torch.ones_like(targets), advantages)[0]
    return value


WAYS: dict[str, Callable[[Task], Tensor]] = {
    "plain": plain,
    "recomputed": recomputed,
    "token_wise": token_wise,
    "plain_frozen": plain,
    "frozen": recomputed,
    "trl": trl,
    "liger": liger,
}


def make_task(way: str, options: argparse.Namespace) -> Task:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    weight = torch.randn(options.vocab, options.hidden, device=device).mul_(options.hidden**-0.5).to(dtype)
    hidden = torch.randn(options.tokens, options.hidden, device=device).to(dtype)
    targets = torch.randint(options.vocab, (options.tokens,), device=device)
    advantages = torch.randn(options.tokens // SEQUENCE + 1, device=device).repeat_interleave(SEQUENCE)
    trained = weight.requires_grad_("frozen" not in way)
    return Task(hidden.requires_grad_(), trained, targets, advantages[: options.tokens])


class Gauge:
    """Bytes held now and at most since `reset`, of this process or of the GPU's allocator."""

    def reset(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        else:
            Path("/proc/self/clear_refs").write_text("5")
            self.before = self._read("VmRSS")

    def peak_gib(self) -> float:
        most = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else self._read("VmHWM")
        return (most - self.before) / 2**30

    def _read(self, name: str) -> int:
        status = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(name))


def run(way: str, options: argparse.Namespace) -> dict[str, object]:
    """Measure one way in this process: once without a gradient beforehand, then `runs` times with one."""
    task = make_task(way, options)
    torch.mm(torch.ones(256, 256), torch.ones(256, 256))  # starts the threads
    gauge, seconds, peaks = Gauge(), [], []
    for _ in range(1 + options.runs):
        task.hidden.grad = None
        gauge.reset()
        start = time.perf_counter()
        WAYS[way](task).backward()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        peaks.append(gauge.peak_gib())
        if len(peaks) == 1:
            probe = [task.hidden.grad[:8, :8]]
            probe += [] if task.weight.grad is None else [task.weight.grad[task.targets[:8], :8]]
            values = torch.cat(probe).flatten().tolist()
    return {"seconds": min(seconds), "peak_gib": peaks[0], "later_gib": max(peaks[1:]), "gradients": values}


def measure(way: str) -> dict[str, object]:
    """Start a process for one way; a failure is told as a reason."""
    if way in PEERS and importlib.util.find_spec(PEERS[way]) is None:
        return {"reason": f"{PEERS[way]} is not installed"}
    child = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--way", way], capture_output=True, text=True)
    if child.returncode:
        return {"reason": (child.stderr.strip().splitlines() or [f"exit status {child.returncode}"])[-1]}
    return json.loads(child.stdout.splitlines()[-1])


def compare(result: dict, base: dict) -> dict[str, object]:
    if "reason" in result:
        return {"seconds": None, **result}
    wrong = max(abs(a - b) for a, b in zip(result.pop("gradients"), base["gradients"], strict=True))
    return {
        **result,
        "time_to_plain": result["seconds"] / base["seconds"],
        "peak_to_plain": result["peak_gib"] / max(base["peak_gib"], 1e-9),
        "later_to_plain": result["later_gib"] / max(base["later_gib"], 1e-9),
        "gradients_apart": wrong / max(abs(value) for value in base["gradients"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--way", choices=WAYS, help="measure this one alone")
    options = parser.parse_args()
    if options.way:
        print(json.dumps(run(options.way, options)))
        return
    results: dict[str, dict] = {}
    ways = {}
    for way in WAYS:
        results[way] = measure(way)
        ways[way] = compare(dict(results[way]), results["plain_frozen" if "frozen" in way else "plain"])
        print(f"{way:14}", json.dumps(ways[way]), flush=True)
    setting = {name: getattr(options, name) for name in ("tokens", "vocab", "hidden", "dtype")}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{torch.get_num_threads()} CPU threads"
    print(json.dumps({"benchmark": "logprobs", **setting, "device": device, "ways": ways}))


if __name__ == "__main__":
    main()
