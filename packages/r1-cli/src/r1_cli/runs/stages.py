"""Read the folder of `r1 run`: its stages, and what each has written so far."""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from r1_cli.runs.history import JsonObject

STAGES_FILE = "stages.json"  # title, and names in the order in which they run
RECORDED = ("train", "sft", "sample")  # commands whose folder is that of a run


@dataclass(frozen=True, slots=True)
class StageResult:
    name: str
    command: str
    typed: str  # the command with its arguments
    folder: Path
    output: Path | None  # None: not complete
    seconds: float

    @property
    def measured(self) -> str:
        """The accuracy of an evaluation, over all its answers; "" of another stage."""
        if self.command != "eval" or self.output is None:
            return ""
        found = read_object(self.output)
        name = next((key for key in found if key.startswith("avg@")), "accuracy")
        return f"{name} {found[name]:.3f}" if name in found else ""


def stage_record(root: Path, name: str) -> Path:
    return root / f"{name}.stage.json"


def read_stage_results(root: Path) -> tuple[str, list[StageResult]]:
    """Return the title and the stages that have begun; "" and [] if the folder is not of `r1 run`."""
    known = read_object(root / STAGES_FILE)
    names = known.get("stages")
    found = []
    for name in names if isinstance(names, list) else ():
        if one := read_object(stage_record(root, str(name))):
            output = Path(str(one["output"])) if one.get("ended") else None
            command, typed, seconds = str(one.get("command")), str(one.get("typed")), float(one.get("seconds") or 0)
            found.append(StageResult(str(name), command, typed, root / str(name), output, seconds))
    return str(known.get("title", "")), found


def read_object(path: Path) -> JsonObject:
    """Return the JSON object in a file, {} if it is missing or torn."""
    with suppress(OSError, ValueError):
        if isinstance(found := json.loads(path.read_text(encoding="utf-8")), dict):
            return found
    return {}


def recorded_folders(folders: Sequence[Path]) -> list[Path]:
    """Return the folders of runs: for a folder of `r1 run`, those of its stages."""
    found: list[Path] = []
    for folder in folders:
        stages = read_stage_results(folder)[1]
        found += [one.folder for one in stages if one.command in RECORDED] or [folder]
    return found
