"""Tests of the size of frames: the rule that qwen-vl-utils publishes, derived here once more, family by family."""

import math

import pytest

from r1_data.formats import Columns
from r1_data.messages import to_example
from r1_data.render import Renderer
from r1_data.types import DataError
from r1_data.vision import Vision

FAMILIES = {"qwen2_vl": 28, "qwen2_5_vl": 28, "qwen3_vl": 32}  # pixels of a token's side
EASYR1 = (262_144, 4_194_304)  # its defaults of data.min_pixels and data.max_pixels


def published(height, width, frames, low, high, side):
    """Height and width of a frame, as qwen-vl-utils' `fetch_video` has them for min_pixels and max_pixels."""
    low = 128 * side * side if low is None else low
    limit = max(min(768 * side * side, 128_000 * side * side * 0.9 / frames * 2), int(low * 1.05))
    high = min(limit if high is None else high, limit)
    rounded = [round(edge / side) * side for edge in (height, width)]
    if math.prod(rounded) > high:
        scale = math.sqrt(height * width / high)
        return tuple(max(side, math.floor(edge / scale / side) * side) for edge in (height, width))
    if math.prod(rounded) < low:
        scale = math.sqrt(low / (height * width))
        return tuple(math.ceil(edge * scale / side) * side for edge in (height, width))
    return tuple(rounded)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("wanted", [EASYR1, (3136, 200_704), (None, 400_000), (50_000, None), (3136, 12_845_056)])
def test_frames_of_any_video_have_the_published_size(fresh_processor, family, wanted):
    vision, side = Vision(fresh_processor(family), min_pixels=wanted[0], max_pixels=wanted[1]), FAMILIES[family]
    for frames in (2, 4, 20, 120, 300, 500, 768):
        for size in ((1080, 1920), (1920, 1080), (480, 640), (240, 320), (2160, 3840), (100, 900)):
            height, width = published(*size, frames, *wanted, side)
            tokens = frames // 2 * (height // side) * (width // side)
            told = vision._video.get_num_of_video_patches(frames, *size, {"size": vision.frame_range.size_for(frames)})
            assert told == 4 * tokens, (frames, size)


@pytest.mark.parametrize("family", FAMILIES)
def test_rendered_frames_have_the_published_size(fresh_processor, movie, family):
    renderer = Renderer(fresh_processor(family), min_pixels=50_000, max_pixels=4_194_304)
    for width, height in ((64, 48), (1280, 720)):
        example = to_example("t:1", {"prompt": "?", "answer": "1", "videos": [movie(width, height, 8)]}, Columns())
        prompt = renderer.render(example)
        assert prompt.videos[0].shape[-2:] == published(height, width, 4, 50_000, 4_194_304, FAMILIES[family])
        assert renderer.prompt_length(example) == len(prompt.token_ids)


def test_ten_seconds_of_full_hd_are_7200_tokens_under_easyr1s_defaults(fresh_processor, movie):
    film = to_example("t:1", {"prompt": "?", "answer": "1", "videos": [movie(1920, 1080, 20, fps=2)]}, Columns())
    text = to_example("t:1", {"prompt": "?", "answer": "1"}, Columns())
    renderer = Renderer(fresh_processor("qwen2_5_vl"), min_pixels=EASYR1[0], max_pixels=EASYR1[1])
    assert renderer.prompt_length(film) - renderer.prompt_length(text) == 7200 + 2  # where it begins and ends


def test_a_range_for_frames_alone_takes_the_place_of_that_for_pictures(fresh_processor):
    processor = fresh_processor("qwen2_vl")
    vision = Vision(processor, min_pixels=3136, max_pixels=50_176, video_min_pixels=10_000, video_max_pixels=2_000_000)
    assert vision.frame_range.size_for(768) == {"shortest_edge": 10_000, "longest_edge": 2_000_000}
    assert vision.budget == {"shortest_edge": 3136, "longest_edge": 50_176}
    with pytest.raises(DataError, match=r"video_min_pixels must be above 0 and at most video_max_pixels, got 9 and 8"):
        Vision(processor, video_min_pixels=9, video_max_pixels=8)


def test_without_a_range_frames_are_as_the_processor_is_configured(fresh_processor):
    for family in FAMILIES:
        processor = fresh_processor(family)
        assert Vision(processor).frame_range.size_for(40) == dict(processor.video_processor.size)
