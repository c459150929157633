"""Convert a data set of LLaMA-Factory, as `dataset_info.json` describes it, to a source of `data.sources`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from r1_cli.config.convert.conversion import Conversion
from r1_cli.config.rows import TagsConfig
from r1_cli.config.section import Tree

KEYS = {"images": "image_key", "videos": "video_key", "tools": "tools_key"}
COLUMNS = {"system": "system", "query": "query", "history": "history", "rejected": "rejected", "kto_tag": "label"}
OPENAI = {  # keys and roles that are read with any tags
    "role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant",
    "observation_tag": "tool", "function_tag": "", "system_tag": "system",
}  # fmt: skip
SUFFIXES = (".json", ".jsonl", ".parquet", ".csv")


def read_source(
    made: Conversion, name: str, described: Mapping[str, Any] | None, folder: Path, most: int | None
) -> Tree | None:
    """Return the source of the data set, None if its rows cannot be read; `made` then says why.

    Args:
        described: the data sets of `dataset_info.json`, None if there is none.
        folder: of their files.
        most: rows of a data set.
    """
    if described is None:
        made.lost.append(f"dataset={name}: there is no dataset_info.json in {folder}; set data.train_files")
        return None
    if (entry := described.get(name)) is None:
        made.lost.append(f"dataset={name}: dataset_info.json does not describe it; set data.train_files")
        return None
    files = _files(made, name, entry, folder)
    if files is None:
        return None
    if (count := entry.get("num_samples") or most) is not None:
        files += f"[:{count}]"
    columns: Mapping[str, str] = entry.get("columns") or {}
    source: Tree = {"files": files} | {ours: columns[theirs] for theirs, ours in KEYS.items() if columns.get(theirs)}
    if columns.get("audios"):
        made.lost.append(f"dataset={name}: its column {columns['audios']} holds sounds, which are not read")
    source |= _conversation(entry, columns)
    others = {ours: columns[theirs] for theirs, ours in COLUMNS.items() if columns.get(theirs)}
    defaults = {"system": "system", "history": "history", "rejected": "rejected", "label": "label", "query": "input"}
    if others := {ours: column for ours, column in others.items() if defaults[ours] != column}:
        source["columns"] = others
    return source


def _files(made: Conversion, name: str, entry: Mapping[str, Any], folder: Path) -> str | None:
    if hub := entry.get("hf_hub_url"):
        subset, revision = entry.get("subset"), entry.get("revision")
        full = f"{hub}{f':{subset}' if subset else ''}{f'#{revision}' if revision else ''}"
        return f"{full}@{entry.get('split') or 'train'}"
    if (file := entry.get("file_name")) and not entry.get("ms_hub_url"):
        if Path(file).suffix and Path(file).suffix not in SUFFIXES:
            made.lost.append(f"dataset={name}: {file} is none of {', '.join(SUFFIXES)}")
            return None
        return str(folder / file)
    where = next((key for key in ("ms_hub_url", "om_hub_url", "script_url", "cloud_file_name") if entry.get(key)), "")
    made.lost.append(f"dataset={name}: {where}={entry.get(where)} is not read; download its rows, and name the files")
    return None


def _conversation(entry: Mapping[str, Any], columns: Mapping[str, str]) -> Tree:
    """Return the columns of prompt and answer, and the tags, as far as they are not found by themselves."""
    if entry.get("formatting", "alpaca") == "alpaca":
        prompt = columns.get("prompt", "instruction")
        answer = columns.get("chosen", "chosen") if entry.get("ranking") else columns.get("response", "output")
        known = prompt == "instruction" and answer in ("output", "chosen")
        return {} if known else {"prompt_key": prompt, "answer_key": answer}
    messages = columns.get("messages", "conversations")
    tags: Mapping[str, str] = entry.get("tags") or {}
    others = {
        name: tag for name, tag in tags.items() if tag not in (TagsConfig.model_fields[name].default, OPENAI[name])
    }
    if (chosen := columns.get("chosen", "chosen")) != "chosen":
        named = {"prompt_key": messages, "answer_key": chosen}
    else:
        named = {} if messages in ("messages", "conversations") else {"messages_key": messages}
    return {**named, "tags": others} if others else named
