"""Detect which columns hold the prompt and the answer of a row, from the columns' names."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from r1_data.types import DataError


@dataclass(frozen=True, slots=True)
class Columns:
    """The names of the columns to read; every other column of a row becomes metadata.

    `reward_model.ground_truth` is the entry `ground_truth` of the mapping in column `reward_model`.
    """

    prompt: str = "prompt"  # of fine-tuning rows also: of the messages; "": the answer's column holds them, too
    ground_truth: str = "answer"  # of fine-tuning rows: the answer to train on; "": the messages hold it
    images: str = "images"
    videos: str = "videos"


@dataclass(frozen=True, slots=True)
class Format:
    name: str
    prompts: tuple[str, ...]  # columns that may hold the prompt; the first present one counts
    ground_truths: tuple[str, ...] = ()  # columns that may hold the answer; the first present one counts
    needs: tuple[str, ...] = ()  # columns that identify its rows

    def find(self, keys: set[str]) -> tuple[str, str] | None:
        """Return the prompt and answer columns of a row with these columns, None if its format is another one.

        A column that the format does not have is "".
        """
        prompt = next((name for name in self.prompts if name in keys), "")
        answer = next((name for name in self.ground_truths if name.partition(".")[0] in keys), "")
        complete = (prompt or not self.prompts) and (answer or not self.ground_truths)
        return (prompt, answer) if complete and keys.issuperset(self.needs) else None


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
_QUESTIONS = ("prompt", "question", "problem", "instruction")
# Of fine-tuning rows. Preference rows stand first: some hold the chosen conversation a second time as `messages`.
CONVERSATION_FORMATS = (
    Format("pairs", ("conversations", *_QUESTIONS, "messages"), ("chosen",), ("rejected",)),  # TRL, LLaMA-Factory
    Format("implicit_pairs", (), ("chosen",), ("rejected",)),  # the prompt is what both begin with
    Format("sharegpt", ("conversations",)),
    Format("messages", ("messages",)),  # of OpenAI; TRL, veRL, `r1 rows --as sft`
    Format("alpaca", ("instruction",), ("output", "response")),
    Format("completion", _QUESTIONS, ("completion", "response", "output")),  # TRL
    Format("lmm_r1", ("message",)),  # messages as JSON text
    Format("r1v", ("problem",), ("solution",)),
    Format("implicit_completion", (), ("completion",)),  # all messages stand in it
)
CONVERSATION_NAMES = tuple(form.name for form in CONVERSATION_FORMATS)
NAMES = tuple(form.name for form in FORMATS)


def detect_columns(row_keys: Iterable[str], configured: Columns, explicit: bool) -> Columns:
    """Return the columns of the format that rows with these keys have. Arguments as of `detect`."""
    return detect_once(tuple(row_keys), configured, explicit).columns


@lru_cache(maxsize=256)  # a source has few different sets of columns
def detect_once(
    row_keys: tuple[str, ...], configured: Columns, explicit: bool, formats: tuple[Format, ...] = FORMATS
) -> Detected:
    return detect(row_keys, configured, explicit=explicit, formats=formats)


def detect(
    row_keys: Iterable[str],
    configured: Columns,
    *,
    explicit: bool = False,
    row_format: str | None = None,
    formats: Sequence[Format] = FORMATS,
) -> Detected:
    """Find the columns to read in a row with `row_keys`.

    With `row_format`, a name of `formats`, only that format is tried. Otherwise columns that the user named
    (`explicit`) are used, present or not; else the configured ones if both are present, else those of the first known
    format. Always, `image` replaces missing `images`, `video` missing `videos`, and `reward_model.ground_truth` a
    missing answer column.

    Raises DataError for an unknown `row_format`, and for a row without its columns.
    """
    keys = set(row_keys)
    conversations = formats is not FORMATS
    prompt, answer, name = configured.prompt, configured.ground_truth, ""
    fitting = [(form.name, *found) for form in formats if (found := form.find(keys))]
    if row_format is not None:
        name, prompt, answer = _named(row_format, fitting, keys, formats)
    elif not explicit and (conversations or not {prompt, answer} <= keys):
        name, prompt, answer = fitting[0] if fitting else (name, prompt, answer)
    elif not conversations and answer.partition(".")[0] not in keys and "reward_model" in keys:
        answer = _VERL_GROUND_TRUTH
    name = name or next((entry[0] for entry in fitting if entry[1:] == (prompt, answer)), "")
    columns = replace(configured, prompt=prompt, ground_truth=answer)
    if columns.images not in keys and "image" in keys:
        columns = replace(columns, images="image")
    if columns.videos not in keys and "video" in keys:
        columns = replace(columns, videos="video")
    return Detected(columns, name)


def _named(
    row_format: str, fitting: list[tuple[str, str, str]], keys: set[str], formats: Sequence[Format]
) -> tuple[str, str, str]:
    requested = next((form for form in formats if form.name == row_format), None)
    if requested is None:
        names = ", ".join(form.name for form in formats)
        raise DataError(f"there is no row format {row_format!r}; there are {names}")
    found = next((entry for entry in fitting if entry[0] == row_format), None)
    if found is None:
        prompts, answers = " or ".join(requested.prompts), " or ".join(requested.ground_truths)
        prompts, answers = prompts or "the answer's column", answers or "the messages"
        more = f" and {', '.join(requested.needs)}" if requested.needs else ""
        raise DataError(
            f"not of row format {row_format} (prompt in {prompts}, answer in {answers}{more}); "
            f"columns found: {', '.join(sorted(keys))}"
        )
    return found
