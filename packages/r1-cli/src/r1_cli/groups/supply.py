"""What a step finds before it: prompts drawn but not begun, and groups sampled but not needed yet."""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from r1_cli.groups.group import Group
from r1_data.types import DataError, Prompt
from r1_rewards.types import Failure, Score
from r1_rollout.types import Completion

TOKENS_FILE, GROUPS_FILE = "surplus.safetensors", "surplus.json"

log = logging.getLogger("r1")


@dataclass(frozen=True, slots=True)
class Drawn:
    """A group and the row of the dataset that its prompt was rendered from."""

    row: int
    group: Group

    @property
    def version(self) -> int:
        """The weights that sampled the answers."""
        return self.group.completions[0].weight_version


@dataclass(frozen=True, slots=True)
class Supply:
    """How far a run is in the stream of prompts."""

    cursor: int = 0  # prompt batches drawn from the stream
    draws: int = 0  # times that prompts were sampled; each has noise of its own
    pending: tuple[int, ...] = ()  # rows that were drawn and not begun; they come before the stream's next batch
    surplus: tuple[Drawn, ...] = ()  # groups that passed the filter and were not needed; they are the next step's first

    def state(self) -> dict[str, Any]:
        """Return all but the surplus, which `save_surplus` writes."""
        return {"cursor": self.cursor, "draws": self.draws, "pending": list(self.pending)}


def resume_supply(state: Mapping[str, Any]) -> Supply:
    """Return the supply of a state, without its surplus. Older checkpoints drew whole batches only."""
    return Supply(state["cursor"], state.get("draws", state["cursor"]), tuple(state.get("pending", ())))


def save_surplus(surplus: Sequence[Drawn], folder: Path) -> None:
    """Write groups into the checkpoint `folder`; nothing if there are none.

    Prompts are written as their rows, and rendered again. Log-probs keep the precision that the learner reads.
    """
    if not surplus:
        return
    completions = [completion for one in surplus for completion in one.group.completions]
    tensors = {
        "token_ids": torch.from_numpy(np.concatenate([c.token_ids for c in completions])),
        "logprobs": torch.from_numpy(np.concatenate([c.logprobs for c in completions])),
    }
    save_file(tensors, folder / TOKENS_FILE)
    (folder / GROUPS_FILE).write_text(json.dumps([_describe(one) for one in surplus]) + "\n", encoding="utf-8")


def load_surplus(folder: Path, render: Callable[[int], Prompt]) -> tuple[Drawn, ...]:
    """Return the groups that `save_surplus` wrote, () if none.

    `render` gives the prompt of a row. Groups whose prompts are no longer what was answered are left out, with a
    warning: the data, the template or the tokenizer has changed.
    """
    if not (folder / GROUPS_FILE).is_file():
        return ()
    tensors = load_file(folder / TOKENS_FILE)
    token_ids, logprobs = tensors["token_ids"].numpy(), tensors["logprobs"].numpy()
    surplus, begin = [], 0
    for entry in json.loads((folder / GROUPS_FILE).read_text(encoding="utf-8")):
        completions = []
        for one in entry["completions"]:
            said = slice(begin, begin := begin + one["tokens"])
            reason, version = one["finish_reason"], one["weight_version"]
            completions.append(Completion(token_ids[said], logprobs[said], reason, version))
        try:
            prompt = render(entry["row"])
        except (DataError, IndexError):
            prompt = None
        if prompt is None or _digest(prompt) != entry["prompt"]:
            log.warning("row %d is another than before the resume: its answers are left out", entry["row"])
            continue
        scores, dropped = ([_score(plain) for plain in entry[name]] for name in ("scores", "dropped"))
        rest = entry["responses"], scores, entry["rewards"], entry["baseline"], tuple(dropped)
        surplus.append(Drawn(entry["row"], Group(prompt, completions, *rest)))
    return tuple(surplus)


def _describe(drawn: Drawn) -> dict[str, Any]:
    group = drawn.group
    return {
        "row": drawn.row,
        "prompt": _digest(group.prompt),
        "completions": [
            {"tokens": len(c.token_ids), "finish_reason": c.finish_reason, "weight_version": c.weight_version}
            for c in group.completions
        ],
        "responses": group.responses,
        "scores": [_plain(score) for score in group.scores],
        "rewards": group.rewards,
        "baseline": group.baseline,
        "dropped": [_plain(score) for score in group.dropped],
    }


def _plain(score: Score) -> dict[str, Any]:
    return {
        "value": score.value,
        "parts": dict(score.parts),
        "error": asdict(score.error) if score.error else None,
        "keep": score.keep,
    }


def _score(plain: Mapping[str, Any]) -> Score:
    error = plain["error"]
    return Score(plain["value"], plain["parts"], Failure(**error) if error else None, plain["keep"])


def _digest(prompt: Prompt) -> str:
    return hashlib.blake2b(f"{prompt.id} {prompt.token_ids}".encode(errors="surrogatepass"), digest_size=16).hexdigest()
