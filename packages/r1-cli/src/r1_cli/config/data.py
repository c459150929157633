"""Configuration section `data`: the rows, and how they become prompts."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, Field

from r1_cli.config.curriculum import CurriculumConfig
from r1_cli.config.files import folder_problems, is_template_text, template_problems
from r1_cli.config.problems import KeyProblem, nearest_divisors
from r1_cli.config.rows import ColumnsConfig, TagsConfig
from r1_cli.config.section import Count, Files, NonNegative, OneOrMore, Positive, Section, Tree, UserPath
from r1_data.formats import CONVERSATION_NAMES, NAMES

if TYPE_CHECKING:
    RowFormat = str
else:
    RowFormat = Literal[tuple(dict.fromkeys(NAMES + CONVERSATION_NAMES))]  # in r1_data/formats.py


def _numbers(value: object) -> object:
    return [float(part) for part in value.split(",")] if isinstance(value, str) else value


class SourceConfig(Section):
    """One of several sources. What it does not set is as in `data`."""

    files: Files  # as data.train_files
    name: str | None = None  # in metrics; null: from the name of the files
    weight: Positive | None = None  # share of a batch, relative to other sources; null in all: by number of rows
    n: Count | None = None  # answers per prompt in validation; null: the k of Avg<k> in the name, else as all
    temperature: NonNegative | None = None  # in validation; null: of worker.rollout.val_override_config
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None  # likewise
    max_tokens: Count | None = None  # of an answer in validation, at most data.max_response_length; null: that
    groups: list[str] = Field(default_factory=list)  # columns; r1 eval prints figures for each of their values
    row_format: RowFormat | None = None
    prompt_key: str | None = None
    answer_key: str | None = None
    image_key: str | None = None
    video_key: str | None = None
    messages_key: str | None = None
    tools_key: str | None = None
    columns: ColumnsConfig | None = None
    tags: TagsConfig | None = None
    image_dir: UserPath | None = None
    format_prompt: UserPath | None = None
    system_prompt: str | None = None
    reward_function: UserPath | None = None  # also in validation, by name; null: worker.reward.reward_function
    reward_function_kwargs: Tree = Field(default_factory=dict)  # its keywords
    # also in validation, by name; null: those of worker.rollout.multi_turn, or its environment
    tools: Annotated[list[UserPath] | None, OneOrMore] = None
    environment: UserPath | None = None  # likewise
    environment_kwargs: Tree = Field(default_factory=dict)  # of its constructor


class DataConfig(Section):
    """Lengths are tokens, batch sizes are prompts, pixel limits are width × height."""

    train_files: Files | None = None  # `name@split` on the hub, a folder, a file, `json@./folder`, or a list of these
    val_files: Files | None = None  # null: no validation
    train_probs: Annotated[list[Positive], BeforeValidator(_numbers)] | None = None  # one per entry of train_files
    sources: list[SourceConfig] | None = None  # instead of train_files, if sources differ in more than files
    val_sources: list[SourceConfig] | None = None  # instead of val_files
    stopping_strategy: Literal["all_exhausted", "first_exhausted"] = "all_exhausted"  # an epoch of weighted sources
    row_format: RowFormat | None = None  # null: detected
    prompt_key: str = "prompt"  # the column of the question, or of messages
    answer_key: str = "answer"  # of the ground truth
    image_key: str = "images"  # of the pictures
    video_key: str = "videos"  # of the videos
    messages_key: str = "messages"  # of conversations, for r1 sft
    tools_key: str = "tools"  # of the tools' JSON schemas, for r1 sft
    columns: ColumnsConfig = ColumnsConfig()
    tags: TagsConfig = TagsConfig()
    image_dir: UserPath | None = None  # base folder of relative picture paths
    allow_urls: bool = False  # fetch pictures and videos from http and https
    video_fps: Positive = 2.0  # frames used of each second
    video_max_frames: Count | None = None  # of a video; null: the processor's default
    video_min_pixels: Count | None = None  # width × height of a frame; null: min_pixels
    video_max_pixels: Count | None = None  # null: max_pixels, at most 768 tokens a pair of frames and 115,200 in all
    max_prompt_length: Count = 2048
    max_response_length: Count = 2048
    max_length: Count = 4096  # of a conversation, for r1 sft
    # a conversation over max_length, for r1 sft: an error, left out, or cut on the right
    truncation: Literal["error", "drop", "right"] = "error"
    rollout_batch_size: Count = 512  # prompts per training step
    mini_rollout_batch_size: Count | None = None  # prompts sampled at a time to fill that batch
    val_batch_size: int = 1024  # -1: all at once
    format_prompt: UserPath | None = None  # a Jinja file, rendered with `content` and the row's columns
    system_prompt: str | None = None
    override_chat_template: UserPath | None = None  # in place of the tokenizer's: a Jinja file, or its text
    chat_template_kwargs: Tree = Field(default_factory=dict)  # its further arguments, e.g. enable_thinking
    curriculum: CurriculumConfig = CurriculumConfig()
    shuffle: bool = True  # shuffle the rows each epoch
    seed: int = 1  # of the shuffle
    min_pixels: Count | None = 262144  # pictures and frames are resized into this range, if their processor has one
    max_pixels: Count | None = 4194304  # null: the processor's default
    filter_overlong_prompts: bool = True  # false: a prompt over max_prompt_length is an error
    filter_overlong_prompts_workers: Count = 16  # worker processes, at most one per CPU, also for rendering; 1: none
    bad_rows: Literal["refuse", "skip_media", "skip"] = "skip_media"  # left out: rows with unreadable media, or all
    cache_dir: str | None = "~/.cache/r1"  # checks of 1,000 and more rows; null: none
    media_memory_gb: NonNegative = 1.0  # per node, for decoded media of training rows; as much for validation
    media_cache_gb: NonNegative = 0.0  # on disk, for decoded and resized media

    def batch_problems(self) -> Iterator[KeyProblem]:
        mini = self.mini_rollout_batch_size
        if mini is not None and self.rollout_batch_size % mini:
            yield (
                "data.mini_rollout_batch_size",
                f"must divide data.rollout_batch_size ({self.rollout_batch_size}); "
                f"{nearest_divisors(self.rollout_batch_size, mini)} would do",
            )
        if self.val_batch_size == 0 or self.val_batch_size < -1:
            yield "data.val_batch_size", "must be at least 1, or -1 for all at once"

    def pixel_problems(self) -> Iterator[KeyProblem]:
        ranges = {"data.": (self.min_pixels, self.max_pixels)}
        if self.video_min_pixels or self.video_max_pixels:
            ranges["data.video_"] = self.video_min_pixels or self.min_pixels, self.video_max_pixels or self.max_pixels
        for key, (least, most) in ranges.items():
            if least is not None and most is not None and least > most:
                yield f"{key}min_pixels", f"must be at most {key}max_pixels ({most})"

    def file_problems(self) -> Iterator[KeyProblem]:
        yield from template_problems("data.format_prompt", self.format_prompt)
        if not is_template_text(self.override_chat_template):
            yield from template_problems("data.override_chat_template", self.override_chat_template)
        yield from folder_problems("data.image_dir", self.image_dir)
