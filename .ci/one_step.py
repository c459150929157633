"""Take one step of the quickstart and print, as JSON, the modules, functions and dataclasses of r1 that it uses.

A module is entered when one of its functions runs, in any thread of the process that trains. Functions are code objects
with distinct qualified names: methods, nested functions, lambdas, and comprehensions, which Python 3.11 calls as
functions (3.12 does not, so compare figures of one version). Processes that compute rewards are not counted: in those,
four modules of `r1_rewards.workers` call a verifier.
"""

import dataclasses
import json
import sys
import tempfile
import threading
from importlib import import_module
from types import FrameType
from typing import Any

from click.testing import CliRunner

SMALL = [
    "data.train_files=examples/quickstart/train.parquet[:32]",
    "data.val_files=examples/quickstart/val.parquet[:8]",
    "data.filter_overlong_prompts_workers=1",
    "data.rollout_batch_size=4",
    "worker.actor.global_batch_size=4",
    "worker.rollout.n=4",
    "trainer.max_steps=1",
    "trainer.val_before_train=false",
    "trainer.val_freq=-1",
    "trainer.save_freq=-1",
    "trainer.logger=[file]",
]

functions: set[tuple[str, str]] = set()
dataclasses_made: set[str] = set()
step_is_running = threading.Event()


def profile(frame: FrameType, event: str, argument: Any) -> None:
    """Record a call, as `sys.setprofile` asks."""
    if event != "call" or not step_is_running.is_set():
        return
    module, code = str(frame.f_globals.get("__name__")), frame.f_code
    if code.co_filename == "<string>" and code.co_name == "__init__":
        kind = type(frame.f_locals.get("self"))
        if kind.__module__.startswith("r1_") and dataclasses.is_dataclass(kind):
            dataclasses_made.add(f"{kind.__module__}.{kind.__qualname__}")
    elif module.startswith("r1_") and code.co_name != "<module>":
        functions.add((module, code.co_qualname))


def profiled(take_step: Any) -> Any:
    def call(*arguments: Any) -> Any:
        step_is_running.set()
        sys.setprofile(profile)
        try:
            return take_step(*arguments)
        finally:
            step_is_running.clear()
            sys.setprofile(None)

    return call


if __name__ == "__main__":
    loop = import_module("r1_cli.train.loop")
    loop.take_step = profiled(loop.take_step)
    threading.setprofile(profile)
    with tempfile.TemporaryDirectory() as folder:
        words = ["train", "examples/quickstart/config.yaml", *SMALL, f"trainer.save_checkpoint_path={folder}"]
        result = CliRunner().invoke(import_module("r1_cli.main").main, words)
    if result.exit_code:
        sys.exit(result.output)
    modules = {module for module, _ in functions}
    names = sorted(f"{module}.{name}" for module, name in functions)
    print(json.dumps({"modules": sorted(modules), "functions": names, "dataclasses": sorted(dataclasses_made)}))
