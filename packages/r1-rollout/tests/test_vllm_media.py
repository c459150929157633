"""What vLLM is given of a prompt with media, and which prompts are refused before it sees them."""

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from r1_rollout.errors import PromptError
from r1_rollout.probes import ProbePrompt

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]
IMAGE, VIDEO = 60, 61


def reader() -> Any:
    from r1_rollout.vllm.media import MediaReader

    vision = SimpleNamespace(spatial_merge_size=2)
    return MediaReader.of(SimpleNamespace(vision_config=vision, image_token_id=IMAGE, video_token_id=VIDEO))


def make_prompt(token_ids: list[int], axes: int = 4, **inputs: torch.Tensor) -> ProbePrompt:
    return ProbePrompt("row 7", token_ids, torch.arange(len(token_ids)).expand(axes, -1), inputs)


def pictures(*fills: float) -> dict[str, torch.Tensor]:
    """Pictures of 4 by 4 patches, four tokens each."""
    pixels = torch.cat([torch.full((16, 6), fill) for fill in fills])
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 4]] * len(fills))}


def test_a_medium_lies_from_its_first_placeholder_to_its_last_and_brings_the_prompts_positions() -> None:
    video = {"pixel_values_videos": torch.ones(32, 6), "video_grid_thw": torch.tensor([[2, 4, 4]])}
    token_ids = [1, *[IMAGE] * 4, 2, *[VIDEO] * 4, 3, 4, *[VIDEO] * 4, 5]  # a time between the video's frames
    prompt = make_prompt(token_ids, **pictures(0.5), **video)
    read = reader().read(prompt)
    (picture,), (film,) = read["mm_placeholders"]["image"], read["mm_placeholders"]["video"]
    assert (picture.offset, picture.length, picture.is_embed) == (1, 4, None)
    assert (film.offset, film.length) == (6, 10)
    assert film.is_embed.tolist() == [True] * 4 + [False] * 2 + [True] * 4
    for kind in ("image", "video"):
        (item,) = read["mm_kwargs"][kind]
        assert item[f"{kind}_position_ids"].data.equal(prompt.position_ids[1:])


def test_equal_pictures_have_one_name_wherever_they_stand() -> None:
    one = reader().read(make_prompt([1, *[IMAGE] * 4, *[IMAGE] * 4, 2, *[IMAGE] * 4], **pictures(0.5, 0.5, 0.7)))
    other = reader().read(make_prompt([1, 2, 3, *[IMAGE] * 4], **pictures(0.5)))
    first, second, third = one["mm_hashes"]["image"]
    assert first == second == other["mm_hashes"]["image"][0] != third


def test_a_prompt_that_vllm_would_misread_is_refused_by_name() -> None:
    whole = [1, *[IMAGE] * 4, 2]
    with pytest.raises(PromptError, match="prompt row 7: 3 image placeholders, but 4 features"):
        reader().read(make_prompt([1, *[IMAGE] * 3, 2], **pictures(0.5)))
    with pytest.raises(PromptError, match=r"prompt row 7 has media, but position_ids of shape \[1, 6\]"):
        reader().read(make_prompt(whole, axes=1, **pictures(0.5)))
    with pytest.raises(PromptError, match=r"prompt row 7: vLLM cannot take the inputs audio"):
        reader().read(make_prompt(whole, audio=torch.zeros(3), **pictures(0.5)))
