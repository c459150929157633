"""Find the code blocks of pages, and run them in a folder that looks like the repository.

A block with `title="NAME"` is a file of that name; other Python runs in one namespace a page; `console` blocks are
commands of r1, in this process. A run of an example that is no dry run is made tiny by further words. What
pages leave to the reader, `my-model` and `config.yaml` for example, is of the quickstart, and tiny.
"""

import json
import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner
from endtoend import QUICKSTART, ROOT, SMALL

from r1_cli.config.schema import schema
from r1_cli.config.settings import read_file
from r1_cli.main import main

FENCE = re.compile(r"^```([\w-]*)(.*)$")
TITLE = re.compile(r'title="([^"]+)"')
TINY = [*SMALL, "trainer.max_steps=2", "trainer.save_freq=2", "trainer.val_freq=2", "trainer.val_before_train=false"]
TINY_TASK = ["trainer.max_steps=2", "data.max_response_length=8", "worker.rollout.n=2"]
NEED_FILES = ("docs/fine-tuning.md", "docs/sampling.md")  # pages whose commands read files that are the reader's


@dataclass(frozen=True, slots=True)
class Block:
    """One block: `language` is what stands behind the fence, or "indented"."""

    page: str  # from the repository's root
    line: int
    language: str
    title: str | None
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line} ({self.language})"


def blocks_of(page: Path) -> Iterator[Block]:
    """Yield a page's blocks in order."""
    name, lines, index = page.relative_to(ROOT).as_posix(), page.read_text(encoding="utf-8").splitlines(), 0
    while index < len(lines):
        start, fence = index, FENCE.match(lines[index].lstrip())
        if fence:
            index = next(i for i in range(start + 1, len(lines)) if lines[i].strip() == "```")
            title = TITLE.search(fence[2])
            text = "\n".join(lines[start + 1 : index])
            if fence[1] != "math":  # a formula, no code
                yield Block(name, start + 1, fence[1], title and title[1], text + "\n")
        elif lines[index].startswith("    ") and (start == 0 or not lines[start - 1].strip()):
            while index + 1 < len(lines) and (lines[index + 1].startswith("    ") or not lines[index + 1].strip()):
                index += 1
            text = "\n".join(line[4:] for line in lines[start : index + 1]).strip("\n")
            yield Block(name, start + 1, "indented", None, text + "\n")
        index += 1


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command, lines that end in a backslash or inside a quote being one with the next."""
    held = ""
    for line in text.splitlines():
        held += line
        if held.endswith("\\"):
            held = held[:-1]
            continue
        try:
            words = shlex.split(held, comments=True)
        except ValueError:  # a quote that a later line closes
            held += "\n"
            continue
        held = ""
        if words:
            yield words[2:] if words[:2] == ["uv", "run"] else words
    assert not held, f"a command does not end: {held}"


def run_blocks(blocks: Sequence[Block], desk: Path) -> None:
    """Run blocks of one page in their order, in `desk`, the current folder."""
    (desk / "examples").symlink_to(ROOT / "examples")
    if blocks[0].page in NEED_FILES:
        write_reader_files(desk)
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks:
        if block.title is not None:
            Path(block.title).parent.mkdir(parents=True, exist_ok=True)
            Path(block.title).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            exec(compile(block.text, str(block), "exec"), names)
        elif block.language == "yaml":
            read_keys(block, desk)
        else:
            assert block.language == "console", f"{block}: nobody runs this"
            for words in commands(block.text):
                run_command(words, block)


def write_reader_files(desk: Path) -> None:
    """Write what pages leave to the reader: a model, rows, a reward, and configurations of tiny runs."""
    (desk / "my-model").symlink_to(ROOT / "examples/quickstart/model")
    shutil.copy(ROOT / "examples/quickstart/reward.py", desk)
    asked = [{"role": "user", "content": "How many shapes?"}]
    right, wrong = ([{"role": "assistant", "content": f"There are {count}."}] for count in "34")
    (desk / "rows.jsonl").write_text(8 * f"{json.dumps({'messages': asked + right})}\n")
    (desk / "held_out.jsonl").write_text(json.dumps({"messages": asked + wrong}) + "\n")
    (desk / "pairs.jsonl").write_text(8 * f"{json.dumps({'prompt': asked, 'chosen': right, 'rejected': wrong})}\n")
    settings = yaml.safe_load((ROOT / QUICKSTART).read_text())
    for word in [*TINY, "data.train_files=examples/quickstart/train.parquet[:8]"]:
        key, _, value = word.partition("=")
        *sections, name = key.split(".")
        section = settings
        for part in sections:
            section = section[part]
        section[name] = value if name.endswith("_files") else yaml.safe_load(value)
    for name in ("config.yaml", "task.yaml"):
        (desk / name).write_text(yaml.safe_dump(settings))
    del settings["algorithm"]  # which has no reference
    settings["data"] = {"train_files": "pairs.jsonl", "max_length": 128, "filter_overlong_prompts_workers": 1}
    settings["trainer"]["experiment_name"] = "pairs"
    (desk / "pairs.yaml").write_text(yaml.safe_dump(settings))


def read_keys(block: Block, desk: Path) -> None:
    """A part of a configuration must have keys that there are."""
    (desk / "part.yaml").write_text(block.text, encoding="utf-8")
    unknown = [setting.key for setting in read_file(desk / "part.yaml") if not schema().has(setting.key)]
    assert not unknown, f"{block}: {unknown}"


def run_command(words: list[str], block: Block) -> None:
    """Run one command of r1, whose output may go to a file; it must succeed."""
    words, target = (words[:-2], words[-1]) if words[-2:-1] == [">"] else (words, None)
    assert words[0] == "r1", f"{block}: {words[0]} is no command of r1"
    words = [word.replace("global_step_N", "global_step_2") for word in words]
    words = [re.sub(r"RUN/global_step_\d+", last_checkpoint, word) for word in words]
    if words[1] == "train" and not {"--dry-run", "config.yaml", "task.yaml"} & {*words}:
        words += TINY_TASK if "my-task/config.yaml" in words else TINY
    asked = "How many shapes?" if words[1] == "chat" else None
    result = CliRunner(env={"COLUMNS": "200"}).invoke(main, words[1:], input=asked)
    assert result.exit_code == 0, f"{block}: {shlex.join(words)}\n{result.output}\n{result.exception!r}"
    if target is not None:
        Path(target).write_text(result.stdout, encoding="utf-8")


def last_checkpoint(_: re.Match[str]) -> str:
    return str(max(Path("checkpoints").glob("*/*/global_step_*"), key=lambda folder: folder.stat().st_mtime))
