"""The media side of a model's processor: how many tokens a picture or video takes, and its pixels, resized once.

Nothing here names a model family. Asked are the processor's own public parts: `get_number_of_image_patches` and
`get_num_of_video_patches` of a size, `resize`, and `replace_video_token`, which writes a video's placeholders.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from r1_data.media_cache import MediaCache
from r1_data.pictures import image_size, load_image
from r1_data.pixel_ranges import frame_range, picture_range
from r1_data.references import Video, describe, digest_content, fetched
from r1_data.types import DataError, MediaError
from r1_data.videos import Clip, FrameRules, load_frames, probe_video

if TYPE_CHECKING:
    from torch import Tensor


_OF_VIDEOS = ("get_num_of_video_patches", "min_frames", "max_frames", "temporal_patch_size", "merge_size")
_RULES = "2"  # goes up when the same content gives other pixels than before


@dataclass(frozen=True, slots=True)
class Pixels:
    """The media of one prompt, resized, in the order of their placeholders."""

    images: "list[Tensor]"  # uint8 [3, height, width]
    videos: "list[Tensor]"  # uint8 [frames, 3, height, width]
    clips: list[Clip]  # one a video


def why_unread(processor: Any) -> str | None:
    """Why media of this processor's family cannot be used, its texts being what they are; None where they can.

    Families whose pictures attend in both directions (Gemma 3, PaliGemma) tell the model's forward so by
    `token_type_ids`. Prompts here carry none, and the pictures would be seen causally in silence.
    """
    family, known = type(processor).__name__, "Qwen2-VL, Qwen2.5-VL and Qwen3-VL have"
    tokenizer = getattr(getattr(processor, "tokenizer", None), "model_input_names", ())
    own = [*getattr(processor, "model_input_names", ())]
    for name in tokenizer:
        if name in own:
            own.remove(name)
    if "token_type_ids" in own:
        return f"pictures of {family} cannot be used: they attend in both directions (token_type_ids)"
    for owner, name in ((processor, "image_token_id"), (processor.image_processor, "get_number_of_image_patches")):
        if not hasattr(owner, name):
            return f"pictures of {family} cannot be used: it has no {name}; {known}"
    if not _counts_within(processor.image_processor):
        counts = "it does not count a picture's patches within min_pixels and max_pixels as those of"
        return f"pictures of {family} cannot be used: {counts} Qwen2-VL, Qwen2.5-VL and Qwen3-VL do"
    return None


def _counts_within(image_processor: Any) -> bool:
    """Whether an image processor resizes into a range of pixels and counts patches by it: one token, if told so."""
    try:
        size, side = image_processor.size, image_processor.patch_size * image_processor.merge_size
        one = {"min_pixels": side**2, "max_pixels": side**2}
        patches = image_processor.get_number_of_image_patches(8 * side, 8 * side, one)
        return bool(size["shortest_edge"] and size["longest_edge"] and patches == image_processor.merge_size**2)
    except (AttributeError, KeyError, TypeError, ValueError):
        return False


class Vision:
    """Resizes and counts media as one processor does.

    `min_pixels` and `max_pixels` bound height × width of a picture, and of a video's frame by the rule of qwen-vl-utils
    (see `r1_data.pixel_ranges`), whatever the model's video processor bounds. `video_min_pixels` and `video_max_pixels`
    take their place for frames; the latter may be above what the rule allows.
    """

    def __init__(
        self,
        processor: Any,
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        video_min_pixels: int | None = None,
        video_max_pixels: int | None = None,
        frames: FrameRules | None = None,
        cache: MediaCache | None = None,
    ) -> None:
        """None stands for what the processor is configured to. Raises DataError: unknown family, range upside down."""
        self._processor, self._cache = processor, cache
        if why := why_unread(processor):
            raise DataError(why)
        self._image: Any = processor.image_processor
        video: Any = getattr(processor, "video_processor", None)
        self._video: Any = video if all(hasattr(video, name) for name in _OF_VIDEOS) else None
        self.budget = picture_range(self._image, min_pixels, max_pixels)
        if self._video is not None:
            self.frame_range = frame_range(self._video, min_pixels, max_pixels, video_min_pixels, video_max_pixels)
            chosen = frames or FrameRules(min_frames=self._video.min_frames, max_frames=self._video.max_frames)
            self.frames = replace(chosen, multiple=self._video.temporal_patch_size)

    @property
    def tokens(self) -> dict[str, tuple[str, int]]:
        """The placeholder token of each kind of media, with its id."""
        kinds = {"picture": "image_token", "video": "video_token"}
        named = {kind: (getattr(self._processor, name, None), name) for kind, name in kinds.items()}
        return {kind: (token, getattr(self._processor, f"{name}_id")) for kind, (token, name) in named.items() if token}

    def picture_tokens(self, reference: Any) -> int:
        """Tokens that a picture takes, from its header. Raises MediaError."""
        limits = {"min_pixels": self.budget["shortest_edge"], "max_pixels": self.budget["longest_edge"]}
        with _named(reference):
            patches = int(self._image.get_number_of_image_patches(*image_size(reference), limits))
        return patches // self._image.merge_size**2

    def video_text(self, video: Video) -> str:
        """The placeholders, and whatever text the family puts between them, that stand for a video."""
        import torch

        clip = self.probe(video)
        count, size = len(clip.indices), (clip.height, clip.width)
        with _named(video):
            patches = self._video.get_num_of_video_patches(count, *size, {"size": self.frame_range.of(count)})
        moments = -(-count // self._video.temporal_patch_size)
        # Families read of a grid its first number and the product of the others, which are not known apart.
        grid = torch.tensor([[moments, 1, patches // moments]])
        inputs = {"video_grid_thw": grid, "video_metadata": [_metadata(clip)]}
        return str(self._processor.replace_video_token(inputs, 0))

    def count_values(self, media: Sequence[Any]) -> int:
        """Numbers in what the model is given of media, from their headers. Raises MediaError or ValueError."""
        return sum(self._count_values(reference) for reference in map(fetched, media))

    def _count_values(self, reference: Any) -> int:
        if not isinstance(reference, Video):
            patches, owner = self.picture_tokens(reference) * self._image.merge_size**2, self._image
        else:
            clip, owner = self.probe(reference), self._video
            size = {"size": self.frame_range.of(len(clip.indices))}
            patches = int(owner.get_num_of_video_patches(len(clip.indices), clip.height, clip.width, size))
        return int(patches * 3 * owner.temporal_patch_size * owner.patch_size**2)

    def probe(self, video: Video) -> Clip:
        """The frames of a video that the model sees. Raises MediaError."""
        if self._video is None:
            raise MediaError(f"videos of {type(self._processor).__name__} cannot be used, only its pictures")
        return probe_video(video, self.frames)

    def load(self, media: Sequence[Any]) -> Pixels:
        """Decode and resize, or take from the cache. Raises MediaError."""
        pixels = Pixels([], [], [])
        for reference in map(fetched, media):
            if isinstance(reference, Video):
                pixels.clips.append(clip := self.probe(reference))
                pixels.videos.append(self._resized(reference, clip))
            else:
                pixels.images.append(self._resized(reference, None))
        return pixels

    def process(self, text: str, pixels: Pixels) -> "dict[str, Tensor]":
        """The processor's output for a rendered chat and its media, which it neither resizes nor samples again."""
        arguments: dict[str, Any] = {"images_kwargs": {"do_resize": False}}
        if pixels.images:
            arguments["images"] = [image.contiguous() for image in pixels.images]
        if pixels.videos:
            arguments["videos"] = [video.contiguous() for video in pixels.videos]
            arguments["videos_kwargs"] = {
                "do_resize": False,
                "do_sample_frames": False,
                "video_metadata": list(map(_metadata, pixels.clips)),
                "return_metadata": True,
                **self._uncapped(),
            }
        output = self._processor(
            text=[text], text_kwargs={"add_special_tokens": False}, return_tensors="pt", **arguments
        )
        return {name: value for name, value in output.items() if hasattr(value, "nbytes")}

    def process_pictures(self, token_ids: list[int], images: "Sequence[Tensor]") -> "dict[str, Tensor] | None":
        """What `process` returns for a chat with pictures alone, in half the time.

        Most of the processor's time for a small picture goes to text: it writes a placeholder hundreds of times and has
        it tokenized again. A special token is one token wherever it stands, so the tokens are known without that.

        Args:
            token_ids: the tokens of the chat, with one placeholder a picture.
            images: uint8 [3, height, width] each, resized.

        Returns:
            None for a family that puts other text in the place of a picture than a run of its placeholder.
        """
        import torch

        token, token_id = self.tokens["picture"]
        inputs: dict[str, Tensor] = {}
        runs = []
        if images:
            inputs |= self._image([image.contiguous() for image in images], do_resize=False, return_tensors="pt")
        for index in range(len(images)):
            written = str(self._processor.replace_image_token(inputs, index))
            count = len(written) // len(token)
            if written != token * count:
                return None
            runs.append(count)
        counts = iter(runs)
        expanded = [t for one in token_ids for t in ([one] * next(counts) if one == token_id else (one,))]
        inputs["input_ids"] = torch.tensor([expanded])
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == token_id).long()
        return inputs

    def count_features(self, inputs: "Mapping[str, Tensor]") -> dict[str, int]:
        """How many features the model will make of what the processor returned, for each kind of media."""
        owners = {"picture": ("image_grid_thw", self._image), "video": ("video_grid_thw", self._video)}
        return {
            kind: int(inputs[name].prod(-1).sum()) // owner.merge_size**2 if name in inputs else 0
            for kind, (name, owner) in owners.items()
        }

    def describe(self) -> str:
        """Everything that decides token counts and pixels, as text; what a cache of them must be keyed by."""
        parts = [self._image.to_json_string(), self.budget]
        if self._video is not None:
            parts += [self._video.to_json_string(), asdict(self.frame_range), asdict(self.frames)]
        return repr([type(self._processor).__name__, *parts])

    def _resized(self, reference: Any, clip: Clip | None) -> "Tensor":
        import torch

        if self._cache is None:
            return self._resize(reference, clip)
        key = self._key(reference, clip)
        array = self._cache.get(key)
        if array is None or array.dtype.name != "uint8" or array.ndim != 3 + (clip is not None) or array.shape[-1] != 3:
            array = self._resize(reference, clip).movedim(-3, -1).contiguous().numpy()
            self._cache.put(key, array)
        return torch.from_numpy(array).movedim(-1, -3)

    def _resize(self, reference: Any, clip: Clip | None) -> "Tensor":
        with _named(reference):
            return self._resize_picture(reference) if clip is None else self._resize_video(reference, clip)

    def _resize_picture(self, reference: Any) -> "Tensor":
        import numpy
        import torch

        # Channels stay last in memory, where pictures have them: resizing so is faster, and nothing is laid out anew.
        pixels = torch.from_numpy(numpy.array(load_image(reference))).permute(2, 0, 1)[None]
        owner = self._image
        factor = owner.patch_size * owner.merge_size
        resized = owner.resize(pixels, size=_size_dict(self.budget), resample=owner.resample, factor=factor)
        return resized[0]

    def _resize_video(self, video: Video, clip: Clip) -> "Tensor":
        owner = self._video
        resized = owner.resize(
            load_frames(video, clip)[None],
            size=_size_dict(self.frame_range.of(len(clip.indices))),
            resample=owner.resample,
            factor=owner.patch_size * owner.merge_size,
            temporal_factor=owner.temporal_patch_size,
            **self._uncapped(),
        )
        return resized[0]

    def _uncapped(self) -> dict[str, bool]:
        """The ranges are told for each video, so the processor's own guess of a total is not wanted beside them."""
        return {"cap_pixels_per_frame": False} if hasattr(self._video, "cap_pixels_per_frame") else {}

    def _key(self, reference: Any, clip: Clip | None) -> str:
        """A hash of the encoded content and of what is done to it."""
        owner = self._image if clip is None else self._video
        budget = self.budget if clip is None else self.frame_range.of(len(clip.indices))
        how = [_RULES, budget, owner.patch_size, owner.merge_size, owner.resample, clip and asdict(clip)]
        digest = hashlib.blake2b(repr(how).encode(), digest_size=16)
        digest.update(digest_content(reference))
        return digest.hexdigest()


@contextmanager
def _named(reference: Any) -> Iterator[None]:
    """Turn a ValueError of the processor into a MediaError that names the picture or video."""
    try:
        yield
    except MediaError:
        raise
    except ValueError as error:
        is_video = isinstance(reference, Video)
        name = describe(reference.source, "video") if is_video else describe(reference)
        raise MediaError(f"{name}: {error}") from error


def _metadata(clip: Clip) -> Any:
    from transformers.video_utils import VideoMetadata

    return VideoMetadata(
        total_num_frames=clip.total, fps=clip.fps, height=clip.height, width=clip.width, frames_indices=[*clip.indices]
    )


def _size_dict(budget: Mapping[str, int]) -> Any:
    from transformers.image_utils import SizeDict

    return SizeDict(**budget)
