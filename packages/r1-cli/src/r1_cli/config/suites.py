"""Suites: benchmarks as data files."""

from collections.abc import Mapping, Sequence
from functools import cache
from os.path import isfile
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from r1_cli.config.files import reward_problems
from r1_cli.config.problems import ConfigError, Problem
from r1_cli.config.section import Count, NonNegative, Ratio, Section, Tree
from r1_data.benchmark_rows import AnswerForm, RowForm
from r1_rewards.types import suggest

FOLDER = Path(__file__).parents[1] / "suites"


class SuiteRows(Section):
    """Where the rows are published, and what they must be."""

    hub: str  # the name of a dataset on the hub
    configs: list[str] = Field(default_factory=list)  # its configurations, all read; empty: its only one
    files: list[str] = Field(default_factory=list)  # of the dataset, in place of configurations and split
    split: str = "test"
    revision: str | None = None  # null: no commit was read on a page; the newest one is used
    columns: list[str] = Field(min_length=1)  # every row has them; the digest is over them
    count: Count | None = None  # null: no copy was counted
    digest: str | None = None  # null: no copy could be read
    gated: bool = False  # the hub gives the rows only to who has accepted its terms


class SuiteAnswer(Section):
    column: str  # of tests of a program: columns, with `+` between
    form: AnswerForm = "text"


class SuiteChoices(Section):
    columns: list[str] = Field(min_length=1)  # one that holds a list, or one for each choice
    shuffle: bool = False  # by the row's digest: a row has the same order in every evaluation


class SuiteMedia(Section):
    images: list[str] = Field(min_length=1)  # columns, in the order of the markers `<image 1>`, `<image 2>`, …


class SuitePrompt(Section):
    text: str  # Jinja, with `content` (the question), `choices`, and the row's columns
    source: str  # where it is prescribed or used
    system: str | None = None


class SuiteSample(Section):
    n: Count = 1
    temperature: NonNegative = 0.6  # 0: greedy
    top_p: Ratio = 0.95
    max_tokens: Count = 32768


class Published(Section):
    """A figure that somebody published."""

    model: str
    value: Ratio
    prompt: str  # the name of the suite's prompt that it was measured with
    source: str  # the page that it was read on


class Suite(Section):
    title: str
    page: str  # where the benchmark is described
    rows: SuiteRows
    question: str  # its column
    answer: SuiteAnswer
    choices: SuiteChoices | None = None
    media: SuiteMedia | None = None
    subsets: dict[str, Tree] = Field(default_factory=dict)  # name -> the values of columns that its rows have
    prompts: dict[str, SuitePrompt] = Field(min_length=1)  # the first is used unless another is named
    grader: str  # a reward, as of `worker.reward.reward_function`
    grader_options: Tree = Field(default_factory=dict)
    sample: SuiteSample = SuiteSample()
    metric: Literal["accuracy", "avg@n"] = "accuracy"
    groups: list[str] = Field(default_factory=list)  # columns; figures are also split by their values
    published: list[Published] = Field(default_factory=list)

    @model_validator(mode="after")
    def _fits_together(self) -> "Suite":
        for figure in self.published:
            if figure.prompt not in self.prompts:
                raise ValueError(f"published: {figure.model} names the prompt {figure.prompt!r}, which is not here")
        if self.media and self.choices and self.choices.shuffle:
            raise ValueError("choices.shuffle cannot be used with media: markers in choices would change their order")
        return self

    def row_form(self, subset: str | None = None) -> RowForm:
        return RowForm(
            columns=tuple(self.rows.columns),
            question=self.question,
            answer=self.answer.column,
            answer_form=self.answer.form,
            choices=tuple(self.choices.columns) if self.choices else (),
            shuffle=bool(self.choices and self.choices.shuffle),
            images=tuple(self.media.images) if self.media else (),
            where=self.subsets[subset] if subset else {},
        )


def suite_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


@cache
def load_suite(name: str) -> Suite:
    """Load a suite by name, or a file `./mine.yaml`.

    Raises ConfigError: there is no such suite or file, an unknown key, a value of another type, an unknown grader.
    """
    path = Path(name).expanduser() if name.endswith((".yaml", ".yml")) else FOLDER / f"{name}.yaml"
    if not isfile(path):
        what = "no such suite" if path.parent == FOLDER else "no such file"
        raise suite_error(name, f"{what}{suggest(name, suite_names())}; a file of your own is named ./mine.yaml")
    try:
        suite = Suite.model_validate(yaml.safe_load(path.read_text("utf-8")))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise suite_error(name, f"{path} cannot be read: {error}") from error
    except ValidationError as error:
        found = [Problem(f"{path}: {_place(one['loc'])}", _message(one)) for one in error.errors()]
        raise ConfigError(found) from error
    problems = reward_problems(("grader", "grader_options"), suite.grader, suite.grader_options)
    if found := [Problem(f"{path}: {key}", message) for key, message in problems]:
        raise ConfigError(found)
    return suite


def parse_name(word: str, prompt: str | None) -> tuple[str, Suite, str | None, str]:
    """Return name, suite, subset and prompt of `SUITE[:SUBSET][/PROMPT]`; `prompt` is used if the word has none.

    Raises ConfigError, as `load_suite` does, and for an unknown subset or prompt.
    """
    path, dot, rest = word.partition(".yaml")
    name, tail = (path + dot, rest) if dot else (word.partition("/")[0].partition(":")[0], "")
    tail = tail or word.removeprefix(name)
    subset, _, own = tail.removeprefix(":").partition("/") if tail.startswith(":") else ("", "", tail.removeprefix("/"))
    suite = load_suite(name)
    chosen = own or prompt or next(iter(suite.prompts))
    if chosen not in suite.prompts:
        near = suggest(chosen, suite.prompts)
        raise suite_error(word, f"has no prompt {chosen!r}{near}")
    if subset and subset not in suite.subsets:
        raise suite_error(word, f"has no subset {subset!r}{suggest(subset, suite.subsets)}")
    return Path(name).stem if dot else name, suite, subset or None, chosen


def source_name(word: str, prompt: str | None) -> str:
    """Return the name of a suite's source of rows, `SUITE[:SUBSET]/PROMPT`. Arguments, raises: as `parse_name`."""
    name, _, subset, chosen = parse_name(word, prompt)
    return f"{name}{f':{subset}' if subset else ''}/{chosen}"


def _place(location: tuple[int | str, ...]) -> str:
    return ".".join(map(str, location)) or "suite"


def _message(error: Mapping[str, Any]) -> str:
    if error["type"] != "extra_forbidden":
        return str(error["msg"]).removeprefix("Value error, ")
    model: Any = Suite
    for name in error["loc"][:-1]:
        model = _inner(model, name)
    names = list(model.model_fields) if model else []
    return f"there is no such key{suggest(str(error['loc'][-1]), names)}"


def _inner(model: Any, name: int | str) -> Any:
    """Return the section that a field of a section holds, also as an entry of a list or mapping."""
    if not model or not hasattr(model, "model_fields"):
        return model
    if name not in model.model_fields:
        return model
    annotation = model.model_fields[name].annotation
    inside = [annotation, *getattr(annotation, "__args__", ())]
    return next((one for one in inside if isinstance(one, type) and issubclass(one, Section)), None)


def suite_error(value: str, message: str) -> ConfigError:
    """Return the error of a suite that the command line names."""
    return ConfigError([Problem("suite", message, value, "command line")])


def published_figures(names: Sequence[str], prompt: str | None) -> list[str]:
    """Return a line for each published figure of all rows of a suite that was measured with the same prompt."""
    found = []
    for name, suite, subset, chosen in (parse_name(word, prompt) for word in names):
        for one in suite.published:
            if one.prompt == chosen and subset is None:
                found.append(f"published, {name}/{chosen}: {one.model} {one.value:.3f} ({one.source})")
    return found
