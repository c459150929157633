"""How a run reads pictures and videos: one renderer and its worker processes, shared by all data sets."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from r1_cli.config import RunConfig
from r1_cli.models.files import ModelFiles
from r1_data.media_cache import MediaCache
from r1_data.positions import count_tokens, position_ids_of
from r1_data.prefetch import RemoteRenderer
from r1_data.render import Renderer
from r1_data.videos import FrameRules
from r1_data.workers import Ended, Workers

GIGABYTE = 10**9


@dataclass(frozen=True, slots=True)
class Rendering:
    """What data sets of one run share."""

    renderer: Renderer
    workers: Workers | None
    remote: RemoteRenderer | None = None  # renders rows with media, where ranks are on machines of a cluster


def build_renderer(config: RunConfig, model: ModelFiles, *, own_sizes: bool = False) -> Renderer:
    """Make the renderer that filter, engine and learner share; with `own_sizes` one of the processor's own limits."""
    return Renderer(
        model.processor,
        **({} if own_sizes else media_settings(config, model.processor)),
        chat_template=_text(config.data.override_chat_template),
        chat_template_kwargs=config.data.chat_template_kwargs,
        position_ids=position_ids_of(model.config) or count_tokens,
    )


def _text(template: str | None) -> str | None:
    """A template's text, where the file is named that holds it."""
    return Path(template).read_text(encoding="utf-8") if template and Path(template).is_file() else template


@contextmanager
def open_rendering(config: RunConfig, renderer: Renderer, ended: Ended | None = None) -> Iterator[Rendering]:
    """Give the renderer its worker processes; `ended` is told of their work, see `Workers`."""
    with open_workers(config, renderer, ended) as workers:
        yield Rendering(renderer, workers)


@contextmanager
def open_workers(config: RunConfig, target: Any, ended: Ended | None = None) -> Iterator[Workers | None]:
    """Processes that hold the target, started when first needed, ended with the block; None where none are wanted."""
    count = min(config.data.filter_overlong_prompts_workers, os.cpu_count() or 1)
    if config.data.filter_overlong_prompts_workers == 1:
        yield None
        return
    with Workers(target, count, ended=ended) as workers:
        yield workers


def media_settings(config: RunConfig, processor: Any) -> dict[str, Any]:
    """How `Renderer` resizes media and chooses frames, and where it keeps them."""
    data, limits = config.data, getattr(processor, "video_processor", None)
    settings: dict[str, Any] = {
        "min_pixels": data.min_pixels,
        "max_pixels": data.max_pixels,
        "video_min_pixels": data.video_min_pixels,
        "video_max_pixels": data.video_max_pixels,
    }
    if limits is not None and hasattr(limits, "max_frames"):  # other families' videos are refused row by row
        most = data.video_max_frames or limits.max_frames
        settings["frames"] = FrameRules(data.video_fps, min_frames=min(limits.min_frames, most), max_frames=most)
    if data.media_cache_gb and data.cache_dir:
        folder = Path(data.cache_dir).expanduser() / "media"
        settings["cache"] = MediaCache(0, folder, int(data.media_cache_gb * GIGABYTE))
    return settings
