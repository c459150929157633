"""Record which rows a run leaves out, and whether a resumed run has the same rows."""

import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

log = logging.getLogger("r1")

LEFT_OUT, DIGESTS = "left_out_rows.txt", "rows.json"


class CheckedRows(Protocol):
    """The part of a data set that is recorded."""

    digest: str

    def left_out(self) -> Iterable[str]:
        """Every row that is not used, with the reason."""


def record_rows(folder: Path, named: Sequence[tuple[str, CheckedRows]], *, resumed: bool) -> None:
    """Write every row that is left out with the reason, and warn of sources that have changed since the run started."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"{name}: {reason}\n" for name, rows in named for reason in rows.left_out()]
    if lines:
        (folder / LEFT_OUT).write_text("".join(lines), encoding="utf-8")
        log.warning("all %d rows that are left out stand in %s", len(lines), folder / LEFT_OUT)
    path, digests = folder / DIGESTS, {name: rows.digest for name, rows in named}
    if resumed and path.is_file():
        before = json.loads(path.read_text(encoding="utf-8"))
        for name, digest in digests.items():
            if before.get(name, digest) != digest:
                log.warning("going on with other rows than before: %s has changed since the run was begun", name)
    path.write_text(json.dumps(digests, indent=1), encoding="utf-8")
