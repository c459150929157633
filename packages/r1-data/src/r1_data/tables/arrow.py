"""Arrow columns as rows: a `datasets.Dataset`, a hub split, or a folder written by `save_to_disk`.

Pictures stay the encoded bytes that are stored.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from r1_data.tables.table import BatchedReader, as_dicts
from r1_data.types import DataError, Overlong, Row

if TYPE_CHECKING:
    import datasets
    import pyarrow

_STATE, _INFO, _SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"  # what `save_to_disk` writes


class ArrowTable:
    """Rows of an object that returns an Arrow table for a slice, converted on request."""

    def __init__(self, columns: "datasets.Dataset | pyarrow.Table") -> None:
        self._columns = columns
        self._rows = BatchedReader(self._read)

    def __len__(self) -> int:
        return len(self._columns)

    def __getitem__(self, index: int) -> tuple[int, Row]:
        try:
            return index + 1, self._rows[index]
        except Overlong as error:
            raise Overlong(f"row {index + 1}: {error}") from error

    def _read(self, start: int, most: int) -> list[Row]:
        return as_dicts(self._columns[start : start + most])


class SavedTable(ArrowTable):
    """A folder that `datasets.Dataset.save_to_disk` wrote, memory-mapped."""

    def __init__(self, folder: Path) -> None:
        """Raises DataError with the missing or broken file."""
        import pyarrow

        self.path = folder
        try:
            state = json.loads((folder / _STATE).read_bytes())
            files = [pyarrow.memory_map(str(folder / Path(one["filename"]).name)) for one in state["_data_files"]]
            parts = [pyarrow.ipc.open_stream(file).read_all() for file in files]
            super().__init__(pyarrow.concat_tables(parts) if parts else pyarrow.table({}))
        except (OSError, ValueError, LookupError, TypeError, pyarrow.ArrowException) as error:
            raise DataError(f"{folder}: a saved data set that cannot be read ({error})") from error

    def __reduce__(self) -> tuple[object, ...]:
        return SavedTable, (self.path,)


def saved_splits(folder: Path) -> dict[str, Path]:
    """Return the folder of each split of a saved data set, "" for one without splits; {} for any other folder.

    Raises DataError if the list of splits cannot be read.
    """
    if (folder / _STATE).is_file() and (folder / _INFO).is_file():
        return {"": folder}
    if not (folder / _SPLITS).is_file():
        return {}
    try:
        return {str(name): folder / str(name) for name in json.loads((folder / _SPLITS).read_bytes())["splits"]}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(f"{folder / _SPLITS}: the list of splits cannot be read ({error})") from error


def open_hub(name: str, configuration: str | None, split: str, revision: str | None = None) -> ArrowTable:
    """Load a split of a hub data set through `datasets`, from ModelScope if USE_MODELSCOPE_HUB=1.

    Raises DataError.
    """
    import datasets

    if os.environ.get("USE_MODELSCOPE_HUB", "").lower() in ("1", "true", "y", "yes"):
        name, revision = _from_modelscope(name, revision), None
    try:
        dataset = datasets.load_dataset(name, configuration, split=split, revision=revision)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"as a hub dataset (split {split!r}) it cannot be loaded: {error}") from error
    return ArrowTable(dataset.with_format("arrow"))


def download_files(name: str, files: Sequence[str], revision: str | None = None) -> list[str]:
    """Download files of a hub data set; return their paths. Raises DataError."""
    from huggingface_hub import hf_hub_download

    try:
        return [hf_hub_download(name, file, repo_type="dataset", revision=revision) for file in files]
    except (OSError, ValueError) as error:  # the hub's own errors are OSErrors
        raise DataError(f"{name!r}: {', '.join(files)} cannot be downloaded: {error}") from error


def _from_modelscope(name: str, revision: str | None) -> str:
    try:
        from modelscope import dataset_snapshot_download
    except ImportError as error:
        raise DataError("USE_MODELSCOPE_HUB is set, but modelscope is not installed: pip install modelscope") from error
    try:
        return str(dataset_snapshot_download(name, revision=revision))
    except Exception as error:  # modelscope's error types differ by version
        raise DataError(f"as a data set of ModelScope it cannot be had: {error}") from error
