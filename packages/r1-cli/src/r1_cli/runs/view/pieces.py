"""The text of each token of an answer, if the run's tokenizer is on this machine."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from r1_cli.runs.reader import RunReader

FILE = "tokenizer.json"


class TokenTexts:
    def __init__(self, run: RunReader) -> None:
        self._run = run

    def decode(self, tokens: Sequence[int] | None) -> list[str] | None:
        """Return each token's text, � for a part of a character; None without a tokenizer."""
        if tokens is None or self._tokenizer is None:
            return None
        return [self._tokenizer.decode([token], skip_special_tokens=False) for token in tokens]

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        for folder in self._folders():
            try:
                return Tokenizer.from_file(str(folder / FILE))
            except Exception:  # the library raises no narrower one, for a file that is not there or not a tokenizer
                continue
        return None

    def _folders(self) -> list[Path]:
        """Return folders with the tokenizer: checkpoints, newest first, then the initial model."""
        found = sorted(self._run.path.glob(f"global_step_*/actor/{FILE}"), key=lambda path: path.stat().st_mtime)
        folders = [path.parent for path in reversed(found)]
        try:
            model = self._run.settings()["worker"]["actor"]["model"]
            folders += [Path(model[key]) for key in ("tokenizer_path", "model_path") if model.get(key)]
        except (OSError, ValueError, KeyError, TypeError):
            pass
        return [folder for folder in folders if (folder / FILE).is_file()]
