"""Take one step of the quickstart and print, as JSON, the modules that it enters and the containers that it makes.

A module is entered when one of its functions runs, in any thread of the process that trains; a container is a dataclass
of r1. What runs in the processes of rewards is not seen: there, a verifier is called by four modules of `workers`.
"""

import dataclasses
import json
import sys
import tempfile
import threading
from types import FrameType
from typing import Any

from click.testing import CliRunner

from r1_cli.main import main
from r1_cli.train import loop

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

entered: set[str] = set()
made: set[str] = set()
stepping = threading.Event()


def note(frame: FrameType, event: str, argument: Any) -> None:
    """Called by Python whenever a function begins or ends."""
    if event != "call" or not stepping.is_set():
        return
    module, name = str(frame.f_globals.get("__name__")), frame.f_code.co_name
    if frame.f_code.co_filename == "<string>" and name == "__init__":
        kind = type(frame.f_locals.get("self"))
        if kind.__module__.startswith("r1_") and dataclasses.is_dataclass(kind):
            made.add(f"{kind.__module__}.{kind.__qualname__}")
    elif module.startswith("r1_") and name != "<module>":
        entered.add(module)


def noting(take_step: Any) -> Any:
    def traced(*arguments: Any) -> Any:
        stepping.set()
        sys.setprofile(note)
        try:
            return take_step(*arguments)
        finally:
            stepping.clear()
            sys.setprofile(None)

    return traced


if __name__ == "__main__":
    loop.take_step = noting(loop.take_step)
    threading.setprofile(note)
    with tempfile.TemporaryDirectory() as folder:
        words = ["train", "examples/quickstart/config.yaml", *SMALL, f"trainer.save_checkpoint_path={folder}"]
        result = CliRunner().invoke(main, words)
    if result.exit_code:
        sys.exit(result.output)
    print(json.dumps({"entered": sorted(entered), "made": sorted(made)}))
