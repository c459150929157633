"""Checkpoints on disk: complete or absent, pruned only after their successor is safe."""

import errno
import json
import math
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from r1_cli.checkpoint.damage import STATE_FILE, checksum_of, checksums_of_texts, find_damage
from r1_core.disk import force_to_disk

STEP_FOLDER = re.compile(r"global_step_(\d+)")
TRACKER_FILE = "checkpoint_tracker.json"
NOTHING_SAVED = "nothing will be saved: trainer.save_freq is not above 0, so the run ends without a model"


class CheckpointError(RuntimeError):
    """A checkpoint or a record could not be written. Earlier checkpoints have not changed."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A partial checkpoint, written and fsynced, without its final name."""

    step: int
    folder: Path


class Store(ABC):
    """Where checkpoints are written to."""

    @abstractmethod
    def write(self, step: int, save: Callable[[Path], None], state: dict[str, Any]) -> Draft:
        """Let `save` fill a folder, and add `state`. Raises CheckpointError."""

    @abstractmethod
    def publish(self, draft: Draft) -> Path:
        """Make what was written a checkpoint, and delete old ones. Raises CheckpointError."""

    @abstractmethod
    def latest(self) -> Path | None: ...


class CheckpointStore(Store):
    """The folder `root` with its `global_step_N` checkpoints.

    A checkpoint is renamed when complete, so that a crash leaves all of it or nothing. Then older ones are deleted,
    except the newest `limit` (None: all) and the one with the best validation score.
    """

    def __init__(self, root: Path, limit: int | None = None, *, verifies: bool = True) -> None:
        """`verifies`: whether `damaged` reads the tensors that a run would resume from, and compares checksums."""
        self.root, self.limit, self.verifies = root, limit, verifies
        self._verified: dict[int, str | None] = {}  # by step, what `_verify` found

    def steps(self) -> list[int]:
        return [step for step in self._named() if (self.path(step) / STATE_FILE).is_file()]

    def damaged(self) -> dict[Path, str]:
        """Return the checkpoints that cannot be resumed from, newest first, with the reason.

        Those before the newest complete one matter only with a `limit`, which would count them.
        """
        found: dict[Path, str] = {}
        whole, complete = False, self.steps()
        for step in reversed([one for one in self._named() if one not in self.foreign()]):
            if whole and (self.limit is None or step not in complete):
                continue
            if (told := self._find_damage(step) if whole else self._verify(step)) is None:
                whole = True
            else:
                found[self.path(step)] = told
        return found

    def foreign(self) -> list[int]:
        steps = [step for step in self._named() if not (self.path(step) / STATE_FILE).is_file()]
        return [step for step in steps if not any(self.path(step).glob("*/learner.json"))]

    def _find_damage(self, step: int) -> str | None:
        path = self.path(step)
        return find_damage(path) if (path / STATE_FILE).is_file() else f"{STATE_FILE} is missing"

    def _verify(self, step: int) -> str | None:
        """As `_find_damage`, by the checksums, too; once for each checkpoint, as all tensors are read."""
        if step not in self._verified:
            damage = self._find_damage(step)
            if damage is None and self.verifies:
                damage = find_damage(self.path(step), contents=True)
            self._verified[step] = damage
        return self._verified[step]

    def _named(self) -> list[int]:
        found = (STEP_FOLDER.fullmatch(path.name) for path in self.root.glob("global_step_*"))
        return sorted(int(match[1]) for match in found if match)

    def set_aside(self, checkpoint: Path) -> Path:
        """Rename a damaged or foreign checkpoint, so that nothing resumes from it, counts it or deletes it."""
        kind = "foreign" if int(checkpoint.name.rpartition("_")[2]) in self.foreign() else "damaged"
        aside = checkpoint.with_name(f"{kind}_{checkpoint.name}")
        number = 1
        while aside.exists():
            number += 1
            aside = checkpoint.with_name(f"{kind}_{number}_{checkpoint.name}")
        return checkpoint.rename(aside)

    def path(self, step: int) -> Path:
        return self.root / f"global_step_{step}"

    def latest(self) -> Path | None:
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def write(self, step: int, save: Callable[[Path], None], state: dict[str, Any]) -> Draft:
        """Let `save` fill a hidden folder, add `state`, and force everything to disk.

        Args:
            save: fills the folder; other processes that write for it fsync their own files.

        Raises:
            CheckpointError: the disk is full or not writable; nothing of the checkpoint is left.
        """
        folder = self.root / f".draft_{step}"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._remove_drafts()
            self._require_space()
            folder.mkdir()
            save(folder)
            files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
            whole = {**state, "files": files, "checksums": checksums_of_texts(folder)}
            write_json(folder / STATE_FILE, {**whole, "checksum": checksum_of(whole)})
            for path in [*folder.rglob("*"), folder]:
                force_to_disk(path)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise self._not_written(f"the checkpoint of step {step}", error) from error
        return Draft(step, folder)

    def publish(self, draft: Draft) -> Path:
        """Rename the partial checkpoint, update the tracker file, delete old checkpoints. Raises CheckpointError."""
        final = self.path(draft.step)
        self._verified.pop(draft.step, None)
        try:
            if final.exists():  # the same step, reached again after a resume from an older checkpoint
                if self._find_damage(draft.step) is None:
                    self._remove(final)
                else:
                    self.set_aside(final)
            draft.folder.rename(final)
            force_to_disk(self.root)
            self._prune()
        except OSError as error:
            raise self._not_written(f"{TRACKER_FILE} of step {draft.step}", error) from error
        return final

    def _require_space(self) -> None:
        """Raise OSError if the disk has less space than the newest checkpoint takes."""
        latest = self.latest()
        size = sum(path.stat().st_size for path in latest.rglob("*") if path.is_file()) if latest else 0
        free = shutil.disk_usage(self.root).free
        if free < size:
            message = f"it takes about {size / 1e9:.3g} GB, as the one before, and {free / 1e9:.3g} GB are free"
            raise OSError(errno.ENOSPC, message)

    def _not_written(self, what: str, error: Exception) -> CheckpointError:
        latest = self.latest()
        message = f"{what} could not be written to {self.root}: {error}"
        message += f"\n  free disk space, then run the same command again: it resumes from {latest}" if latest else ""
        return CheckpointError(message)

    def best(self) -> int | None:
        scored = [(score, step) for step in self.steps() if (score := self._score(step)) is not None]
        return max(scored)[1] if scored else None

    def _score(self, step: int) -> float | None:
        try:
            score = read_state(self.path(step)).get("val_reward_score")
        except ValueError:  # damaged, and older than what the run resumes from
            return None
        return score if isinstance(score, int | float) and math.isfinite(score) else None  # NaN is no best

    def _prune(self) -> None:
        steps, best = self.steps(), self.best()
        if (damage := self._find_damage(steps[-1])) is not None:
            raise OSError(errno.EIO, f"{self.path(steps[-1])} is damaged ({damage}), so that no older one is deleted")
        keep = set(steps if self.limit is None else steps[-self.limit :]) | {best}
        write_json(
            self.root / TRACKER_FILE,
            {
                "last_global_step": steps[-1],
                "last_actor_path": str(self.path(steps[-1]) / "actor"),
                "best_global_step": best,
                "best_val_reward_score": None if best is None else self._score(best),
            },
        )
        for step in steps:
            if step not in keep:
                self._remove(self.path(step))

    def _remove(self, folder: Path) -> None:
        # Renamed first: a crash half-way through the removal must not leave a checkpoint that looks complete.
        doomed = self.root / f".draft_removed_{folder.name}"
        folder.rename(doomed)
        shutil.rmtree(doomed)

    def _remove_drafts(self) -> None:
        for leftover in self.root.glob(".draft_*"):
            shutil.rmtree(leftover)


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Return the trainer's state.

    Raises:
        FileNotFoundError: the folder is not a complete checkpoint.
        ValueError: the state is damaged.
    """
    path = checkpoint / STATE_FILE
    if not path.is_file():
        held = ", ".join(sorted(p.name for p in checkpoint.iterdir())[:8]) if checkpoint.is_dir() else "no such folder"
        raise FileNotFoundError(f"{checkpoint} is not a checkpoint of r1: it has no {STATE_FILE} ({held})")
    state = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(state, dict):
        raise ValueError(f"{path} holds {type(state).__name__}, no object")
    return state


def write_json(path: Path, content: object) -> None:
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(json.dumps(content, indent=2) + "\n")
    force_to_disk(draft)
    draft.rename(path)
