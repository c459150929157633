"""Episodes in a checkpoint: what a carried-over group has beside the tokens of its completions."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from r1_cli.train.groups.trajectory import Call, Trajectory, Turn
from r1_rewards.types import Failure, Score
from r1_rollout.types import Completion


def save_episodes(episodes: Sequence[Trajectory]) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Return the tensors of episodes by name, and for each episode what JSON can hold."""
    tensors: dict[str, Tensor] = {}
    entries = []
    for number, episode in enumerate(episodes):
        prefix = f"episode.{number}."
        tensors[f"{prefix}sampled"] = torch.from_numpy(episode.sampled)
        tensors[f"{prefix}position_ids"] = episode.position_ids.contiguous()
        tensors |= {f"{prefix}input.{name}": value.contiguous() for name, value in episode.later_inputs.items()}
        for place, image in enumerate(episode.images):
            tensors[f"{prefix}image.{place}"] = torch.from_numpy(np.array(image.convert("RGB")))
        entries.append(
            {
                "turns": [asdict(turn) for turn in episode.turns],
                "inputs": sorted(episode.later_inputs),
                "images": len(episode.images),
                "stop_reason": episode.stop_reason,
                "score": None if episode.score is None else asdict(episode.score),
                "failure": None if episode.failure is None else asdict(episode.failure),
                "text": episode.text,
            }
        )
    return tensors, entries


def load_episode(
    completion: Completion, entry: Mapping[str, Any], tensors: Mapping[str, Tensor], number: int
) -> Trajectory:
    """Return episode `number` of those that were saved, with the tokens and log-probs of `completion`."""
    prefix = f"episode.{number}."
    score, failure = entry["score"], entry["failure"]
    if score is not None:
        error = score["error"]
        score = Score(**{**score, "error": None if error is None else Failure(**error)})
    return Trajectory(
        completion.token_ids,
        completion.logprobs,
        tensors[f"{prefix}sampled"].numpy(),
        [_turn(turn) for turn in entry["turns"]],
        tensors[f"{prefix}position_ids"],
        entry["stop_reason"],
        completion.weight_version,
        later_inputs={name: tensors[f"{prefix}input.{name}"] for name in entry["inputs"]},
        images=[Image.fromarray(tensors[f"{prefix}image.{place}"].numpy()) for place in range(entry["images"])],
        score=score,
        failure=None if failure is None else Failure(**failure),
        text=entry["text"],
    )


def _turn(saved: Mapping[str, Any]) -> Turn:
    calls = tuple(Call(**call) for call in saved["calls"])
    return Turn(**{**saved, "messages": tuple(saved["messages"]), "calls": calls})
