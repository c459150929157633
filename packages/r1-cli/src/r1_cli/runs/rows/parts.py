"""The folder of `r1 sample`: what its answers were sampled with, and a parquet file for each block of rows.

A block is rows that stand together in a source and are sampled in one call of the engine. Blocks depend on the rows
alone, so that a killed command and one of several shards write the same files as one that ran through.
"""

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from r1_cli.checkpoint.folders import write_json
from r1_cli.checkpoint.locks import lock_folder, require_free
from r1_cli.config import ConfigError, Problem
from r1_cli.config.section import flatten
from r1_cli.runs.history import JsonObject
from r1_cli.runs.reader import SAMPLES, sample_file
from r1_cli.runs.schema import SCHEMA, write_table
from r1_data.messages import RowReader
from r1_data.references import is_pil
from r1_data.turns.tool_prompt import ToolPrompt
from r1_data.types import Example, MediaReference, Row, Video

log = logging.getLogger("r1")

SETS = "evaluated"  # in the description of an evaluation's answers: about each set of rows, by name
IDENTITY_FILE, TOOLS_FILE, GROUPS_FILE, ASIDE = "sampling.json", "tools.json", "groups.json", "aside"
OF_A_SOURCE = 10**6  # block numbers
KEY = pa.field("key", pa.string())  # column: digest of a group's row, and of what it was sampled with
PART = SCHEMA.append(KEY)

RowGroups: TypeAlias = dict[str, dict[str, list[int]]]  # column -> value -> numbers of the rows that have it


@dataclass(frozen=True, slots=True)
class RowShard:
    """Example: `RowShard.parse("3/8")` has the blocks whose number is 2 modulo 8."""

    number: int = 1  # from 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> "RowShard":
        """Raises ValueError."""
        number, sign, count = text.partition("/")
        if not (sign and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
            raise ValueError(f"a shard is written 3/8, the third of eight; got {text!r}")
        return cls(int(number), int(count))

    def has(self, block: int) -> bool:
        return block % self.count == self.number - 1

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


@dataclass(frozen=True, slots=True)
class Block:
    number: int
    source: int
    rows: Mapping[int, int]  # place in the block -> index of the row in its dataset


def split_blocks(kept: Sequence[Sequence[int]], size: int, limit: int | None = None) -> Iterator[Block]:
    """Yield the blocks of `size` rows of every source, without rows that are left out.

    Args:
        kept: of each source, the numbers of the rows that are sampled, ascending.
        limit: sample the first so many rows only.
    """
    left = limit
    for source, numbers in enumerate(kept):
        places: dict[int, dict[int, int]] = {}
        for index, row in enumerate(numbers[:left]):
            places.setdefault(row // size, {})[row % size] = index
        left = None if left is None else max(left - len(numbers), 0)
        for block, rows in places.items():
            yield Block(source * OF_A_SOURCE + block, source, rows)


# --- keys -------------------------------------------------------------------------------------------------------------


def key_of(example: Example, identity: str) -> str:
    """Return the key of a group: a digest of its row as model and reward see it, and of `identity`."""
    digest = hashlib.blake2b(identity.encode(), digest_size=16)
    shown = [example.id, example.source, example.messages, example.tools, example.ground_truth]
    digest.update(json.dumps(shown, sort_keys=True, default=str).encode())
    for reference in example.media:
        digest.update(_content(reference))
    return digest.hexdigest()


def _content(reference: MediaReference) -> bytes:
    """Return an identity of a picture or video. That of a file is its name and size, so the file may be moved."""
    if isinstance(reference, Video):
        frames = reference.source if isinstance(reference.source, tuple) else (reference.source,)
        return repr(reference.fps).encode() + b"".join(map(_content, frames))
    if isinstance(reference, bytes):
        return hashlib.blake2b(reference, digest_size=16).digest()
    if isinstance(reference, Path):
        size = reference.stat().st_size if reference.exists() else None
        return repr((reference.name, size)).encode()
    if is_pil(reference):
        return hashlib.blake2b(repr(reference.size).encode() + reference.tobytes(), digest_size=16).digest()
    return str(reference).encode()


def digest_rows(rows: Iterable[tuple[str, Row]], reader: RowReader) -> str:
    """Return a digest of the questions, answers and pictures of rows in order, wherever their file is."""
    digest = hashlib.blake2b(digest_size=16)
    for row_id, row in rows:
        digest.update(key_of(replace(reader(row_id, row), id="", source=""), "").encode())
    return f"blake2b:{digest.hexdigest()}"


def digest_identity(identity: JsonObject) -> str:
    """Return a digest of what decides an answer and its score; another grader may score an evaluation's later."""
    identity = {name: value for name, value in identity.items() if name != SETS}
    return hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=16).hexdigest()


# --- files ------------------------------------------------------------------------------------------------------------


class SampleFolder:
    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def locked(self, shard: RowShard) -> Iterator[None]:
        """Lock this shard of the folder. Raises ConfigError if another process has it, or writes other shards."""
        own = f".lock-{shard.number}-of-{shard.count}"
        with lock_folder(self.path, own, key="--output", advice="Wait for it, or name another --shard or --output"):
            for other in sorted(self.path.glob(".lock-*-of-*")):
                if other.name.rpartition("-")[2] != str(shard.count):
                    require_free(self.path, other.name, key="--output", advice="It splits the rows otherwise: wait")
            yield

    def require_same(self, identity: JsonObject) -> None:
        """Write what the answers are sampled with. Raises ConfigError if the folder's were sampled with another."""
        file = self.path / IDENTITY_FILE
        if not file.is_file():
            write_json(file, identity)
            return
        before, now = dict(flatten(self.identity())), dict(flatten(json.loads(json.dumps(identity))))
        if changed := [name for name in {**before, **now} if before.get(name) != now.get(name)]:
            told = "; ".join(f"{name} was {before.get(name)!r}, is {now.get(name)!r}" for name in changed)
            message = f"holds answers that were sampled otherwise ({told}): name another folder"
            raise ConfigError([Problem("--output", message, str(self.path))])

    @property
    def has_identity(self) -> bool:
        return (self.path / IDENTITY_FILE).is_file()

    def identity(self) -> JsonObject:
        found: JsonObject = json.loads((self.path / IDENTITY_FILE).read_text(encoding="utf-8"))
        return found

    def write_tools(self, tools: Mapping[str, ToolPrompt]) -> None:
        """Write what showed tools in the prompts of each source."""
        write_json(self.path / TOOLS_FILE, {source: asdict(prompt) for source, prompt in tools.items()})

    def tools(self) -> dict[str, ToolPrompt]:
        """Return what showed tools in the prompts of each source; {} for single answers."""
        file = self.path / TOOLS_FILE
        found: JsonObject = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        return {source: ToolPrompt(**{**one, "tools": tuple(one["tools"])}) for source, one in found.items()}

    def write_groups(self, groups: Mapping[str, RowGroups]) -> None:
        """Write by what columns the figures of each set are split; no file for none."""
        if groups or (self.path / GROUPS_FILE).is_file():
            write_json(self.path / GROUPS_FILE, groups)

    def groups(self) -> dict[str, RowGroups]:
        """Return what `write_groups` wrote; {} without a file."""
        file = self.path / GROUPS_FILE
        found: dict[str, RowGroups] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        return found

    def file(self, block: int) -> Path:
        return self.path / SAMPLES / sample_file(block, "sample")

    def read(self, block: int, columns: Sequence[str] | None = None) -> pa.Table | None:
        """Return the answers of a block; None without a file, or if it is damaged: then it is put aside."""
        path = self.file(block)
        try:
            return pq.read_table(path, columns=None if columns is None else [*columns], partitioning=None)
        except FileNotFoundError:
            return None
        except (OSError, pa.ArrowException) as error:
            aside = self._free_name(path)
            path.rename(aside)
            log.warning("%s is damaged (%s): its rows are sampled again; it is now %s", path, error, aside)
            return None

    def keys(self, block: int) -> dict[int, str]:
        """Return the keys of the groups of a block that are there, by place."""
        table = self.read(block, ["group", "key"])
        return {} if table is None else dict(zip(*(table[name].to_pylist() for name in ("group", "key")), strict=True))

    def add(self, block: int, table: pa.Table) -> None:
        """Add groups to a block. Older groups of their places are put aside."""
        before = self.read(block)
        if before is not None:
            replaced = pc.is_in(before["group"], value_set=pc.unique(table["group"]))
            if len(old := before.filter(replaced)):
                write_table(old, self._free_name(self.file(block)))
            table = pa.concat_tables([before.filter(pc.invert(replaced)), table])
            table = table.take(pc.sort_indices(table, [("group", "ascending")]))
        write_table(table.combine_chunks(), self.file(block))

    def _free_name(self, path: Path) -> Path:
        number, aside = 1, self.path / ASIDE / path.name
        aside.parent.mkdir(exist_ok=True)
        while aside.exists():
            number += 1
            aside = aside.with_name(f"{path.stem}.{number}{path.suffix}")
        return aside
