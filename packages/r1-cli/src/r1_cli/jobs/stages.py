"""`r1 run`: run stages one after the other, each as a command in a process of its own; skip those that are complete."""

import hashlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, cast

from r1_cli.checkpoint.folders import CheckpointStore, write_json
from r1_cli.config.load import load_config
from r1_cli.config.problems import ConfigError, Problem
from r1_cli.config.rules import Command
from r1_cli.config.settings import read_file
from r1_cli.config.stages import REFERENCE, Stage, Stages, resolve
from r1_cli.jobs.next_steps import typed_command
from r1_cli.runs.stages import STAGES_FILE, read_object, stage_record
from r1_data.types import JsonObject
from r1_rewards.sandbox.jail.kernel import die_with_parent

R1 = (sys.executable, "-m", "r1_cli.main")

WRITTEN = re.compile(r"trainer\.(?!load_checkpoint_path$)|worker\.rollout\.weights_folder$")  # keys that name no input
PATH_KEY = re.compile(
    r"(?:^|[._])(?:files|path|dir|model|samples)$"
)  # keys whose values are paths without a / or a dot
OUTPUT_DATA = (".parquet", ".safetensors")  # a folder has reports and logs, too

State = Literal["complete", "resumes", "begins"]


class StageError(Exception):
    """A stage failed, has not written its output, or was stopped by the signal `stopped_by`."""

    def __init__(self, message: str, stopped_by: int | None = None) -> None:
        super().__init__(message)
        self.stopped_by = stopped_by


@dataclass(frozen=True, slots=True)
class StageFolder:
    """What a stage writes: `NAME/`, and beside it `NAME.stage.json`, its record."""

    stage: Stage
    root: Path

    @property
    def path(self) -> Path:
        return self.root / self.stage.name

    @property
    def output(self) -> Path | None:
        """The output, None if it is missing."""
        if self.stage.command in ("train", "sft"):
            return CheckpointStore(self.path).latest()
        return self.planned if self.planned.exists() else None

    @property
    def planned(self) -> Path:
        """Where the output will be; of a training, the folder of its checkpoints."""
        names = {"rows": "rows.parquet", "eval": "result.json", "merge": "model"}
        return self.path / names.get(self.stage.command, "")

    def record(self) -> JsonObject:
        return read_object(stage_record(self.root, self.stage.name))

    def write(self, **values: object) -> None:
        write_json(stage_record(self.root, self.stage.name), {**self.record(), **values})

    def state(self, digest: str, reads: Mapping[str, str]) -> State:
        """Return what `r1 run` does with the stage; `reads` are the fingerprints of outputs that it reads."""
        known = self.record()
        before = known.get("reads") or {}
        if known.get("digest") != digest or any(before.get(name) != now for name, now in reads.items()):
            return "begins"
        return "complete" if known.get("ended") and self.output is not None else "resumes"

    def begin(self, digest: str, reads: Mapping[str, str]) -> None:
        """Note that the stage begins; set aside what it wrote from other inputs."""
        if self.state(digest, reads) == "begins" and self.path.exists():
            number = 1
            while (aside := self.path.with_name(f"{self.stage.name}.replaced-{number}")).exists():
                number += 1
            self.path.rename(aside)
        self.path.mkdir(parents=True, exist_ok=True)
        self.write(digest=digest, reads=reads, command=self.stage.command, ended=False)


class StageRun:
    """The stages of a file, with their folders and the digests of their inputs."""

    def __init__(self, stages: Stages) -> None:
        self.file, self.root, self.stages = stages.file, stages.output, stages.stages
        self.folders = {one.name: StageFolder(one, stages.output) for one in self.stages}
        self.digests: dict[str, str] = {}
        known: dict[str, str] = {}
        for one in self.stages:
            self.digests[one.name] = digest_of(one, self.digests, known)

    def check(self) -> None:
        """Raises ConfigError for the configurations of all stages. Values with outputs of stages are not checked."""
        problems: list[Problem] = []
        for stage in self.stages:
            if not stage.kind.has_config:
                continue
            known = {one.key for one in stage.settings if REFERENCE.search(json.dumps(one.value))}
            known |= {"worker.actor.model.model_path"} if stage.argument else set()
            try:
                load_config(self._configuration(stage), command=cast(Command, stage.command))
            except ConfigError as error:
                problems += [
                    Problem(f"stages.{stage.name}: {one.key}", one.message, one.value, one.origin)
                    for one in error.problems
                    if one.key not in known
                ]
        if problems:
            raise ConfigError(problems)

    def states(self) -> dict[str, State]:
        return {one.name: self.state(one) for one in self.stages}

    def state(self, stage: Stage) -> State:
        return self.folders[stage.name].state(self.digests[stage.name], self._reads(stage))

    def begin(self) -> None:
        """Note the stages of the file, in their order, in the folder of the output."""
        names = [one.name for one in self.stages]
        write_json(self.root / STAGES_FILE, {"title": self.file.stem, "stages": names})

    def run(self, stage: Stage) -> None:
        """Run a stage. Raises StageError if it fails or is stopped."""
        folder = self.folders[stage.name]
        folder.begin(self.digests[stage.name], self._reads(stage))
        words, begun = self.words(stage), time.time()
        typed = shlex.join(["r1", *words])
        folder.write(typed=typed)
        code, stopped_by = run_command(words)
        spent = float(folder.record().get("seconds", 0.0)) + time.time() - begun
        output = folder.output if code == 0 else None
        folder.write(seconds=spent, ended=output is not None, output=output and str(output))
        again = f"{typed_command(sys.argv[0], os.environ)} run {shlex.quote(str(self.file))}"
        then = f"to resume: {again}\n  the stage's command: {typed}"
        if stopped_by is not None:
            name = signal.Signals(stopped_by).name
            raise StageError(f"stage {stage.name} was stopped by {name}; {then}", stopped_by)
        if code:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            raise StageError(f"stage {stage.name} {how}; {then}")
        if output is None:
            raise StageError(f"stage {stage.name} ended without its output, {folder.planned}; {then}")

    def words(self, stage: Stage) -> list[str]:
        """Return the command of a stage, in words."""
        outputs, folder = self._outputs(), self.folders[stage.name]
        words = [stage.command]
        if stage.argument:
            words.append(str(resolve(stage.argument.value, outputs)))
        if stage.kind.has_config:
            words += self._configuration(stage)
        if stage.command == "eval":
            words += ["--json", str(folder.planned)]
        elif stage.command not in ("train", "sft"):
            words += ["--output", str(folder.planned)]
        for one in stage.options:
            value, name = resolve(one.value, outputs), f"--{one.key.replace('_', '-')}"
            if isinstance(value, bool):
                words += [name] * value
            else:
                words += [
                    word for each in (value if isinstance(value, list) else [value]) for word in (name, str(each))
                ]
        return words

    def _configuration(self, stage: Stage) -> list[str]:
        outputs = {name: _weights(path) for name, path in self._outputs().items()}
        words = [f"config={stage.config}"]
        words += [f"{one.key}={json.dumps(resolve(one.value, outputs), ensure_ascii=False)}" for one in stage.settings]
        folder = self.folders[stage.name].path
        return [*words, f"trainer.save_checkpoint_path={folder}"] if stage.command in ("train", "sft") else words

    def _reads(self, stage: Stage) -> dict[str, str]:
        """Return the fingerprints of the complete outputs that a stage reads, by the names of their stages."""
        needed = [self.folders[name] for name in stage.needs]
        found = {one.stage.name: one.output for one in needed if one.record().get("ended")}
        return {name: output_fingerprint(output) for name, output in found.items() if output is not None}

    def _outputs(self) -> dict[str, Path]:
        return {name: folder.output or folder.planned for name, folder in self.folders.items()}


def _weights(output: Path) -> Path:
    """Return the folder of a checkpoint's model, which configurations name; another output itself."""
    return output / "actor" if (output / "actor").is_dir() else output


def digest_of(stage: Stage, digests: Mapping[str, str], known: dict[str, str] | None = None) -> str:
    """Return the digest of a stage's inputs: its command, settings, files that these name, and the stages it needs.

    Args:
        known: fingerprints of files by path; new ones are added, so that no file is read for several stages.
    """
    known = {} if known is None else known
    config = stage.kind.has_config and stage.config and Path(stage.config).is_file()
    base = {one.key: one.value for one in (read_file(Path(stage.config)) if config and stage.config else ())}
    settings = base | {one.key: one.value for one in stage.settings}
    own = {one.key: one.value for one in stage.inputs if one not in stage.settings}
    read = [pair for pair in (*settings.items(), *own.items()) if not WRITTEN.match(pair[0])]
    paths = sorted({path for key, value in read for path in _paths(value, bare=bool(PATH_KEY.search(key)))})
    known |= {path: fingerprint(Path(path).expanduser()) for path in paths if path not in known}
    files = [(path, known[path]) for path in paths]
    whole = [stage.command, sorted(settings.items()), sorted(own.items()), files, [digests[one] for one in stage.needs]]
    return hashlib.sha256(json.dumps(whole, default=str).encode()).hexdigest()


def _paths(value: object, *, bare: bool) -> Iterator[str]:
    """Yield the files and folders that a value names: PATH, PATH:FUNCTION, PATH@SPLIT, KIND@PATH, each with a slice.

    Args:
        bare: whether a name without a slash and a dot can be a path.
    """
    if isinstance(value, list | dict):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _paths(one, bare=bare)
    elif isinstance(value, str):
        plain = re.sub(r"\[[^\[\]]*\]$", "", value)
        head, _, tail = plain.rpartition("@")  # without an @ the tail is all
        for name in (plain.rpartition(":")[0], head, tail):
            if name and (bare or "/" in name or "." in name.strip(".")) and Path(name).expanduser().exists():
                yield name


def fingerprint(path: Path) -> str:
    """Return a digest of a file's content, or of the names, sizes and times of a folder's files."""
    if path.is_file():
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    return _digest_of_files(path, lambda one: (one.st_size, one.st_mtime_ns), "")


def output_fingerprint(path: Path) -> str:
    """Return a digest of a file's content, or of the names and sizes of a folder's data, which a copy keeps."""
    return fingerprint(path) if path.is_file() else _digest_of_files(path, lambda one: (one.st_size,), OUTPUT_DATA)


def _digest_of_files(folder: Path, describe: Callable[[os.stat_result], object], ends: str | tuple[str, ...]) -> str:
    found = sorted(one for one in folder.rglob("*") if one.is_file() and one.name.endswith(ends))
    listed = [folder.name, *((str(one.relative_to(folder)), describe(one.stat())) for one in found)]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()


def run_command(words: list[str]) -> tuple[int, int | None]:
    """Run `r1` in a process of its own that ends with this one; return its exit code and the signal that stopped it.

    Signals to this process go to the command, as if it had been typed: the first ends it when it can resume, the second
    at once. Ctrl-C in a terminal reaches this process only. On other systems than Linux the command outlives a SIGKILL.
    """
    started: list[subprocess.Popen[bytes]] = []
    asked: list[int] = []

    def forward(number: int, _: object) -> None:
        asked.append(number)
        for process in started:
            process.send_signal(number)

    def suspend(_: int, __: object) -> None:
        for process in started:
            process.send_signal(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        for process in started:  # `fg` has continued this process
            process.send_signal(signal.SIGCONT)

    preexec = partial(die_with_parent, os.getpid()) if sys.platform == "linux" else None
    with _handling({signal.SIGINT: forward, signal.SIGTERM: forward, signal.SIGTSTP: suspend}):
        started.append(subprocess.Popen([*R1, *words], process_group=0, preexec_fn=preexec))
        if asked:  # while it started
            started[0].send_signal(asked[0])
        code = started[0].wait()
    return code, asked[0] if asked else None


@contextmanager
def _handling(handlers: "Mapping[signal.Signals, Callable[[int, object], None]]") -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
