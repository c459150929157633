"""Tests of videos: which frames are looked at, what headers tell, and how they reach the model, family by family."""

import io

import av
import pytest
import torch
from data_models import tiny_config
from PIL import Image
from transformers import AutoModelForImageTextToText

from r1_data.formats import Columns
from r1_data.messages import to_example
from r1_data.references import Video
from r1_data.render import Renderer
from r1_data.types import DataError, MediaError
from r1_data.videos import FrameRules, load_frames, probe_video

FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
RULES = FrameRules()


def example_of(prompt: str, **columns):
    return to_example("t:1", {"prompt": prompt, "answer": "1", **columns}, Columns())


@pytest.mark.parametrize(
    ("total", "source_fps", "rules", "count"),
    [
        (100, 25.0, RULES, 8),  # 4 seconds at 2 frames a second
        (10, 25.0, RULES, 4),  # at least min_frames
        (3, 25.0, RULES, 2),  # no more than there are, and even
        (1, 25.0, RULES, 2),  # the only one, twice
        (7, 1.0, RULES, 6),
        (100_000, 25.0, RULES, 768),
        (100, 25.0, FrameRules(fps=0.5, max_frames=6), 4),
        (9, 3.0, FrameRules(fps=30.0, multiple=1), 9),
        (9, 3.0, FrameRules(fps=0.1, min_frames=1, multiple=1), 1),
    ],
)
def test_number_of_frames_follows_duration_and_limits(total, source_fps, rules, count):
    indices = rules.sample(total, source_fps)
    assert len(indices) == count
    assert indices == sorted(indices)
    assert indices[0] == 0
    if count > 1:
        assert indices[-1] == total - 1


@pytest.mark.parametrize("kind", ["mp4", "mov", "matroska", "avi"])
def test_header_tells_what_decoding_gives(movie, tmp_path, kind):
    data = movie(64, 48, 21, fps=5, kind=kind)
    (tmp_path / "film").write_bytes(data)
    for source in (data, tmp_path / "film"):
        clip = probe_video(Video(source), RULES)
        assert (clip.total, clip.fps, clip.height, clip.width) == (21, 5.0, 48, 64)
        assert len(clip.indices) == 8
        frames = load_frames(Video(source), clip)
        assert (frames.dtype, tuple(frames.shape)) == (torch.uint8, (8, 3, 48, 64))
        brightness = frames[:, 2, 30:, 40:].float().mean((1, 2))
        expected = torch.tensor([20 + index * 200 // 21 for index in clip.indices])
        assert (brightness - expected).abs().max() < 6  # the frames that were asked for, in order


def test_frames_are_a_video_of_their_own_rate(picture):
    frames = tuple(Image.new("RGB", (8, 6), (level, 0, 0)) for level in range(10))
    clip = probe_video(Video(frames, fps=1.0), FrameRules(max_frames=4))
    assert (clip.total, clip.fps, clip.indices) == (10, 1.0, [0, 3, 6, 9])
    assert load_frames(Video(frames, 1.0), clip)[:, 0, 0, 0].tolist() == [0, 3, 6, 9]
    with pytest.raises(MediaError, match="must have one size, found 8x6, 9x6"):
        probe_video(Video((frames[0], Image.new("RGB", (9, 6)))), RULES)


def broken_videos(movie) -> dict[str, tuple[bytes, str]]:
    film = movie(64, 48, 20)
    sound = io.BytesIO()
    with av.open(sound, "w", format="avi") as container:
        stream = container.add_stream("pcm_s16le", rate=8000, layout="mono")
        frame = av.AudioFrame(format="s16", layout="mono", samples=1024)
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return {
        "zero bytes": (b"", "it is empty"),
        "text": (b"not a video at all", "not a video that is read here"),
        "playlist": (b"#EXTM3U\nfile:///etc/passwd\n", "not a video that is read here"),
        "concat script": (b"ffconcat version 1.0\nfile /etc/passwd\n", "not a video that is read here"),
        "picture": (b"\x89PNG\r\n\x1a\n" + bytes(99), "not a video that is read here"),
        "header alone": (film[:32], "cannot be read"),
        "cut in half": (film[: len(film) // 2], "cannot be read"),
        "only sound": (sound.getvalue(), "no pictures"),
    }


def test_broken_videos_are_refused_without_decoding(movie, tmp_path):
    for name, (data, message) in broken_videos(movie).items():
        with pytest.raises(MediaError, match=f"video of {len(data)} bytes: .*{message}"):
            probe_video(Video(data), RULES)
        (tmp_path / name).write_bytes(data)
        with pytest.raises(MediaError, match=f"{name}: .*{message}"):
            probe_video(Video(tmp_path / name), RULES)


def test_frames_over_the_limit_are_refused_before_decoding(movie):
    data = movie(640, 480, 20)
    with pytest.raises(MediaError, match=r"4 frames of 640x480 pixels are over the limit of 3,000,000 bytes decoded"):
        probe_video(Video(data), FrameRules(max_bytes=3_000_000))


def test_video_whose_frames_do_not_decode_is_named(movie):
    data = movie(64, 48, 20)
    clip = probe_video(Video(data), RULES)
    start, end = data.index(b"mdat") + 4, data.index(b"moov") - 4
    with pytest.raises(MediaError, match=f"video of {len(data)} bytes"):
        load_frames(Video(data[:start] + bytes(end - start) + data[end:]), clip)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("budget", [(None, None), (32 * 32, 64 * 64 * 4)])
def test_length_from_headers_equals_rendered_length(fresh_processor, picture, movie, family, budget):
    renderer = Renderer(
        fresh_processor(family), max_pixels=64 * 64, video_min_pixels=budget[0], video_max_pixels=budget[1]
    )
    rows = [
        example_of("<video>?", videos=[movie(64, 48, 21, fps=5)]),
        example_of("<image>a<video>b<image>c<video>d", images=[picture(60, 40)] * 2, videos=[movie(32, 90, 3)] * 2),
        example_of("What?", videos=[[picture(50, 50)] * 5]),
        example_of("<video>One frame", videos=[[picture(50, 50)]]),
    ]
    for example in rows:
        prompt = renderer.render(example)
        assert renderer.prompt_length(example) == len(prompt.token_ids)
        assert len(prompt.videos) == prompt.text.count("<|video_pad|>")


@pytest.mark.parametrize("family", FAMILIES)
def test_rendering_equals_the_processor_given_the_same_frames(fresh_processor, picture, movie, family):
    processor = fresh_processor(family)
    example = example_of("<video>a<image>b", images=[picture(60, 40)], videos=[movie(64, 48, 20)])
    prompt = Renderer(processor).render(example)
    clip = probe_video(example.media[0], FrameRules(multiple=2))
    expected = processor(
        text=[prompt.text],
        images=[picture_of(example.media[1])],
        videos=[load_frames(example.media[0], clip)],
        videos_kwargs={
            "do_sample_frames": False,
            "cap_pixels_per_frame": False,
            "video_metadata": [{"total_num_frames": clip.total, "fps": clip.fps, "frames_indices": clip.indices}],
        },
        return_tensors="pt",
    )
    assert prompt.token_ids == expected["input_ids"][0].tolist()
    assert set(prompt.model_inputs) == set(expected) - {"input_ids", "attention_mask", "mm_token_type_ids"}
    for name, value in prompt.model_inputs.items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_model_sees_of_a_prompt_what_it_sees_of_its_processors_output(fresh_processor, picture, movie, family):
    processor = fresh_processor(family)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(tiny_config(family, processor)).eval()
    renderer = Renderer(processor, max_pixels=56 * 56 * 4, video_min_pixels=784)
    prompt = renderer.render(
        example_of("<video>a<image>b", images=[picture(60, 40)], videos=[movie(64, 48, 20, fps=4)])
    )
    inputs = processor(
        text=[prompt.text],
        images=list(prompt.images),
        images_kwargs={"do_resize": False},
        videos=list(prompt.videos),
        videos_kwargs={
            "do_resize": False,
            "do_sample_frames": False,
            "video_metadata": [
                {"total_num_frames": 20, "fps": 4.0, "frames_indices": [0, 2, 4, 6, 8, 11, 13, 15, 17, 19]}
            ],
        },
        return_tensors="pt",
    )
    with torch.no_grad():
        expected = model(**inputs).logits
        own = model(torch.tensor([prompt.token_ids]), position_ids=prompt.position_ids[:, None], **prompt.model_inputs)
    assert torch.allclose(own.logits, expected, atol=1e-5)


def picture_of(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data)).convert("RGB")


def test_a_chat_template_without_videos_is_refused(fresh_processor, movie):
    template = "{% for item in messages[0].content %}{{ item.text }}{% endfor %}"
    renderer = Renderer(fresh_processor("qwen2_vl"), chat_template=template)
    with pytest.raises(DataError, match="t:1: 0 video placeholders in the prompt for 1 videos"):
        renderer.prompt_length(example_of("<video>?", videos=[movie(32, 32, 4)]))


def test_same_media_are_decoded_once(fresh_processor, picture, movie, monkeypatch):
    import r1_data.vision
    from r1_data.media_cache import MediaCache

    calls = []
    for name in ("load_image", "load_frames"):
        original = getattr(r1_data.vision, name)
        monkeypatch.setattr(r1_data.vision, name, lambda *a, original=original: calls.append(1) or original(*a))
    renderer = Renderer(fresh_processor("qwen2_5_vl"), cache=MediaCache(2**24))
    example = example_of("<video><image>", images=[picture(60, 40)], videos=[movie(64, 48, 8)])
    first, second = renderer.render(example), renderer.render(example)
    assert len(calls) == 2
    for name, value in first.model_inputs.items():
        assert torch.equal(value, second.model_inputs[name])
