"""Check that this tree computes the same numbers as an earlier commit, bit for bit.

    uv run python .ci/same_numbers.py              # against the merge base with origin/main, or the commit before
    uv run python .ci/same_numbers.py d54af5b      # against that commit

Two short trainings of the quickstart run in a git worktree of the earlier commit and in this tree, on this machine and
in this environment. Then this tree resumes the earlier commit's checkpoint. Metrics, sample records and checkpoints are
compared value by value. Only the command line of `r1` is used, so that modules may move.

Exit status: 0 if all values are equal, or if there is no history to compare with (it prints NOT CHECKED); 1 otherwise.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[1]
# What two equal runs write differently, and why. A key is ignored if it begins with one of these.
IGNORED_KEYS = {
    "timing_": "wall time",
    "perf/": "wall time and memory (except perf/total_num_tokens and perf/micro_batch_size)",
    "last_actor_path": "path of the run",
    "checksum": "of files whose values are compared",
}
COMPARED_ALL_THE_SAME = {"perf/total_num_tokens", "perf/micro_batch_size"}
IGNORED_FILES = {
    "manifest.json": "wall times, paths and versions",
    "experiment_config.json": "paths; a new key with its default is no new number",
}
LAST_STEP, SAVED_STEP = 3, 2
SHORT = [  # micro-batch sizes are fixed: found by measuring, they depend on the machine's load
    "data.train_files=examples/quickstart/train.parquet[:32]",
    "data.val_files=examples/quickstart/val.parquet[:8]",
    "data.filter_overlong_prompts_workers=1",
    "data.rollout_batch_size=4",
    "worker.actor.global_batch_size=2",  # two optimizer steps a step
    "worker.actor.micro_batch_size_per_device_for_update=3",
    "worker.actor.micro_batch_size_per_device_for_experience=4",
    "worker.rollout.n=4",
    "algorithm.disable_kl=false",
    "trainer.val_before_train=false",
    f"trainer.max_steps={LAST_STEP}",
    f"trainer.val_freq={LAST_STEP}",
    f"trainer.save_freq={SAVED_STEP}",
    "trainer.logger=[file]",
]
TRAININGS = {
    "GRPO with a KL loss": ["algorithm.adv_estimator=grpo", "algorithm.use_kl_loss=true"],
    "PPO with a critic and KL in the reward": [
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_loss=false",
        "worker.critic.optim.lr=1e-3",
    ],
}
Numbers = dict[str, Any]  # name of a value, column or tensor -> a list of values or a tensor


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("commit", nargs="?", help="earlier commit (default: the merge base with origin/main)")
    commit, reason = find_commit(parser.parse_args().commit)
    if commit is None:
        print(f"NOT CHECKED: the numbers of this tree were compared with nothing. {reason}")
        return 0
    with tempfile.TemporaryDirectory(prefix="r1-same-numbers-") as name:
        folder = Path(name)
        tree = folder / "tree"
        git("worktree", "add", "--detach", "--quiet", str(tree), commit)
        try:
            return compare_with(commit, tree, folder)
        finally:
            git("worktree", "remove", "--force", str(tree))


def find_commit(name: str | None) -> tuple[str | None, str]:
    """Return the full id of the commit to compare with, or None and the reason."""
    if not git("rev-parse", "--git-dir", check=False):
        return None, f"{ROOT} is not a clone of the repository."
    if name is None:
        head, base = git("rev-parse", "HEAD"), git("merge-base", "HEAD", "origin/main", check=False)
        unchanged = base == head and not git("status", "--porcelain")
        name = "HEAD~1" if unchanged or not base else base
    commit = git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}", check=False)
    return (commit, "") if commit else (None, f"This clone lacks the commit {name}: `git fetch --unshallow` gets it.")


def git(*words: str, check: bool = True) -> str:
    process = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
    if process.returncode and check:
        sys.exit(f"git {' '.join(words)} failed: {process.stderr}")
    return "" if process.returncode else process.stdout.strip()


def compare_with(commit: str, tree: Path, folder: Path) -> int:
    """Train in both trees, two processes at a time, and print what differs."""
    differing = 0
    for number, (training, words) in enumerate(TRAININGS.items()):
        old, new = folder / f"old-{number}", folder / f"new-{number}"
        wait([start(tree, old, words), start(ROOT, new, words)])
        differing += report(training, read_run(old), read_run(new))
    resumed = folder / "resumed"
    load = f"trainer.load_checkpoint_path={folder / 'old-0' / f'global_step_{SAVED_STEP}'}"
    wait([start(ROOT, resumed, [*next(iter(TRAININGS.values())), load])])
    differing += report(f"step {LAST_STEP}, resumed from that commit's checkpoint of step {SAVED_STEP}", *(
        {name: values for name, values in read_run(run).items() if name.startswith(f"step {LAST_STEP} ")}
        for run in (folder / "old-0", resumed)
    ))  # fmt: skip
    for name, reason in (IGNORED_KEYS | IGNORED_FILES).items():
        print(f"  not compared: {name}{'' if name in IGNORED_FILES else '*'} ({reason})")
    print(f"{'NUMBERS DIFFER from those' if differing else 'the same numbers as those'} of {commit[:10]}")
    return int(differing > 0)


def start(tree: Path, folder: Path, words: list[str]) -> tuple[Path, subprocess.Popen[str]]:
    """Start `r1 train` with the packages of `tree`, without installing them."""
    sources = [str(path) for path in sorted(tree.glob("packages/*/src"))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sources), "OMP_NUM_THREADS": "1"}
    code = "import sys, r1_cli.main as m; assert m.__file__.startswith(sys.argv.pop(1)), m.__file__; m.main()"
    command = [sys.executable, "-c", code, str(tree), "train", "examples/quickstart/config.yaml", *SHORT, *words]
    command.append(f"trainer.save_checkpoint_path={folder}")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return tree, subprocess.Popen(command, cwd=tree, env=environment, text=True, **pipes)  # type: ignore[call-overload]


def wait(processes: Iterable[tuple[Path, "subprocess.Popen[str]"]]) -> None:
    outputs = [(tree, process.communicate()[0], process.returncode) for tree, process in processes]
    for tree, output, status in outputs:
        if status:
            whose = "this tree" if tree == ROOT else "the earlier commit (does it need another environment?)"
            raise SystemExit(f"{output[-4000:]}\nthe training of {whose} ended with exit status {status}")


def read_run(folder: Path) -> Numbers:
    """Read everything comparable that a run wrote, by names that begin with the step where there is one."""
    found: Numbers = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in IGNORED_FILES):
        name = str(path.relative_to(folder))
        if path.suffix == ".jsonl":
            for record in map(json.loads, path.read_text().splitlines()):
                for key, value in flatten(record):
                    found.setdefault(f"step {record['step']} {name} {key}", []).append(value)
        elif path.suffix == ".parquet":
            table, step = pq.read_table(path), int(path.name.partition("-")[0])
            found |= {f"step {step} {name} {key}": table[key].to_pylist() for key in table.column_names}
        else:
            prefix = f"step {name.partition('/')[0].rpartition('_')[2]} " if name.startswith("global_step_") else ""
            if path.suffix == ".safetensors":
                found |= {f"{prefix}{name} {key}": tensor for key, tensor in load_file(path).items()}
            elif path.suffix == ".json":
                found |= {f"{prefix}{name} {key}": [value] for key, value in flatten(json.loads(path.read_text()))}
            else:
                found[f"{prefix}{name}"] = [path.read_bytes()]
    return found


def flatten(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a JSON object under dotted keys, without those in IGNORED_KEYS."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            if name in COMPARED_ALL_THE_SAME or not name.startswith(tuple(IGNORED_KEYS)):
                yield from flatten(inner, f"{key}.{name}" if key else name)
    else:
        yield key, value


def report(training: str, old: Numbers, new: Numbers) -> int:
    """Print how many values are equal, and every name under which one differs; return how many names differ."""
    equal, lines = 0, []
    for name in sorted(old.keys() | new.keys()):
        if name not in old and set(leaves(new[name])) <= {"None", "0"}:
            continue  # a new column without a number in it, or a new count of nothing
        if name not in new or name not in old:
            lines.append(f"{name}: only in {'this tree' if name in new else 'the earlier commit'}")
            continue
        total, different, first = compare_values(old[name], new[name])
        equal += total - different
        if shape(old[name]) != shape(new[name]):
            lines.append(f"{name}: {shape(old[name])} became {shape(new[name])}")
        elif different:
            lines.append(f"{name}: {different:,} of {total:,} values, first {first}")
    print(f"{training}: {equal:,} values equal, {len(lines)} of {len(old)} names differ", flush=True)
    print(*(f"  {line}" for line in lines), sep="\n", end="\n" if lines else "")
    return len(lines)


def compare_values(old: Any, new: Any) -> tuple[int, int, str]:
    """Return how many values were compared, how many differ in any bit, and the first that does."""
    if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
        if old.dtype != new.dtype or old.shape != new.shape:
            return 0, 0, ""
        unequal = (as_bytes(old) != as_bytes(new)).any(dim=-1)
        where = unequal.nonzero()[:1, 0]
        first = "".join(f"{old.reshape(-1)[i]} -> {new.reshape(-1)[i]}" for i in where.tolist())
        return old.numel(), int(unequal.sum()), first
    pairs = list(zip(leaves(old), leaves(new), strict=False))
    different = [" -> ".join(pair) for pair in pairs if pair[0] != pair[1]]
    return len(pairs), len(different), "".join(different[:1])


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1, 1).view(torch.uint8)


def leaves(values: Any) -> list[str]:
    """Write every value so that two texts are equal if and only if the values are, bit for bit (NaN equals NaN)."""
    if isinstance(values, list | tuple):
        return [text for value in values for text in leaves(value)]
    return [repr(values)]


def shape(values: Any) -> str:
    """Describe how values are laid out: the type and shape of a tensor, the lengths of nested lists."""
    if isinstance(values, torch.Tensor):
        return f"{values.dtype} {tuple(values.shape)}"
    if isinstance(values, list) and any(isinstance(value, list) for value in values):
        return f"lists of {[len(value) if isinstance(value, list) else 1 for value in values]}"
    return f"{len(values)} values"


if __name__ == "__main__":
    sys.exit(main())
