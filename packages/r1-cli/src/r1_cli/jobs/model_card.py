"""The model card of a merged checkpoint: what the run's own record says of data, rewards, algorithm and validation."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import yaml

from r1_cli.checkpoint.damage import STATE_FILE
from r1_cli.config.section import flatten
from r1_cli.runs.history import History, JsonObject, NoHistoryError
from r1_cli.runs.manifest import PACKAGES
from r1_cli.runs.reader import RunReader, run_of
from r1_cli.runs.templates import with_copies

CARD, PROMPTS = "README.md", "r1_prompts.json"
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
SIGNED = "<!-- Written by r1 merge; a later merge replaces it unless you edit it. {} -->\n"
VALIDATED = ("reward_score", "accuracy_reward", "nll", "rewards/accuracies", "accuracy", "margin")  # first of all
LEFT_OUT = ("_length/", "failures", "unusable_truths")  # of a validation's numbers
MOST = 12  # numbers of a validation
# What of an algorithm a card names, if it is set: key -> label.
SETTINGS = {
    "algorithm.adv_estimator": "advantage estimator",
    "worker.actor.loss_type": "policy loss",
    "worker.rollout.n": "answers per prompt",
    "worker.rollout.temperature": "sampling temperature",
    "data.rollout_batch_size": "prompts a step",
    "data.max_response_length": "tokens of an answer, at most",
}
SFT_SETTINGS = {"sft.loss": "loss", "sft.epochs": "epochs", "sft.turns": "trained answers of a conversation"}
SHARED_SETTINGS = {
    "worker.actor.global_batch_size": "prompts an optimizer step",
    "worker.actor.optim.lr": "learning rate",
    "worker.actor.model.lora.rank": "rank of the LoRA adapter, merged here",
    "worker.teacher.model.model_path": "teacher",
}


def write_card(checkpoint: Path, name: str, *, vision: bool) -> str:
    """Return the card of a checkpoint, in Markdown.

    Args:
        name: of the model.
        vision: whether it reads pictures.
    """
    run = run_of(checkpoint)
    reader = RunReader(run) if run is not None else None
    settings = read_settings(run)
    base, estimator = (
        str(settings.get("worker.actor.model.model_path") or ""),
        str(settings.get("algorithm.adv_estimator")),
    )
    tuned = reader is not None and _is_tuned(reader)
    head: JsonObject = {"library_name": "transformers"}
    head |= {"pipeline_tag": "image-text-to-text" if vision else "text-generation"}
    head |= {"base_model": base} if HUB_NAME.fullmatch(base) and not Path(base).is_dir() else {}
    head["tags"] = ["r1", *(["sft"] if tuned else ["reinforcement-learning", estimator] if settings else [])]
    parts = [f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n", f"# {name}\n"]
    if reader is None or not settings:
        parts.append(
            "A checkpoint that [r1](https://pypi.org/project/r1-cli) merged; its run left no record beside it.\n"
        )
    else:
        how = "fine-tuned" if tuned else "trained by reinforcement learning"
        parts += [f"`{public(base)}`, {how} with r1: step {_step(checkpoint)} of its run.\n"]
        parts += _sections(reader, settings, checkpoint, tuned=tuned)
    return sign("\n".join(parts))


def _sections(reader: RunReader, settings: Mapping[str, object], checkpoint: Path, *, tuned: bool) -> Iterator[str]:
    starts = reader.starts()
    yield _table("Data", ("source", "files", "used for"), list(_sources(settings)))
    if rows := starts[-1].get("rows") if starts else None:
        yield "Digests of the rows: " + ", ".join(f"{name} `{digest}`" for name, digest in rows.items()) + "\n"
    if not tuned:
        yield _table("Rewards", ("function", "keywords"), _rewards(settings, reader.settings()))
    named = {**(SFT_SETTINGS if tuned else SETTINGS), **SHARED_SETTINGS}
    rows = [(label, f"`{public(str(settings[key]))}`") for key, label in named.items() if settings.get(key)]
    if not tuned:
        rows.append(("KL to the reference", _kl(settings)))
    yield _table("Algorithm", ("setting", "value"), rows)
    yield _validation(reader, checkpoint)
    yield _prompts(settings)
    yield _versions(starts)


def _sources(settings: Mapping[str, object]) -> Iterator[tuple[str, ...]]:
    for use, key, listed in (("training", "train_files", "sources"), ("validation", "val_files", "val_sources")):
        files, sources = settings.get(f"data.{key}"), settings.get(f"data.{listed}")
        entries = sources if isinstance(sources, list) else [{"files": files}] if files else []
        for entry in entries:
            own = entry["files"] if isinstance(entry["files"], list) else [entry["files"]]
            yield str(entry.get("name") or "–"), ", ".join(f"`{public(str(one))}`" for one in own), use


def _rewards(settings: Mapping[str, object], nested: JsonObject) -> list[tuple[str, ...]]:
    found, sources = dict[str, str](), settings.get("data.sources")
    for section in (nested.get("worker", {}).get("reward", {}), *(sources if isinstance(sources, list) else [])):
        if section.get("reward_function"):
            kwargs = section.get("reward_function_kwargs") or {}
            found[public(section["reward_function"])] = f"`{json.dumps(kwargs)}`" if kwargs else "–"
    return [(f"`{name}`", kwargs) for name, kwargs in found.items()]


def _kl(settings: Mapping[str, object]) -> str:
    if settings.get("algorithm.disable_kl"):
        return "none"
    place = "loss" if settings.get("algorithm.use_kl_loss") else "reward"
    return f"in the {place}, coefficient `{settings.get('algorithm.kl_coef')}`"


def _validation(reader: RunReader, checkpoint: Path) -> str:
    """Return the numbers of the first validation, and of the last up to the checkpoint's step."""
    step = _step(checkpoint)
    try:
        history = reader.history
    except NoHistoryError:
        history = History(str(reader.path), "r1", [])
    names = [name for name in history.names("val/") if not any(part in name for part in LEFT_OUT)]
    first_names = [f"val/{name}" for name in VALIDATED if f"val/{name}" in names]
    rows = []
    for name in [*first_names, *(one for one in names if one not in first_names)][:MOST]:
        series = [(at, value) for at, value in history.series(name) if step is None or at <= step]
        if series:
            (first, before), (last, after) = series[0], series[-1]
            rows.append(
                (f"`{name.removeprefix('val/')}`", f"{before:.4g} (step {first})", f"{after:.4g} (step {last})")
            )
    if not rows:
        return "## Validation\n\nThe run did not validate.\n"
    return _table("Validation", ("", "first", "here"), rows)


def _prompts(settings: Mapping[str, object]) -> str:
    prompts = read_prompts(settings)
    lines = ["## Prompts\n"]
    if not prompts:
        return lines[0] + "\nNone beside the chat template.\n"
    lines.append(f"The model was trained with these; `r1 chat` uses them (`{PROMPTS}`).\n")
    for kind, text in prompts.items():
        fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
        lines.append(f"{kind.replace('_', ' ')}:\n\n{fence}\n{text.strip()}\n{fence}\n")
    return "\n".join(lines)


def read_settings(run: Path | None) -> dict[str, object]:
    """Return the settings of a run by dotted keys; {} if there is no run, or its file is damaged."""
    try:
        return dict(flatten(with_copies(run, RunReader(run).settings()))) if run is not None else {}
    except (OSError, ValueError):
        return {}


def read_prompts(settings: Mapping[str, object]) -> dict[str, str]:
    """Return the system prompt and the text of the format prompt of a run's first source; {} without.

    Args:
        settings: of the run, by dotted keys.
    """
    listed = settings.get("data.sources")
    own = listed[0] if isinstance(listed, list) and listed else {}
    found = {"system_prompt": own.get("system_prompt", settings.get("data.system_prompt"))}
    file = own.get("format_prompt", settings.get("data.format_prompt"))
    if file and Path(str(file)).is_file():
        found["format_prompt"] = Path(str(file)).read_text(encoding="utf-8")
    return {name: str(text) for name, text in found.items() if text}


def _versions(starts: Sequence[JsonObject]) -> str:
    if not starts:
        return "## Versions\n\nThe run has no manifest.\n"
    packages, git = starts[-1].get("packages") or {}, starts[-1].get("git") or {}
    rows = [(name, packages[name]) for name in PACKAGES if name in packages]
    rows += [("python", starts[-1].get("python", "?"))]
    rows += [("commit", f"`{git['commit']}`" + (", with changes" if git.get("changed") else ""))] if git else []
    return _table("Versions", ("package", "version"), rows)


def _table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [" | ".join(cell.replace("\n", " ").replace("|", "\\|") for cell in row) for row in rows]
    if not lines:
        return f"## {title}\n\nThe record names none.\n"
    divider = "|".join("---" for _ in head)
    return "\n".join([f"## {title}\n", f"| {' | '.join(head)} |", f"|{divider}|", *(f"| {one} |" for one in lines), ""])


def _is_tuned(reader: RunReader) -> bool:
    return any(name.startswith("sft/") for record in reader.records() for name in record)


def _step(checkpoint: Path) -> int | None:
    """Return the step of a checkpoint, by its own state."""
    for folder in (checkpoint, checkpoint.parent):
        if (folder / STATE_FILE).is_file():
            return int(json.loads((folder / STATE_FILE).read_text(encoding="utf-8")).get("step", 0)) or None
    number = checkpoint.name.rpartition("_")[2]
    return int(number) if number.isdigit() else None


def public(path: str) -> str:
    """Return a path as a card may have it: of an absolute one, which tells of the machine, the name alone."""
    return Path(path).name if path.startswith(("/", "~")) else path


# --- whose a card is --------------------------------------------------------------------------------------------------


def sign(text: str) -> str:
    """Append a comment by which `is_unedited` knows the card again."""
    return text + "\n" + SIGNED.format(_digest(text))


def is_unedited(card: str) -> bool:
    """Whether `write_card` wrote a card and nobody has changed it since."""
    text, _, comment = card.rpartition("\n<!--")
    return f"<!--{comment}" == SIGNED.format(_digest(text))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]
