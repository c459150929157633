"""The prompts of a run: every row is checked before training starts, and rendered when it is asked for."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from r1_data.messages import Columns, detect_columns, to_example
from r1_data.render import Renderer
from r1_data.types import DataError, Example, Prompt

if TYPE_CHECKING:
    from jinja2 import Template

_SHOWN = 10  # rows that an error lists


@dataclass(frozen=True, slots=True)
class Summary:
    """What the check before training found."""

    read: int  # rows
    kept: int  # rows
    overlong: int  # rows left out because their prompt is over the limit
    longest: int  # tokens of the longest prompt kept


class PromptDataset:
    """Rows as prompts: `dataset[i]` renders the i-th row kept; a few renderings are remembered, bounded in bytes."""

    def __init__(
        self,
        rows: Sequence[tuple[str, dict[str, Any]]],
        renderer: Renderer,
        *,
        max_prompt_length: int,
        filter_overlong: bool = True,
        columns: Columns | None = None,
        explicit_columns: bool = False,
        format_prompt: "Template | None" = None,
        system_prompt: str | None = None,
        image_dir: str | None = None,
        progress: Callable[[int, int], None] | None = None,
        cache_bytes: int = 256 * 2**20,
    ) -> None:
        """Check every row: its columns, its pictures' headers, its prompt's length.

        Args:
            rows: (row id, row), as `read_rows` gives them.
            max_prompt_length: tokens, pictures included; longer rows are left out with `filter_overlong`, else refused.
            explicit_columns: the user named `columns`, so known layouts are not tried (see `detect_columns`).
            progress: called with (rows checked, rows in all) after every row.
            cache_bytes: memory for renderings kept.

        Raises:
            DataError: rows that cannot be used (up to ten are listed, with reasons and the total), or no row is left.
        """
        self._rows, self._renderer = rows, renderer
        self._columns, self._explicit = columns or Columns(), explicit_columns
        self._format_prompt, self._system_prompt, self._image_dir = format_prompt, system_prompt, image_dir
        self._cache = _PromptCache(cache_bytes)
        self._kept, self.summary = self._check(max_prompt_length, filter_overlong, progress)

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> Prompt:
        """Render the prompt of the i-th row kept. Raises DataError that names the row if a picture does not decode."""
        row = self._kept[index]
        prompt = self._cache.get(row)
        if prompt is None:
            prompt = self._renderer.render(self._example(row))
            self._cache.put(row, prompt)
        return prompt

    def _example(self, row_index: int) -> Example:
        row_id, row = self._rows[row_index]
        return to_example(
            row_id,
            row,
            detect_columns(row, self._columns, self._explicit),
            format_prompt=self._format_prompt,
            system_prompt=self._system_prompt,
            image_dir=self._image_dir,
        )

    def _check(
        self, limit: int, filter_overlong: bool, progress: Callable[[int, int], None] | None
    ) -> tuple[list[int], Summary]:
        total, kept, refused, longest, overlong, longest_overlong = len(self._rows), [], [], 0, 0, 0
        for index in range(total):
            try:
                example = self._example(index)
                length = self._renderer.prompt_length(example)
                if length <= limit:
                    kept.append(index)
                    longest = max(longest, length)
                elif filter_overlong:
                    overlong += 1
                    longest_overlong = max(longest_overlong, length)
                else:
                    raise DataError(f"{example.id}: the prompt has {length} tokens, max_prompt_length is {limit}")
            except DataError as error:
                refused.append(str(error))
            if progress is not None:
                progress(index + 1, total)
        if refused:
            raise DataError(_list_refused(refused, total))
        if total == 0:
            raise DataError("the dataset is empty: its files hold no rows")
        if not kept:
            raise DataError(
                f"the dataset is empty: all {overlong} rows were filtered out because their prompts are over "
                f"max_prompt_length={limit} tokens (the longest has {longest_overlong})"
            )
        return kept, Summary(total, len(kept), overlong, longest)


def _list_refused(reasons: list[str], total: int) -> str:
    more = len(reasons) - _SHOWN
    lines = [f"{len(reasons)} of {total} rows cannot be used:", *(f"  {reason}" for reason in reasons[:_SHOWN])]
    return "\n".join([*lines, f"  ... and {more} more"] if more > 0 else lines)


class _PromptCache:
    """The prompts used last, up to a number of bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._bytes = max_bytes, 0
        self._prompts: OrderedDict[int, Prompt] = OrderedDict()

    def get(self, key: int) -> Prompt | None:
        prompt = self._prompts.get(key)
        if prompt is not None:
            self._prompts.move_to_end(key)
        return prompt

    def put(self, key: int, prompt: Prompt) -> None:
        self._prompts[key] = prompt
        self._bytes += _size(prompt)
        while self._bytes > self._max_bytes and self._prompts:
            _, oldest = self._prompts.popitem(last=False)
            self._bytes -= _size(oldest)


def _size(prompt: Prompt) -> int:
    """About how many bytes a prompt holds: its tensors, its pictures' pixels (RGB), its tokens."""
    tensors = sum(tensor.nbytes for tensor in (prompt.position_ids, *prompt.model_inputs.values()))
    pixels = sum(3 * image.width * image.height for image in prompt.images)
    return tensors + pixels + 16 * len(prompt.token_ids) + len(prompt.text)
