"""Configuration section `data`: where the rows are, and how they become prompts."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from r1_cli.config.section import Count, Files, NonNegative, Positive, Section
from r1_data.formats import NAMES

if TYPE_CHECKING:
    RowFormat = str
else:
    RowFormat = Literal[NAMES]  # whatever stands in r1_data/row_formats


def _numbers(value: Any) -> Any:
    """LMM-R1 writes `0.1,0.4,0.5`."""
    return [float(part) for part in value.split(",")] if isinstance(value, str) else value


class SourceConfig(Section):
    """One of several sources. What it does not set is as `data` has it."""

    files: Files  # as data.train_files
    name: str | None = None  # in metrics; null: from the name of the files
    weight: Positive | None = None  # share of a batch, relative to the others'; null in all: by number of rows
    n: Count | None = None  # answers per prompt in validation; null: the k of Avg<k> in the name, else as all
    row_format: RowFormat | None = None
    prompt_key: str | None = None
    answer_key: str | None = None
    image_key: str | None = None
    video_key: str | None = None
    image_dir: str | None = None
    format_prompt: str | None = None
    system_prompt: str | None = None
    reward_function: str | None = None  # also of a validation source of this name; null: worker.reward.reward_function
    reward_function_kwargs: dict[str, Any] = Field(default_factory=dict)  # its keywords


class DataConfig(Section):
    """Lengths are tokens, batch sizes are prompts, pixel limits are width × height."""

    train_files: Files | None = None  # `name@split` on the hub, a folder, a file, `json@./folder`, or a list of these
    val_files: Files | None = None  # null: no validation
    train_probs: Annotated[list[Positive], BeforeValidator(_numbers)] | None = None  # one per entry of train_files
    sources: list[SourceConfig] | None = None  # in place of train_files, where sources differ in more than their files
    val_sources: list[SourceConfig] | None = None  # in place of val_files
    stopping_strategy: Literal["all_exhausted", "first_exhausted"] = "all_exhausted"  # an epoch of weighted sources
    row_format: RowFormat | None = None  # null: detected
    prompt_key: str = "prompt"  # the column of the question, or of messages
    answer_key: str = "answer"  # of the ground truth
    image_key: str = "images"  # of the pictures
    video_key: str = "videos"  # of the videos
    image_dir: str | None = None  # where relative picture paths begin
    allow_urls: bool = False  # fetch pictures and videos from http and https
    video_fps: Positive = 2.0  # frames looked at of each second
    video_max_frames: Count | None = None  # of a video; null: as the model's processor is configured
    video_min_pixels: Count | None = None  # width × height of a frame; null: min_pixels
    video_max_pixels: Count | None = None  # null: max_pixels, at most 768 tokens a pair of frames and 115,200 in all
    max_prompt_length: Count = 2048
    max_response_length: Count = 2048
    rollout_batch_size: Count = 512  # prompts per training step
    mini_rollout_batch_size: Count | None = None  # prompts generated at a time while filling that batch
    val_batch_size: int = 1024  # -1: all at once
    format_prompt: str | None = None  # a Jinja file, rendered with `content` and the row's columns
    system_prompt: str | None = None
    override_chat_template: str | None = None  # Jinja in place of the tokenizer's chat template: a file, or its text
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)  # its further arguments, e.g. enable_thinking
    shuffle: bool = True  # the order of the rows, anew each epoch
    seed: int = 1  # of that order
    min_pixels: Count | None = 262144  # every picture, and frame of a video, is resized into this range
    max_pixels: Count | None = 4194304  # null: as the model's processor has it
    filter_overlong_prompts: bool = True  # false: a prompt over max_prompt_length is an error
    filter_overlong_prompts_workers: Count = 16  # at most one per processor; they render ahead, too; 1: no others
    bad_rows: Literal["refuse", "skip_media", "skip"] = "skip_media"  # left out: rows with unreadable media, or all
    cache_dir: str | None = "~/.cache/r1"  # where the check of 1,000 and more rows is remembered; null: nowhere
    media_memory_gb: NonNegative = 1.0  # on a machine, for decoded media of the training rows; as much for validation
    media_cache_gb: NonNegative = 0.0  # on disk, for decoded and resized media
