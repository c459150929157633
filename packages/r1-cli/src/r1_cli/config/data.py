"""Configuration section `data`: where the rows are, and how they become prompts."""

from r1_cli.config.section import Count, Files, Positive, Section


class DataConfig(Section):
    """Lengths are tokens, batch sizes are prompts, pixel limits are width × height."""

    train_files: Files | None = None  # `name@split` on the hub, a folder, a file, `json@./folder`, or a list of these
    val_files: Files | None = None  # null: no validation
    prompt_key: str = "prompt"
    answer_key: str = "answer"
    image_key: str = "images"
    video_key: str = "videos"
    image_dir: str | None = None  # where relative picture paths begin
    video_fps: Positive = 2.0
    max_prompt_length: Count = 2048
    max_response_length: Count = 2048
    rollout_batch_size: Count = 512  # prompts per training step
    mini_rollout_batch_size: Count | None = None  # prompts generated at a time while filling that batch
    val_batch_size: int = 1024  # -1: all at once
    format_prompt: str | None = None  # a Jinja file, rendered with `content` and the row's columns
    system_prompt: str | None = None
    override_chat_template: str | None = None  # a Jinja file in place of the tokenizer's chat template
    shuffle: bool = True
    seed: int = 1
    min_pixels: Count | None = 262144
    max_pixels: Count | None = 4194304
    filter_overlong_prompts: bool = True  # false: a prompt over max_prompt_length is an error
    filter_overlong_prompts_workers: Count = 16
