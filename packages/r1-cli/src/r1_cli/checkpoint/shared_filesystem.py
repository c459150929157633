"""Check that all nodes share the run's filesystem: a token file for output folders, listings for inputs.

The driver opens `shown_folders` and sends the `Proof` to each node, which calls `find_unseen`.
"""

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Token:
    """A new file, which no other folder of the same name has.

    Example: `Token("trainer.save_checkpoint_path", "/shared/run", ".seen_3f09", "9c41…")`.
    """

    key: str
    folder: str
    name: str
    word: str


@dataclass(frozen=True, slots=True)
class Listing:
    """Names and bytes of the files of an input folder, which may be a copy on each node.

    Example: `Listing("worker.actor.model.model_path", "/models/qwen", (("config.json", 663),))`.
    """

    key: str
    folder: str
    files: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Unseen:
    """A folder, by its key, that a node does not see as the driver does, and what is wrong."""

    key: str
    folder: str
    why: str


@dataclass(frozen=True, slots=True)
class Proof:
    token: Token
    listings: tuple[Listing, ...]

    def find_unseen(self) -> list[Unseen]:
        unseen = []
        if why := find_token(self.token):
            unseen.append(Unseen(self.token.key, self.token.folder, why))
        for listing in self.listings:
            if why := compare_files(listing):
                unseen.append(Unseen(listing.key, listing.folder, why))
        return unseen


@contextmanager
def shown_folders(written: tuple[str, Path], read: Mapping[str, Path]) -> Iterator[Proof]:
    """Write a token in the output folder, and list the input folders.

    Args:
        written: key and path of the output folder, which is created if missing.
        read: input folders by key. Names of the hub, which are no folders, are skipped.

    Raises:
        OSError: the output folder cannot be written.
    """
    key, folder = written[0], written[1].absolute()
    folder.mkdir(parents=True, exist_ok=True)
    token = Token(key, str(folder), f".seen_{secrets.token_hex(8)}", secrets.token_hex(16))
    listings = tuple(
        Listing(key, str(path.absolute()), list_files(path)) for key, path in read.items() if path.is_dir()
    )
    try:
        (folder / token.name).write_text(token.word)
        yield Proof(token, listings)
    finally:
        (folder / token.name).unlink(missing_ok=True)


def list_files(folder: Path) -> tuple[tuple[str, int], ...]:
    files = [path for path in folder.iterdir() if path.suffix in (".json", ".safetensors") and path.is_file()]
    return tuple(sorted((path.name, path.stat().st_size) for path in files))


def find_token(token: Token) -> str | None:
    folder = Path(token.folder)
    try:
        if (folder / token.name).read_text() != token.word:
            return "is another folder there, set one that all nodes share"
    except FileNotFoundError:
        what = "is another folder there" if folder.is_dir() else "is no folder there"
        return f"{what}, set one on a disk that all nodes share"
    except OSError as error:
        return f"cannot be read there ({error.strerror})"
    own = folder / f"{token.name}_{secrets.token_hex(8)}"
    try:
        own.touch()
        own.unlink()
    except OSError as error:
        return f"cannot be written to there ({error.strerror}): every node writes files of a checkpoint"
    return None


def compare_files(listing: Listing) -> str | None:
    folder = Path(listing.folder)
    if not folder.is_dir():
        return "is no folder there, set one that all nodes see, or copy it to the same place on each"
    here, there = dict(list_files(folder)), dict(listing.files)
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name):
            what = "is missing" if name not in here else "is one more" if name not in there else "has another size"
            return f"has other files there ({name} {what}), they are to be the same on all nodes"
    return None
