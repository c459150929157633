"""Use a model's processor for media: count the tokens of a picture or video, and resize its pixels once.

No model family is named here. Used are the processor's own public methods: `get_number_of_image_patches`,
`get_num_of_video_patches`, `resize`, and `replace_video_token`, which writes a video's placeholders.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from r1_data.media_cache import MediaCache
from r1_data.pictures import image_size, load_image
from r1_data.pixel_ranges import frame_range, picture_range
from r1_data.references import Video, describe, digest_content, fetched
from r1_data.types import DataError, MediaError, MediaReference, PictureReference
from r1_data.videos import Clip, FrameRules, load_frames, probe_video

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import BaseImageProcessor, BaseVideoProcessor, ProcessorMixin
    from transformers.image_utils import SizeDict
    from transformers.video_utils import VideoMetadata


# Outputs of the processor per token; a forward pass with position ids needs none of them.
PER_TOKEN = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
KINDS = PER_TOKEN[2:]  # which tokens stand for media; see `r1_rollout.token_kinds`
_OF_VIDEOS = ("get_num_of_video_patches", "min_frames", "max_frames", "temporal_patch_size", "merge_size")
_RULES = "2"  # increment when the same content gives other pixels


@dataclass(frozen=True, slots=True)
class Pixels:
    """The resized media of one prompt, in the order of their placeholders."""

    images: "list[Tensor]"  # uint8 [3, height, width]
    videos: "list[Tensor]"  # uint8 [frames, 3, height, width]
    clips: list[Clip]  # one a video


def unsupported_reason(processor: "ProcessorMixin") -> str | None:
    """Return why media of this processor's family cannot be counted from sizes and resized once; None if they can."""
    family = type(processor).__name__
    kinds = [name for name in processor.model_input_names if name.endswith("token_type_ids") and name not in PER_TOKEN]
    if kinds:
        return f"pictures of {family} cannot be used: {', '.join(kinds)} of every token are not handed on to its model"
    image_processor = processor.image_processor
    for owner, name in (
        (processor, "image_token_id"),
        (processor, "image_token"),
        (image_processor, "get_number_of_image_patches"),
    ):
        if not hasattr(owner, name):
            return f"pictures of {family} cannot be used: it has no {name}"
    if not _counts_within(image_processor):
        counts = "it does not count a picture's patches within min_pixels and max_pixels"
        return f"pictures of {family} cannot be used: {counts}"
    if not _repeats_placeholder(processor):
        return f"pictures of {family} cannot be used: it writes more for a picture than its repeated placeholder"
    return None


def _repeats_placeholder(processor: "ProcessorMixin") -> bool:
    import numpy

    side = 2 * processor.image_processor.merge_size
    try:
        written = processor.replace_image_token({"image_grid_thw": numpy.array([[1, side, side]])}, 0)
    except (AttributeError, KeyError, NotImplementedError, TypeError):
        return False
    return bool(written == len(written) // len(processor.image_token) * processor.image_token)


def _counts_within(image_processor: "BaseImageProcessor") -> bool:
    try:
        size, side = image_processor.size, image_processor.patch_size * image_processor.merge_size
        one = {"min_pixels": side**2, "max_pixels": side**2}
        patches = image_processor.get_number_of_image_patches(8 * side, 8 * side, one)
        return bool(size["shortest_edge"] and size["longest_edge"] and patches == image_processor.merge_size**2)
    except (AttributeError, KeyError, TypeError, ValueError):
        return False


class Vision:
    """Resizes and counts media with one processor.

    `min_pixels` and `max_pixels` bound height × width of a picture, and of a video's frame by the rule of qwen-vl-utils
    (`r1_data.pixel_ranges`). `video_min_pixels` and `video_max_pixels` replace them for frames; the latter may exceed
    the rule. All media errors are MediaError.
    """

    def __init__(
        self,
        processor: "ProcessorMixin",
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        video_min_pixels: int | None = None,
        video_max_pixels: int | None = None,
        frames: FrameRules | None = None,
        cache: MediaCache | None = None,
    ) -> None:
        """None: as the processor is configured. Raises DataError: unknown family, or a lower bound above the upper."""
        self._processor, self._cache = processor, cache
        if why := unsupported_reason(processor):
            raise DataError(why)
        self._image: BaseImageProcessor = processor.image_processor
        video = getattr(processor, "video_processor", None)
        self._video: BaseVideoProcessor = video if all(hasattr(video, name) for name in _OF_VIDEOS) else None
        # The placeholder token of each kind of media, with its id.
        self.tokens: dict[str, tuple[str, int]] = {"picture": (processor.image_token, processor.image_token_id)}
        if video_token := getattr(processor, "video_token", None):
            self.tokens["video"] = (video_token, processor.video_token_id)
        self.budget = picture_range(self._image, min_pixels, max_pixels)
        if self._video is not None:
            self.frame_range = frame_range(self._video, min_pixels, max_pixels, video_min_pixels, video_max_pixels)
            chosen = frames or FrameRules(min_frames=self._video.min_frames, max_frames=self._video.max_frames)
            self.frames = replace(chosen, multiple=self._video.temporal_patch_size)

    @cached_property
    def reads_videos(self) -> bool:
        """Whether the processor counts a video's frames and writes its placeholders from no more than their number."""
        if self._video is None or "video" not in self.tokens:
            return False
        try:
            self._write_placeholders(Clip(2, 1.0, [0, 1], 64, 64))
        except (AttributeError, KeyError, NotImplementedError, TypeError):
            return False
        return True

    def picture_tokens(self, reference: PictureReference) -> int:
        limits = {"min_pixels": self.budget["shortest_edge"], "max_pixels": self.budget["longest_edge"]}
        with _named(reference):
            patches = int(self._image.get_number_of_image_patches(*image_size(reference), limits))
        return patches // self._image.merge_size**2

    def added_tokens(self, pictures: Sequence[PictureReference]) -> int:
        """Return how many tokens a row's pictures add to their placeholders."""
        return sum(self.picture_tokens(picture) - 1 for picture in pictures)

    def row_ids(self, pictures: Sequence[PictureReference]) -> list[list[int]]:
        """Return the tokens in the place of each placeholder of a row, which has no other pictures."""
        return [[self.tokens["picture"][1]] * self.picture_tokens(picture) for picture in pictures]

    def video_text(self, video: Video) -> str:
        """Return a video's placeholders, with any text that the family puts between them."""
        clip = self.probe(video)
        with _named(video):
            return self._write_placeholders(clip)

    def _write_placeholders(self, clip: Clip) -> str:
        import torch

        count, size = len(clip.indices), (clip.height, clip.width)
        patches = self._video.get_num_of_video_patches(count, *size, {"size": self.frame_range.size_for(count)})
        moments = -(-count // self._video.temporal_patch_size)
        # Only the first number and the product of the others matter; the factors are unknown.
        grid = torch.tensor([[moments, 1, patches // moments]])
        inputs = {"video_grid_thw": grid, "video_metadata": [_metadata(clip)]}
        return str(self._processor.replace_video_token(inputs, 0))

    def count_values(self, media: Sequence[MediaReference]) -> int:
        """Return the number of values in the model inputs of media, from headers. Raises MediaError or ValueError."""
        return sum(self._count_values(reference) for reference in map(fetched, media))

    def _count_values(self, reference: MediaReference) -> int:
        if not isinstance(reference, Video):
            patches, owner = self.picture_tokens(reference) * self._image.merge_size**2, self._image
        else:
            clip, owner = self.probe(reference), self._video
            size = {"size": self.frame_range.size_for(len(clip.indices))}
            patches = int(owner.get_num_of_video_patches(len(clip.indices), clip.height, clip.width, size))
        return int(patches * 3 * owner.temporal_patch_size * owner.patch_size**2)

    def probe(self, video: Video) -> Clip:
        if not self.reads_videos:
            raise MediaError(f"videos of {type(self._processor).__name__} cannot be used, only its pictures")
        return probe_video(video, self.frames)

    def load(self, media: Sequence[MediaReference]) -> Pixels:
        pixels = Pixels([], [], [])
        for reference in map(fetched, media):
            if isinstance(reference, Video):
                pixels.clips.append(clip := self.probe(reference))
                pixels.videos.append(self._resized(reference, clip))
            else:
                pixels.images.append(self._resized(reference, None))
        return pixels

    def process(self, text: str, pixels: Pixels) -> "dict[str, Tensor]":
        """Run the processor on a rendered chat and its media, without resizing or sampling again."""
        import torch

        arguments: dict[str, object] = {"images_kwargs": {"do_resize": False}}
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
        return {name: value for name, value in output.items() if isinstance(value, torch.Tensor)}

    def process_pictures(self, token_ids: list[int], images: "Sequence[Tensor]") -> "dict[str, Tensor] | None":
        """Return what `process` does for a chat with pictures only, in half the time, by expanding its token ids.

        `images` are uint8 [3, height, width] each, resized. Returns None for a family that replaces a picture by other
        text than a repeated placeholder.
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
        """Count the features that the model computes, by kind of media."""
        owners = {"picture": ("image_grid_thw", self._image), "video": ("video_grid_thw", self._video)}
        return {
            kind: int(inputs[name].prod(-1).sum()) // owner.merge_size**2 if name in inputs else 0
            for kind, (name, owner) in owners.items()
        }

    def describe(self) -> str:
        """Return a cache key of all that determines token counts and pixels."""
        parts = [self._image.to_json_string(), self.budget]
        if self._video is not None:
            parts += [self._video.to_json_string(), asdict(self.frame_range), asdict(self.frames)]
        return repr([type(self._processor).__name__, *parts])

    def _resized(self, reference: MediaReference, clip: Clip | None) -> "Tensor":
        import torch

        if self._cache is None:
            return self._resize(reference, clip)
        key = self._key(reference, clip)
        array = self._cache.get(key)
        if array is None or array.dtype.name != "uint8" or array.ndim != 3 + (clip is not None) or array.shape[-1] != 3:
            array = self._resize(reference, clip).movedim(-3, -1).contiguous().numpy()
            self._cache.put(key, array)
        return torch.from_numpy(array).movedim(-1, -3)

    def _resize(self, reference: MediaReference, clip: Clip | None) -> "Tensor":
        with _named(reference):
            if not isinstance(reference, Video):
                return self._resize_picture(reference)
            assert clip is not None
            return self._resize_video(reference, clip)

    def _resize_picture(self, reference: PictureReference) -> "Tensor":
        import numpy
        import torch

        # Channels stay last in memory, as in pictures: resizing is faster so, and nothing is copied.
        pixels = torch.from_numpy(numpy.array(load_image(reference))).permute(2, 0, 1)[None]
        owner = self._image
        factor = owner.patch_size * owner.merge_size
        resized = owner.resize(pixels, size=_size_dict(self.budget), resample=owner.resample, factor=factor)
        return resized[0]

    def _resize_video(self, video: Video, clip: Clip) -> "Tensor":
        owner = self._video
        resized = owner.resize(
            load_frames(video, clip)[None],
            size=_size_dict(self.frame_range.size_for(len(clip.indices))),
            resample=owner.resample,
            factor=owner.patch_size * owner.merge_size,
            temporal_factor=owner.temporal_patch_size,
            **self._uncapped(),
        )
        return resized[0]

    def _uncapped(self) -> dict[str, bool]:
        return {"cap_pixels_per_frame": False} if hasattr(self._video, "cap_pixels_per_frame") else {}

    def _key(self, reference: MediaReference, clip: Clip | None) -> str:
        owner = self._image if clip is None else self._video
        budget = self.budget if clip is None else self.frame_range.size_for(len(clip.indices))
        how = [_RULES, budget, owner.patch_size, owner.merge_size, owner.resample, clip and asdict(clip)]
        digest = hashlib.blake2b(repr(how).encode(), digest_size=16)
        digest.update(digest_content(reference))
        return digest.hexdigest()


@contextmanager
def _named(reference: MediaReference) -> Iterator[None]:
    try:
        yield
    except MediaError:
        raise
    except ValueError as error:
        name = describe(reference.source, "video") if isinstance(reference, Video) else describe(reference)
        raise MediaError(f"{name}: {error}") from error


def _metadata(clip: Clip) -> "VideoMetadata":
    from transformers.video_utils import VideoMetadata

    return VideoMetadata(
        total_num_frames=clip.total, fps=clip.fps, height=clip.height, width=clip.width, frames_indices=[*clip.indices]
    )


def _size_dict(budget: Mapping[str, int]) -> "SizeDict":
    from transformers.image_utils import SizeDict

    return SizeDict(**budget)
