"""Generate pages of docs/ from the code: configuration keys, estimators, losses and built-in rewards.

`pages()` gives their texts by path; `tests/write_tables.py` writes them, and with `--check` compares.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from functools import cache
from importlib import import_module
from math import inf
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import algorithm_curves
import architectures
import hyperparameter_page
import suites_page
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from r1_cli.config.availability import NO_EFFECT
from r1_cli.config.options import ESTIMATOR_OPTIONS, LOSS_OPTIONS, Option
from r1_cli.config.root import RunConfig
from r1_cli.config.section import lookup
from r1_core import registry
from r1_core.registry import Entry
from r1_rewards.spec import SERVICES
from r1_rewards.verifiers import BUILTINS

ROOT = Path(__file__).resolve().parents[1]
NOTE = "<!-- written by tests/write_tables.py -->"
ALGORITHMS = {
    "Advantage estimators": ("algorithm.adv_estimator", registry.estimators, ESTIMATOR_OPTIONS),
    "Policy losses": ("worker.actor.loss_type", registry.losses, LOSS_OPTIONS),
}
OPTIONS = {option.key: option for option in (*ESTIMATOR_OPTIONS, *LOSS_OPTIONS)}
VERIFIERS = "packages/r1-rewards/src/r1_rewards/__init__.py"
SECTIONS = {"When to use it": "Use it ", "Metrics to watch": "Watch ", "When it fails": "Fails "}  # of a docstring
ISSUE = re.compile(r"github\.com/([\w.-]+/[\w.-]+)/issues/(\d+)")
LIST = re.compile(r"- |\d+\. ")
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<", "least": "≥", "above": ">", "most": "≤", "below": "<"}


def pages() -> dict[str, str]:
    """Every generated page by its path in the repository."""
    found = {"docs/configuration.md": configuration(), "docs/rewards.md": rewards()}
    found["docs/models.md"] = architectures.page()
    found[hyperparameter_page.PAGE] = hyperparameter_page.page()
    found[suites_page.PAGE] = suites_page.page(NOTE)
    found["docs/algorithms/index.md"] = algorithms()
    found[VERIFIERS] = verifier_names()
    for key, entries, options in ALGORITHMS.values():
        for entry in dict.fromkeys(entries().values()):
            page = f"docs/algorithms/{page_name(key, entry)}"
            found[f"{page}.md"] = algorithm(key, entry, options)
            if rows := algorithm_curves.rows(key, entry.names):
                found[f"{page}.svg"] = algorithm_curves.picture(rows[0])
    return found


def verifier_names() -> str:
    """The root of r1_rewards with an import of every verifier, which editors and type checkers read."""
    line = "    from r1_rewards.verifiers import {0} as {0}\n"
    text = re.sub(line.format(r"\w+"), "", (ROOT / VERIFIERS).read_text(encoding="utf-8"))
    last = "    from r1_rewards.reference import reference_probability as reference_probability\n"
    return text.replace(last, last + "".join(map(line.format, BUILTINS)))


# Configuration


def configuration() -> str:
    head = """# Every key of the configuration

Set keys in a file and with `key=value` on the command line, which overrides the file.
`r1 train FILE key=value --dry-run` shows the keys that differ from the defaults, and the plan of the run; with `--full`
it shows every key. r1 refuses unknown keys, and values of a wrong type or out of range, by name.

Keys of `worker.critic` and `worker.ref` that are not listed are those of `worker.actor`, with the same defaults. If a
default is *its own*, the chosen [estimator or loss](algorithms/index.md) defines it.
[examples/config.yaml](../examples/config.yaml) is a file with the usual values."""
    return "\n".join([head, "", NOTE, *sections(RunConfig, "", None)]) + "\n"


def sections(model: type[BaseModel], prefix: str, instance: BaseModel | None) -> Iterator[str]:
    """A table of each section's own keys, then the sections in it."""
    rows, inner = [], list[str]()
    for name, field in model.model_fields.items():
        key = prefix + name
        default = getattr(instance, name) if instance is not None else field.get_default(call_default_factory=True)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            inner += sections(field.annotation, f"{key}.", default)
        elif not follows_actor(key, default):
            rows.append(f"| `{name}` | {cell(kind_of(field))} | {cell(shown(key, default))} | {cell(meaning(key))} |")
            inner += listed(field, key)
    if rows:
        yield f"\n## {prefix.rstrip('.')}\n"
        if said := own_words(model):
            yield f"{said}\n"
        yield from ("| key | type and range | default | meaning |", "|---|---|---|---|", *rows)
    yield from inner


def follows_actor(key: str, default: Any) -> bool:
    """Whether a key of the critic's or the reference's is one of the actor's, with the same default."""
    _, owner, *rest = [*key.split("."), ""]
    if owner not in ("critic", "ref"):
        return False
    try:
        return bool(lookup(RunConfig(), f"worker.actor.{'.'.join(rest).rstrip('.')}") == default)
    except AttributeError:
        return False


def listed(field: FieldInfo, key: str) -> Iterator[str]:
    """The tables of sections that stand in a list, such as `data.sources`; once, where two keys share them."""
    for part in get_args(field.annotation):
        for one in (part, *get_args(part)):
            if (
                isinstance(one, type)
                and issubclass(one, BaseModel)
                and not key.startswith(("data.val_", "worker.critic"))
            ):
                yield from sections(one, f"{key}[].", None)


def own_words(model: type[BaseModel]) -> str:
    return prose(" ".join((model.__dict__.get("__doc__") or "").split())) if model is not RunConfig else ""


def meaning(key: str) -> str:
    """What the models' comments say of a key, else what the example file says, else whose setting it is."""
    if key in OPTIONS:
        option = OPTIONS[key]
        who = ", ".join(f"`{owner}`" for owner in option.owners)
        return f"{prose(option.help)}{'; ' if option.help else ''}of {who}"
    if (why := NO_EFFECT.get(key)) is not None:
        return f"no effect: {prose(why)}"
    place = key.replace("worker.critic.", "worker.actor.").replace("worker.ref.", "worker.actor.")
    said = comments().get(key) or comments().get(place) or example_comments().get(place)
    if not said and key.startswith("data.sources[]."):
        return f"as `data.{key.rpartition('.')[2]}`"
    return prose(said or "")


@cache
def comments() -> Mapping[str, str]:
    """The comments of the models' fields by key, those on the lines before a field included."""
    found: dict[str, str] = {}

    def walk(model: type[BaseModel], prefix: str) -> None:
        for base in model.__mro__:
            for name, text in class_comments(base).items():
                found.setdefault(prefix + name, text)
        for name, field in model.model_fields.items():
            for one in (field.annotation, *get_args(field.annotation), *map_args(field.annotation)):
                if isinstance(one, type) and issubclass(one, BaseModel):
                    walk(one, f"{prefix}{name}{'' if one is field.annotation else '[]'}.")

    walk(RunConfig, "")
    return found


def map_args(annotation: Any) -> Iterator[Any]:
    for part in get_args(annotation):
        yield from get_args(part)


@cache
def class_comments(model: type) -> Mapping[str, str]:
    if not model.__module__.startswith("r1_cli.config"):
        return {}
    try:
        lines = inspect.getsource(model).splitlines()
    except OSError:  # made by `section_of`, whose comments are those of the options
        return {}
    found = {}
    for node in ast.parse(textwrap.dedent("\n".join(lines))).body[0].body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.end_lineno:
            above, line = list[str](), node.lineno - 2
            while lines[line].strip().startswith("# "):
                above.insert(0, lines[line].strip()[2:])
                line -= 1
            found[node.target.id] = " ".join(above) or lines[node.end_lineno - 1].partition("  # ")[2]
    return found


@cache
def example_comments() -> Mapping[str, str]:
    """The comments of examples/config.yaml by key, with the lines that go on below."""
    found, path = dict[str, str](), list[tuple[int, str]]()
    for line in (ROOT / "examples/config.yaml").read_text(encoding="utf-8").splitlines():
        if entry := re.match(r"( *)(\w+):", line):
            path = [*(one for one in path if one[0] < len(entry[1])), (len(entry[1]), entry[2])]
            found[".".join(name for _, name in path)] = line.partition("  # ")[2] or line.partition(" # ")[2]
        elif re.match(r" {20,}# ", line) and path:
            found[".".join(name for _, name in path)] += f" {line.strip()[2:]}"
    return found


def shown(key: str, default: Any) -> str:
    if key in OPTIONS and OPTIONS[key].shared:
        return "*its own*"
    return "must be given" if default is PydanticUndefined else f"`{plain(default)}`"


def plain(value: Any) -> str:
    """A value as YAML has it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(plain, value))}]"
    if isinstance(value, float):
        return "none" if value == inf else f"{value:g}"
    return value.value if isinstance(value, Enum) else str(value)


def kind_of(field: FieldInfo) -> str:
    return type_words(field.annotation, tuple(field.metadata))


def type_words(annotation: Any, marks: tuple[Any, ...] = ()) -> str:
    """A type with its range in words, such as `int ≥ 1 or null`."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner, *more = parts
        return type_words(inner, (*marks, *more))
    if origin in (Union, UnionType):
        words = [type_words(part, marks) for part in parts if part is not NoneType]
        return " or ".join(dict.fromkeys([*words, *(["null"] if NoneType in parts else [])]))
    if origin is Literal:
        return ", ".join(f"`{word}`" for word in parts)
    if origin in (list, tuple):
        inner = [type_words(part) for part in parts if part is not Ellipsis]
        return f"list of {' and '.join(dict.fromkeys(inner))}"
    if origin is dict:
        return "mapping"
    names = [name for mark in marks for name in allowed(mark)]
    if names:
        return ", ".join(f"`{name}`" for name in names)
    name = {bool: "true or false", str: "text"}.get(annotation, getattr(annotation, "__name__", str(annotation)))
    name = "mapping" if isinstance(annotation, type) and issubclass(annotation, BaseModel) else name
    if any(getattr(mark, "pattern", None) or "pattern" in str(getattr(mark, "metadata", "")) for mark in marks):
        name = "`file.py:function`" if ".py" in str(marks) or "py:" in str(marks) else "address"
    limits = [f"{sign} {limit:g}" for mark in marks for sign, limit in limits_of(mark)]
    return " ".join([name, " and ".join(limits)]).strip()


def limits_of(mark: Any) -> Iterator[tuple[str, float]]:
    for one in (mark, *getattr(mark, "metadata", ())):
        for name, sign in BOUNDS.items():
            limit = getattr(one, name, None)
            if isinstance(limit, int | float) and not isinstance(limit, bool):
                yield sign, limit


def allowed(mark: Any) -> tuple[str, ...]:
    """The names that `one_of` lets through."""
    function = getattr(mark, "func", None)
    names = inspect.getclosurevars(function).nonlocals.get("names", ()) if inspect.isfunction(function) else ()
    return tuple(names)


# Algorithms


def algorithms() -> str:
    head = """# Algorithms

A run has an advantage estimator and a policy loss. You can combine any two, unless `--dry-run` refuses them.

In formulas, A is the advantage, r the reward of an answer, r\\_t that of a token; ρ, or ratio, is pi / pi\\_old, s the
ratio of a whole sequence, and sg means "no gradient". Mean, std and sums over j are over the group, the answers to a
prompt; whiten subtracts the mean and divides by the std.
c\\_low, c\\_high and c\\_dual are the keys `clip_low`, `clip_high` and `clip_dual`.
[r1-core](../../packages/r1-core/README.md#estimators-losses-aggregations-kl-penalties) lists aggregations and KL
penalties."""
    lines = [head, "", NOTE]
    for title, (key, entries, _) in ALGORITHMS.items():
        lines += ["", f"## {title}", "", f"`{key}`", ""]
        for entry in dict.fromkeys(entries().values()):
            summary = first_line(entry)
            lines.append(f"- [{entry.names[0]}]({page_name(key, entry)}.md): {prose(summary)}")
    return "\n".join(lines) + "\n"


def page_name(key: str, entry: Entry) -> str:
    """A loss that is called as an estimator is, as `gpg`, has its kind in the name of its page."""
    name = entry.names[0]
    return f"{name}_loss" if key.endswith("loss_type") and name in {*registry.estimators(), "default"} else name


def first_line(entry: Entry) -> str:
    """What an entry is: of a module of its own the first line, else that of its class."""
    siblings = [one for one in {**registry.estimators(), **registry.losses()}.values() if one.help == entry.help]
    alone = all(one.where == entry.where for one in siblings)
    return entry.help if alone else inspect.getdoc(entry.load()).partition("\n\n")[0].replace("\n", " ")


def algorithm(key: str, entry: Entry, options: tuple[Option, ...]) -> str:
    code = entry.load()
    module = inspect.getmodule(code)
    said = [*paragraphs(inspect.getdoc(module)), *paragraphs(inspect.getdoc(code))]
    sections = {title: [text for text in said if text.startswith(start)] for title, start in SECTIONS.items()}
    path = Path(inspect.getfile(code)).relative_to(ROOT).as_posix()
    names = " or ".join(f"`{key}={name}`" for name in entry.names)
    lines = [f"# {entry.names[0]}", "", NOTE, "", f"Chosen by {names}.", ""]
    first, *rest = (one for one in said if not one.startswith(tuple(SECTIONS.values())))
    lines += [prose(first), "", *formula(code.formula)]
    for text in rest:
        lines += [prose(text), ""]
    for title, texts in sections.items():
        if texts:
            lines += [f"## {title}", "", *(ISSUE.sub(r"[\1#\2](https://\g<0>)", prose(text)) for text in texts), ""]
    lines += ["## Measured", "", *algorithm_curves.section(key, entry.names, page_name(key, entry)), ""]
    lines += ["## Settings", ""]
    rows = [
        f"| `{option.key}` | {cell(type_words(setting.type))} | `{plain(setting.default)}` | "
        f"{cell(prose(setting.help or option.help) or f'`{setting.name}` of the formula')} |"
        for option in options
        for name, setting in option.owners.items()
        if name == entry.names[0]
    ]
    lines += ["| key | type and range | default | meaning |", "|---|---|---|---|", *rows] if rows else ["None."]
    lines += ["", f"Needs beyond rewards and log-probs: {', '.join(f'`{need}`' for need in entry.needs) or 'nothing'}."]
    if key.endswith("loss_type"):
        lines += ["", f"Default of `worker.actor.loss_avg_mode` with this loss: `{entry.aggregation}`."]
    lines += ["", f"Code: [`{path}`](../../{path})."]
    return "\n".join(lines) + "\n"


def formula(latex: str) -> Iterator[str]:
    """A fenced block, which GitHub typesets, and `.ci/docs_site.py` on the site."""
    if latex:
        yield from ("```math", latex, "```", "")


# Rewards


def rewards() -> str:
    head = """# Built-in rewards

Set the name of a reward in `worker.reward.reward_function`, and its options in `worker.reward.reward_function_kwargs`.
[r1-rewards](../packages/r1-rewards/README.md) explains how answers are extracted, what happens on failures, sums of
rewards, and your own functions."""
    lines = [head, "", NOTE]
    for name in BUILTINS:
        module = import_module(f"r1_rewards.verifiers.{name}")
        lines += ["", f"## {name}", "", *described(module, module.score)]
    for name, where in SERVICES.items():
        module_name, _, attribute = where.partition(":")
        module = import_module(module_name)
        lines += ["", f"## {name}", "", *described(module, getattr(module, attribute))]
    return "\n".join(lines) + "\n"


def described(module: Any, code: Callable[..., Any]) -> Iterator[str]:
    said = [paragraphs(inspect.getdoc(module))[0], *paragraphs(inspect.getdoc(code))]
    for text in said:
        yield from (prose(text), "")
    taken = [
        f"| `{name}` | `{inspect.formatannotation(one.annotation)}` | {default_of(one)} |"
        for name, one in inspect.signature(code).parameters.items()
        if one.kind is one.KEYWORD_ONLY
    ]
    if taken:
        yield from ("| option | type | default |", "|---|---|---|", *map(table_safe, taken))
    elif inspect.isfunction(code):
        yield "No options."


def default_of(parameter: inspect.Parameter) -> str:
    if parameter.default is parameter.empty:
        return "must be given"
    text = plain(parameter.default)
    return "in the module" if "\n" in text else f"`{text}`"


# Text


def paragraphs(text: str | None) -> list[str]:
    """A docstring's paragraphs, each on one line; lists keep their lines."""
    parts = (part for part in (text or "").split("\n\n") if part.strip())
    return [part if LIST.match(part) else " ".join(part.split()) for part in parts]


def prose(text: str) -> str:
    """Text of a docstring as Markdown: what is no code keeps its underscores, stars and angle brackets."""
    parts = re.split(r"(``[^`].*?``|`[^`]*`)", text)
    return "".join(part if part.startswith("`") else escaped(part) for part in parts)


def escaped(text: str) -> str:
    """Python-Markdown, unlike GitHub, shows the backslash of an escaped angle bracket."""
    return re.sub(r"([_*\[\]])", r"\\\1", text).replace("<", "&lt;")


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def table_safe(row: str) -> str:
    """A row whose code may have bars."""
    first, *inner, last = re.split(r" \| ", row)
    return " | ".join([first, *inner, last]).replace(" | None`", " \\| None`")
