"""Suites: benchmarks as data files, and the validation sources that they become."""

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from r1_cli.config.data import SourceConfig
from r1_cli.config.files import reward_problems
from r1_cli.config.load import load_config
from r1_cli.config.problems import ConfigError, Problem
from r1_cli.config.root import RunConfig
from r1_cli.config.rules import find_problems
from r1_cli.config.section import Count, NonNegative, Ratio, Section, Tree, lookup, with_value
from r1_data.benchmark_rows import IMAGES, TRUTH, AnswerForm, RowForm, check_rows, write_rows
from r1_data.tables.arrow import download_files
from r1_data.tables.files import KINDS, PACKED
from r1_data.types import DataError
from r1_rewards.types import suggest

FOLDER = Path(__file__).parents[1] / "suites"
OVERRIDE = "worker.rollout.val_override_config"
_LONGEST_PROMPT = 8192  # tokens


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

    def specs(self) -> list[str]:
        """Return what to open, after downloading `files`. Raises DataError."""
        if self.files:
            return download_files(self.hub, self.files, self.revision)
        pin = f"#{self.revision}" if self.revision else ""
        return [f"{self.hub}:{name}{pin}@{self.split}" for name in self.configs] or [f"{self.hub}{pin}@{self.split}"]


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
    groups: list[str] = Field(default_factory=list)  # columns by which results are also shown
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
    if not path.is_file():
        what = "no such suite" if path.parent == FOLDER else "no such file"
        raise _error(name, f"{what}{suggest(name, suite_names())}; a file of your own is named ./mine.yaml")
    try:
        suite = Suite.model_validate(yaml.safe_load(path.read_text("utf-8")))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise _error(name, f"{path} cannot be read: {error}") from error
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
        raise _error(word, f"has no prompt {chosen!r}{near}")
    if subset and subset not in suite.subsets:
        raise _error(word, f"has no subset {subset!r}{suggest(subset, suite.subsets)}")
    return Path(name).stem if dot else name, suite, subset or None, chosen


def apply_suites(config: RunConfig, names: Sequence[str], prompt: str | None, data_root: Path | None) -> RunConfig:
    """Return a configuration whose validation sources are these suites, each named `SUITE[:SUBSET]/PROMPT`.

    Rows are read from the hub, or `DIR/SUITE.*` of `data_root`, checked and written to `data.cache_dir`. What the
    configuration sets itself of `data.max_response_length`, `data.max_prompt_length` and
    `worker.rollout.val_override_config` stays. No row is left out: an overlong prompt and unreadable media are errors.

    Raises:
        ConfigError: as `load_suite`; one suite twice; rows that are missing or other ones; suites that differ in how
            they sample.
    """
    named = [parse_name(word, prompt) for word in names]
    sources: list[SourceConfig] = []
    for word, (name, suite, subset, chosen) in zip(names, named, strict=True):
        if any(name == other for other, *_ in named[: len(sources)]):
            raise _error(word, f"names {name} a second time; evaluate it by another command")
        sources.append(_source(word, name, suite, subset, chosen, config, data_root))
    config = with_value(config, "data.val_sources", sources)
    config = with_value(config, "data.val_files", None)
    for key, value in _settings(config, {name: suite.sample for name, suite, *_ in named}).items():
        config = with_value(config, key, value)
    return config


def _settings(config: RunConfig, samples: Mapping[str, SuiteSample]) -> Tree:
    override = lookup(config, OVERRIDE)
    settings: Tree = {"data.filter_overlong_prompts": False, "data.bad_rows": "refuse"}
    for key in {"temperature", "top_p"} - override.model_fields_set:
        values = {name: lookup(sample, key) for name, sample in samples.items()}
        if len(set(values.values())) > 1:
            listed = ", ".join(f"{name} {value}" for name, value in values.items())
            raise _error(key, f"differs between the suites ({listed}): set {OVERRIDE}.{key}, or evaluate them apart")
        settings[f"{OVERRIDE}.{key}"] = next(iter(values.values()))
    lengths = {
        "max_response_length": max(sample.max_tokens for sample in samples.values()),
        "max_prompt_length": _LONGEST_PROMPT,
    }
    return settings | {f"data.{key}": size for key, size in lengths.items() if key not in config.data.model_fields_set}


def _source(
    word: str, name: str, suite: Suite, subset: str | None, prompt: str, config: RunConfig, data_root: Path | None
) -> SourceConfig:
    chosen = suite.prompts[prompt]
    home = Path(config.data.cache_dir or tempfile.gettempdir()).expanduser() / "suites" / name
    try:
        rows, digest = _open_rows(word, name, suite, data_root)
        what = json.dumps([digest, suite.model_dump(include={"question", "answer", "choices", "media"}), subset])
        folder = home / hashlib.blake2b(what.encode(), digest_size=8).hexdigest()
        path = folder / f"{name}.jsonl"
        if not path.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            part = folder / f"{name}.{os.getpid()}"
            write_rows(rows, suite.row_form(subset), part)
            part.replace(path)
    except DataError as error:
        raise _error(word, str(error)) from error
    template = folder / f"{prompt}-{hashlib.blake2b(chosen.text.encode(), digest_size=4).hexdigest()}.jinja"
    template.write_text(chosen.text, encoding="utf-8")
    return SourceConfig(
        files=str(path),
        name=f"{name}{f':{subset}' if subset else ''}/{prompt}",
        n=None if "n" in lookup(config, OVERRIDE).model_fields_set else suite.sample.n,
        prompt_key=suite.question,
        answer_key=TRUTH,
        image_key=IMAGES,
        image_dir=str(folder if (folder / "pictures").is_dir() or data_root is None else data_root),
        format_prompt=str(template),
        system_prompt=chosen.system,
        reward_function=suite.grader,
        reward_function_kwargs=suite.grader_options,
    )


def _open_rows(word: str, name: str, suite: Suite, data_root: Path | None) -> tuple[Any, str]:
    from r1_data.sources import read_rows

    rows = suite.rows
    try:
        specs = rows.specs() if data_root is None else _local_specs(word, name, data_root, rows)
        opened = read_rows(specs)
        count, digest = check_rows(opened, suite.row_form())
    except DataError as error:
        raise _error(word, f"{error}{_remedy(name, rows, data_root, str(error))}") from error
    where = " and ".join(specs)
    if rows.count not in (None, count):
        raise _error(word, f"{where} holds {count} rows, the suite has {rows.count}: get the published rows")
    if rows.digest not in (None, digest):
        want = f"the suite's have {rows.digest}; get the published rows, or name a file of your own as a suite"
        raise _error(word, f"the rows of {where} are other ones: their digest is {digest}, {want}")
    return opened, digest


def _local_specs(word: str, name: str, data_root: Path, rows: SuiteRows) -> list[str]:
    """Return the copy `DIR/NAME.*`, or what the suite reads of the folder `DIR/NAME`, laid out as the hub's."""
    folder = data_root / name
    if copy := _file_of(folder):
        return [str(copy)]
    if not folder.is_dir():
        kinds = ", ".join(KINDS)
        raise _error(word, f"there is no {folder}.jsonl (or {kinds}, or a folder): put its rows there")
    if rows.files:
        specs = {one: folder / one for one in rows.files}
        found = {one: str(path) for one, path in specs.items() if path.is_file()}
    else:
        places = {one: (folder / one, folder / "data" / one) for one in rows.configs}
        found = {
            one: next((f"{path}@{rows.split}" for path in paths if path.is_dir()), str(_file_of(paths[0]) or ""))
            for one, paths in places.items()
        }
        flat = len(rows.configs) < 2 and not any(path.is_dir() for path in folder.iterdir())
        if not rows.configs or (flat and not all(found.values())):
            return [f"{folder}@{rows.split}"]
    if missing := [one for one in rows.files or rows.configs if not found.get(one)]:
        raise _error(word, f"there is no {folder / missing[0]}: the suite reads this part of {rows.hub} only")
    return list(found.values())


def _file_of(path: Path) -> Path | None:
    endings = [*KINDS, *(f"{kind}{packed}" for kind in KINDS for packed in PACKED)]
    return next((one for one in (path.with_name(path.name + ending) for ending in endings) if one.is_file()), None)


def _remedy(name: str, rows: SuiteRows, data_root: Path | None, message: str) -> str:
    if data_root is not None:
        return f"; the suite reads the columns {', '.join(rows.columns)}" if "no column" in message else ""
    if rows.gated:
        return f"; {rows.hub} is gated: accept its terms on the hub and set HF_TOKEN, or use --data-root"
    fetch = f"hf download {rows.hub} --repo-type dataset --local-dir DIR/{name}"
    return f"; where the hub can be reached, run `{fetch}`, and then use --data-root DIR"


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


def _error(value: str, message: str) -> ConfigError:
    return ConfigError([Problem("suite", message, value, "command line")])


def load_with_suites(
    words: Sequence[str], names: Sequence[str], prompt: str | None, data_root: Path | None
) -> RunConfig:
    """Read a configuration, as `load_config`, whose validation rows are those of suites. Raises as `apply_suites`."""
    config, provenance = load_config(words, command="chat")
    config = apply_suites(config, names, prompt, data_root)
    if problems := find_problems(config, provenance, "eval"):
        raise ConfigError(problems)
    return config


def published_figures(names: Sequence[str], prompt: str | None) -> list[str]:
    """Return a line for each published figure of all rows of a suite that was measured with the same prompt."""
    found = []
    for name, suite, subset, chosen in (parse_name(word, prompt) for word in names):
        for one in suite.published:
            if one.prompt == chosen and subset is None:
                found.append(f"published, {name}/{chosen}: {one.model} {one.value:.3f} ({one.source})")
    return found
