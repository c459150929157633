"""The position in the stream of prompts, with carried-over groups, and its checkpoints."""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from r1_cli.runs.history import JsonObject
from r1_cli.train.groups.group import Group, Response
from r1_data.curriculum import RowCounts
from r1_data.types import DataError, Prompt
from r1_rewards.types import Failure, Score
from r1_rollout.types import Completion

TOKENS_FILE, GROUPS_FILE, COUNTS_FILE = "surplus.safetensors", "surplus.json", "curriculum.safetensors"

log = logging.getLogger("r1")


@dataclass(frozen=True, slots=True)
class StreamPosition:
    cursor: int = 0  # batches read from the stream
    rounds: int = 0  # sampling rounds; each has its own noise
    unfinished: tuple[int, ...] = ()  # rows read and not started; they come before the next batch
    carried_over: tuple[Group, ...] = ()  # surplus groups that passed the filter; the next step uses them first
    counts: RowCounts | None = None  # of all answers so far, for an online curriculum

    def state(self) -> JsonObject:
        return {"cursor": self.cursor, "draws": self.rounds, "pending": list(self.unfinished)}


def resume_stream_position(state: Mapping[str, Any]) -> StreamPosition:
    """Return the position without what `save_stream` writes. Older checkpoints have neither `draws` nor `pending`."""
    return StreamPosition(state["cursor"], state.get("draws", state["cursor"]), tuple(state.get("pending", ())))


def save_stream(position: StreamPosition, folder: Path) -> None:
    """Write what `StreamPosition.state` leaves out into a checkpoint folder."""
    save_groups(position.carried_over, folder)
    if (counts := position.counts) is not None:
        tensors = {"asked": torch.from_numpy(counts.asked), "right": torch.from_numpy(counts.right)}
        save_file(tensors, folder / COUNTS_FILE)


def load_stream(position: StreamPosition, folder: Path, render: Callable[[int], Prompt]) -> StreamPosition:
    """Return the position with what `save_stream` wrote; see `load_groups`."""
    counts = None
    if (folder / COUNTS_FILE).is_file():
        tensors = load_file(folder / COUNTS_FILE)
        counts = RowCounts(tensors["asked"].numpy(), tensors["right"].numpy())
    return replace(position, carried_over=load_groups(folder, render), counts=counts)


def save_groups(carried_over: Sequence[Group], folder: Path) -> None:
    """Write groups into a checkpoint folder. Prompts are saved as row numbers and rendered again."""
    if not carried_over:
        return
    completions = [completion for group in carried_over for completion in group.completions]
    tensors = {
        "token_ids": torch.from_numpy(np.concatenate([c.token_ids for c in completions])),
        "logprobs": torch.from_numpy(np.concatenate([c.logprobs for c in completions])),
    }
    routed = [c.routed_experts for c in completions if c.routed_experts is not None]
    if routed:
        tensors["routed_experts"] = torch.from_numpy(np.concatenate(routed))
    entries = [_describe(group) for group in carried_over]
    if carried_over[0].episodes:
        from r1_cli.train.groups.saved_episodes import save_episodes

        more, episodes = save_episodes([episode for group in carried_over for episode in group.episodes])
        tensors |= more
        described = iter(episodes)
        entries = [{**entry, "episodes": [next(described) for _ in entry["completions"]]} for entry in entries]
    save_file(tensors, folder / TOKENS_FILE)
    (folder / GROUPS_FILE).write_text(json.dumps(entries) + "\n", encoding="utf-8")


def load_groups(folder: Path, render: Callable[[int], Prompt]) -> tuple[Group, ...]:
    """Return the saved groups, without those whose prompts have changed, with a warning.

    Args:
        render: returns the prompt of a row.
    """
    if not (folder / GROUPS_FILE).is_file():
        return ()
    tensors = load_file(folder / TOKENS_FILE)
    entries = json.loads((folder / GROUPS_FILE).read_text(encoding="utf-8"))
    carried_over = []
    first = 0  # number of the group's first completion
    for entry, completions in zip(entries, _completions(entries, tensors), strict=True):
        number, first = first, first + len(completions)
        try:
            prompt = render(entry["row"])
        except (DataError, IndexError):
            prompt = None
        if prompt is None or _digest(prompt) != entry["prompt"]:
            log.warning("row %d is another than before the resume: its responses are left out", entry["row"])
            continue
        if "episodes" in entry:
            from r1_cli.train.groups.saved_episodes import load_episodes

            completions = [*load_episodes(completions, entry["episodes"], tensors, number, prompt)]
        carried_over.append(_to_group(entry, prompt, completions))
    return tuple(carried_over)


def _completions(entries: Sequence[JsonObject], tensors: Mapping[str, torch.Tensor]) -> Iterator[list[Completion]]:
    """Yield the completions of each group."""
    token_ids, logprobs = tensors["token_ids"].numpy(), tensors["logprobs"].numpy()
    begin = first = 0
    for entry in entries:
        completions: list[Completion] = []
        for one in entry["completions"]:
            tokens = slice(begin, begin := begin + one["tokens"])
            routed = slice(first, first := first + one.get("routed", 0))
            completions.append(
                Completion(
                    token_ids=token_ids[tokens],
                    logprobs=logprobs[tokens],
                    finish_reason=one["finish_reason"],
                    weight_version=one["weight_version"],
                    routed_experts=tensors["routed_experts"][routed].numpy() if "routed" in one else None,
                )
            )
        yield completions


def _to_group(entry: JsonObject, prompt: Prompt, completions: Sequence[Completion]) -> Group:
    columns = zip(completions, entry["responses"], entry["scores"], entry["rewards"], strict=True)
    return Group(
        prompt=prompt,
        responses=[
            Response(completion=completion, text=text, score=_score(score), reward=reward)
            for completion, text, score, reward in columns
        ],
        baseline=entry["baseline"],
        dropped=tuple(_score(score) for score in entry["dropped"]),
        truth_problem=entry.get("truth_problem"),
        row=entry["row"],
    )


def _describe(group: Group) -> JsonObject:
    return {
        "row": group.row,
        "prompt": _digest(group.prompt),
        "completions": [
            {"tokens": len(c.token_ids), "finish_reason": c.finish_reason, "weight_version": c.weight_version}
            | ({} if c.routed_experts is None else {"routed": len(c.routed_experts)})
            for c in group.completions
        ],
        "responses": [response.text for response in group.responses],
        "scores": [_plain(score) for score in group.scores],
        "rewards": group.rewards,
        "baseline": group.baseline,
        "dropped": [_plain(score) for score in group.dropped],
        "truth_problem": group.truth_problem,
    }


def _plain(score: Score) -> JsonObject:
    return {
        "value": score.value,
        "parts": dict(score.parts),
        "error": asdict(score.error) if score.error else None,
        "keep": score.keep,
        "extracted": score.extracted,
        "reason": score.reason,
    }


def _score(plain: Mapping[str, Any]) -> Score:
    error = Failure(**plain["error"]) if plain["error"] else None
    kept = {name: plain[name] for name in ("extracted", "reason") if name in plain}  # older checkpoints have neither
    return Score(value=plain["value"], parts=plain["parts"], error=error, keep=plain["keep"], **kept)


def _digest(prompt: Prompt) -> str:
    return hashlib.blake2b(f"{prompt.id} {prompt.token_ids}".encode(errors="surrogatepass"), digest_size=16).hexdigest()
