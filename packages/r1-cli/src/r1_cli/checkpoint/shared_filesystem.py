"""Whether every node sees the folders of a run: a token file shows it of one that is written to, lists of others.

The driver opens `shown_folders`; each node is sent the `Proof` and asked `find_unseen`. None of it knows of Ray.
"""

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Token:
    """A file that was written a moment ago, so that another folder of the same name does not have it.

    Example: `Token("trainer.save_checkpoint_path", "/shared/run", ".seen_3f09", "9c41…")`.
    """

    key: str
    folder: str
    name: str
    word: str


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a folder that is only read, which may as well be a copy: names and bytes.

    Example: `Listing("worker.actor.model.model_path", "/models/qwen", (("config.json", 663),))`.
    """

    key: str
    folder: str
    files: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Unseen:
    """A folder that a node does not see as the driver does, the key that names it, and what is wrong."""

    key: str
    folder: str
    why: str


@dataclass(frozen=True, slots=True)
class Proof:
    """What a node has to find."""

    token: Token
    listings: tuple[Listing, ...]

    def find_unseen(self) -> list[Unseen]:
        """Return, on a node, the folders that it does not see as the driver does; asked while they are shown."""
        unseen = []
        if why := find_token(self.token):
            unseen.append(Unseen(self.token.key, self.token.folder, why))
        for listing in self.listings:
            if why := compare_files(listing):
                unseen.append(Unseen(listing.key, listing.folder, why))
        return unseen


@contextmanager
def shown_folders(written: tuple[str, Path], read: Mapping[str, Path]) -> Iterator[Proof]:
    """Leave a token in the folder that all nodes write to, which is made if need be, and list those that they read.

    Args:
        written: the key that names the folder, and the folder.
        read: folders by key. What is no folder here, such as a hub name, is left out.

    Raises:
        OSError: the folder cannot be written to here.
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
    """Return names and bytes of a model's files."""
    files = [path for path in folder.iterdir() if path.suffix in (".json", ".safetensors") and path.is_file()]
    return tuple(sorted((path.name, path.stat().st_size) for path in files))


def find_token(token: Token) -> str | None:
    """Say what is wrong with the folder that is written to, None if nothing is."""
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
    """Say in what a folder that is read differs from the driver's, None if in nothing."""
    folder = Path(listing.folder)
    if not folder.is_dir():
        return "is no folder there, set one that all nodes see, or copy it to the same place on each"
    here, there = dict(list_files(folder)), dict(listing.files)
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name):
            what = "is missing" if name not in here else "is one more" if name not in there else "has another size"
            return f"has other files there ({name} {what}), they are to be the same on all nodes"
    return None
