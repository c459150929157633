"""Episodes in a checkpoint: what a carried-over group has beside the tokens of its completions."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from r1_cli.train.groups.trajectory import Call, Trajectory, Turn
from r1_data.types import Prompt
from r1_rewards.types import Failure, Score
from r1_rollout.types import Completion

Tensors = dict[str, Tensor]


def save_episodes(episodes: Sequence[Trajectory]) -> tuple[Tensors, list[dict[str, Any]]]:
    """Return the tensors of episodes by name, and for each episode what JSON can hold."""
    tensors: Tensors = {}
    prompts: dict[int, str] = {}  # names of the saved prompts, by identity: paths may share one
    entries = [_save(episode, f"episode.{number}.", tensors, prompts) for number, episode in enumerate(episodes)]
    return tensors, entries


def load_episodes(
    completions: Sequence[Completion],
    entries: Sequence[Mapping[str, Any]],
    tensors: Mapping[str, Tensor],
    first: int,
    prompt: Prompt,
) -> list[Trajectory]:
    """Return the episodes of a group.

    Args:
        completions: the tokens and log-probs of their main paths.
        first: number of the group's first episode among those that were saved.
        prompt: of the group.
    """
    prompts: dict[str, Prompt] = {}
    return [
        _load(completion, entry, tensors, f"episode.{first + place}.", prompt, prompts)
        for place, (completion, entry) in enumerate(zip(completions, entries, strict=True))
    ]


def _save(path: Trajectory, prefix: str, tensors: Tensors, prompts: dict[int, str]) -> dict[str, Any]:
    tensors[f"{prefix}sampled"] = torch.from_numpy(path.sampled)
    tensors[f"{prefix}position_ids"] = path.position_ids.contiguous()
    _save_media(path.later_inputs, path.images, prefix, tensors)
    entry = {
        "turns": [asdict(turn) for turn in path.turns],
        "inputs": sorted(path.later_inputs),
        "images": len(path.images),
        "stop_reason": path.stop_reason,
        "score": None if path.score is None else asdict(path.score),
        "failure": None if path.failure is None else asdict(path.failure),
        "text": path.text,
    }
    if path.prompt is not None:
        entry["prompt"] = _save_prompt(path.prompt, tensors, prompts)
    if path.forks:
        entry["forks"] = [
            _save_fork(fork, f"{prefix}fork.{place}.", tensors, prompts) for place, fork in enumerate(path.forks)
        ]
    return entry


def _save_fork(fork: Trajectory, prefix: str, tensors: Tensors, prompts: dict[int, str]) -> dict[str, Any]:
    tensors[f"{prefix}token_ids"] = torch.from_numpy(fork.token_ids)
    tensors[f"{prefix}logprobs"] = torch.from_numpy(fork.logprobs)
    if fork.routed_experts is not None:
        tensors[f"{prefix}routed_experts"] = torch.from_numpy(fork.routed_experts)
    return _save(fork, prefix, tensors, prompts) | {"weight_version": fork.weight_version}


def _save_prompt(prompt: Prompt, tensors: Tensors, prompts: dict[int, str]) -> dict[str, Any]:
    """Return what JSON can hold of a prompt; the rest of it is the group's. Raises TypeError for other messages."""
    if id(prompt) not in prompts:
        prefix = prompts[id(prompt)] = f"prompt.{len(prompts)}."
        tensors[f"{prefix}token_ids"] = torch.tensor(prompt.token_ids)
        tensors[f"{prefix}engine_token_ids"] = torch.tensor(prompt.engine_token_ids)
        tensors[f"{prefix}position_ids"] = prompt.position_ids.contiguous().clone()
        _save_media(prompt.model_inputs, prompt.images, prefix, tensors)
    return {
        "tensors": prompts[id(prompt)],
        "text": prompt.text,
        "messages": list(prompt.messages),
        "inputs": sorted(prompt.model_inputs),
        "images": len(prompt.images),
    }


def _save_media(inputs: Mapping[str, Tensor], images: Sequence[Any], prefix: str, tensors: Tensors) -> None:
    # Copies: prompts of their own may share the pictures of their group's, and a file holds no tensor twice.
    tensors |= {f"{prefix}input.{name}": value.contiguous().clone() for name, value in inputs.items()}
    for place, image in enumerate(images):
        tensors[f"{prefix}image.{place}"] = torch.from_numpy(np.array(image.convert("RGB")))


def _load(
    completion: Completion,
    entry: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    prefix: str,
    prompt: Prompt,
    prompts: dict[str, Prompt],
) -> Trajectory:
    score, failure = entry["score"], entry["failure"]
    if score is not None:
        error = score["error"]
        score = Score(**{**score, "error": None if error is None else Failure(**error)})
    forks = []
    for place, fork in enumerate(entry.get("forks", ())):
        own = f"{prefix}fork.{place}."
        tokens, logprobs = (tensors[f"{own}{name}"].numpy() for name in ("token_ids", "logprobs"))
        routed = None if (experts := tensors.get(f"{own}routed_experts")) is None else experts.numpy()
        path = Completion(tokens, logprobs, "stop", fork["weight_version"], routed)
        forks.append(_load(path, fork, tensors, own, prompt, prompts))
    return Trajectory(
        completion.token_ids,
        completion.logprobs,
        tensors[f"{prefix}sampled"].numpy(),
        [_turn(turn) for turn in entry["turns"]],
        tensors[f"{prefix}position_ids"],
        entry["stop_reason"],
        completion.weight_version,
        later_inputs=_inputs(entry, tensors, prefix),
        images=_images(entry, tensors, prefix),
        score=score,
        failure=None if failure is None else Failure(**failure),
        text=entry["text"],
        prompt=_load_prompt(entry["prompt"], tensors, prompt, prompts) if "prompt" in entry else None,
        forks=forks,
        routed_experts=completion.routed_experts,
    )


def _load_prompt(
    entry: Mapping[str, Any], tensors: Mapping[str, Tensor], prompt: Prompt, prompts: dict[str, Prompt]
) -> Prompt:
    prefix = entry["tensors"]
    if prefix not in prompts:
        prompts[prefix] = replace(
            prompt,
            text=entry["text"],
            token_ids=tensors[f"{prefix}token_ids"].tolist(),
            engine_token_ids=tensors[f"{prefix}engine_token_ids"].tolist(),
            position_ids=tensors[f"{prefix}position_ids"],
            images=_images(entry, tensors, prefix),
            model_inputs=_inputs(entry, tensors, prefix),
            messages=entry["messages"],
            videos=(),
        )
    return prompts[prefix]


def _inputs(entry: Mapping[str, Any], tensors: Mapping[str, Tensor], prefix: str) -> Tensors:
    return {name: tensors[f"{prefix}input.{name}"] for name in entry["inputs"]}


def _images(entry: Mapping[str, Any], tensors: Mapping[str, Tensor], prefix: str) -> list[Image.Image]:
    return [Image.fromarray(tensors[f"{prefix}image.{place}"].numpy()) for place in range(entry["images"])]


def _turn(saved: Mapping[str, Any]) -> Turn:
    calls = tuple(Call(**call) for call in saved["calls"])
    return Turn(**{**saved, "messages": tuple(saved["messages"]), "calls": calls})
