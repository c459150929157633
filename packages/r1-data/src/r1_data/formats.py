"""Detect which columns hold the prompt and the ground truth, from the columns' names."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from r1_data.types import DataError


@dataclass(frozen=True, slots=True)
class Columns:
    """The names of the columns to read; every other column of a row becomes metadata.

    `reward_model.ground_truth` is the entry `ground_truth` of the mapping in column `reward_model`.
    """

    prompt: str = "prompt"
    ground_truth: str = "answer"
    images: str = "images"
    videos: str = "videos"


@dataclass(frozen=True, slots=True)
class Format:
    name: str
    prompts: tuple[str, ...]  # columns that may hold the prompt; the first present one counts
    ground_truths: tuple[str, ...]  # columns that may hold the ground truth; the first present one counts
    needs: tuple[str, ...] = ()  # columns that identify its rows

    def find(self, keys: set[str]) -> tuple[str, str] | None:
        """Return the prompt and answer columns of a row with these columns, None if its format is another one."""
        prompt = next((name for name in self.prompts if name in keys), None)
        answer = next((name for name in self.ground_truths if name.partition(".")[0] in keys), None)
        return (prompt, answer) if prompt and answer and keys.issuperset(self.needs) else None


@dataclass(frozen=True, slots=True)
class Detected:
    """Columns to read, and their format's name ("" if unknown)."""

    columns: Columns
    format: str


_VERL_GROUND_TRUTH = "reward_model.ground_truth"
_ANSWERS = ("answer", "solution", "ground_truth", "label", "target")

# In the order in which they are tried: of two formats that accept the same row, the one meant for it stands first.
FORMATS = (
    Format("rlpr", ("prompt",), (_VERL_GROUND_TRUTH,), ("reward_model", "scoreA")),  # scores of the untrained model
    Format("verl", ("prompt",), (_VERL_GROUND_TRUTH,), ("reward_model",)),
    Format("trl", ("prompt",), _ANSWERS),  # text or messages
    Format("easyr1", ("problem",), ("answer",)),
    Format("r1v", ("problem",), ("solution",)),
    Format("gsm8k", ("question",), ("answer",)),
    Format("messages", ("messages",), _ANSWERS),  # of OpenAI
    Format("lmm_r1", ("message", "input"), ("answer", "label")),  # messages as JSON text
)
NAMES = tuple(form.name for form in FORMATS)


def detect_columns(row_keys: Iterable[str], configured: Columns, explicit: bool) -> Columns:
    return _detect_once(tuple(row_keys), configured, explicit)


@lru_cache(maxsize=256)  # a source has few different sets of columns
def _detect_once(row_keys: tuple[str, ...], configured: Columns, explicit: bool) -> Columns:
    return detect(row_keys, configured, explicit=explicit).columns


def detect(
    row_keys: Iterable[str], configured: Columns, *, explicit: bool = False, row_format: str | None = None
) -> Detected:
    """Find the columns to read in a row with `row_keys`.

    With `row_format`, a name of `FORMATS`, only that format is tried. Otherwise columns that the user named
    (`explicit`) are used, present or not; else the configured ones if both are present, else those of the first known
    format. Always, `image` replaces missing `images`, `video` missing `videos`, and `reward_model.ground_truth` a
    missing answer column.

    Raises DataError for an unknown `row_format`, and for a row without its columns.
    """
    keys = set(row_keys)
    prompt, answer, name = configured.prompt, configured.ground_truth, ""
    fitting = [(form.name, *found) for form in FORMATS if (found := form.find(keys))]
    if row_format is not None:
        name, prompt, answer = _named(row_format, fitting, keys)
    elif not explicit and not {prompt, answer} <= keys:
        name, prompt, answer = fitting[0] if fitting else (name, prompt, answer)
    elif answer.partition(".")[0] not in keys and "reward_model" in keys:
        answer = _VERL_GROUND_TRUTH
    name = name or next((entry[0] for entry in fitting if entry[1:] == (prompt, answer)), "")
    columns = replace(configured, prompt=prompt, ground_truth=answer)
    if columns.images not in keys and "image" in keys:
        columns = replace(columns, images="image")
    if columns.videos not in keys and "video" in keys:
        columns = replace(columns, videos="video")
    return Detected(columns, name)


def _named(row_format: str, fitting: list[tuple[str, str, str]], keys: set[str]) -> tuple[str, str, str]:
    requested = next((form for form in FORMATS if form.name == row_format), None)
    if requested is None:
        raise DataError(f"there is no row format {row_format!r}; there are {', '.join(NAMES)}")
    found = next((entry for entry in fitting if entry[0] == row_format), None)
    if found is None:
        prompts, answers = " or ".join(requested.prompts), " or ".join(requested.ground_truths)
        more = f" and {', '.join(requested.needs)}" if requested.needs else ""
        raise DataError(
            f"not of row format {row_format} (prompt in {prompts}, answer in {answers}{more}); "
            f"columns found: {', '.join(sorted(keys))}"
        )
    return found
