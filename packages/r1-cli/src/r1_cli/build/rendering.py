"""Build the renderer of a run and its worker processes, which all data sets share."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from r1_cli.config import RunConfig
from r1_cli.models.families import find_value
from r1_cli.models.files import ModelFiles
from r1_data.media_cache import MediaCache
from r1_data.positions import count_tokens, position_ids_of
from r1_data.prefetch import RemoteRenderer
from r1_data.render import Renderer
from r1_data.types import Example
from r1_data.videos import FrameRules
from r1_data.workers import Ended, Workers

GIGABYTE = 10**9


@dataclass(frozen=True, slots=True)
class Rendering:
    renderer: Renderer
    workers: Workers | None
    remote: RemoteRenderer | None = None  # renders rows with media, where ranks are on machines of a cluster
    prepare: Callable[[Example], Example] | None = None  # changes every row, e.g. to show tools


def build_renderer(config: RunConfig, model: ModelFiles, *, own_sizes: bool = False) -> Renderer:
    """Build the renderer of filter, engine and learner. With `own_sizes`, the processor's own limits apply."""
    return Renderer(
        model.processor,
        **({} if own_sizes else media_settings(config, model.processor)),
        chat_template=_text(config.data.override_chat_template),
        chat_template_kwargs=config.data.chat_template_kwargs,
        position_ids=position_ids_of(model.config) or count_tokens,
    )


def _text(template: str | None) -> str | None:
    return Path(template).read_text(encoding="utf-8") if template and Path(template).is_file() else template


@contextmanager
def open_rendering(config: RunConfig, renderer: Renderer, ended: Ended | None = None) -> Iterator[Rendering]:
    with open_workers(config, renderer, ended) as workers:
        yield Rendering(renderer, workers)


@contextmanager
def open_workers(config: RunConfig, target: object, ended: Ended | None = None) -> Iterator[Workers | None]:
    """Open lazily started worker processes that hold `target`; None with a single worker."""
    count = min(config.data.filter_overlong_prompts_workers, os.cpu_count() or 1)
    if config.data.filter_overlong_prompts_workers == 1:
        yield None
        return
    with Workers(target, count, ended=ended) as workers:
        yield workers


def media_settings(config: RunConfig, processor: Any) -> dict[str, Any]:
    """Return how `Renderer` resizes media, chooses frames, and caches both."""
    data, limits = config.data, find_value(processor, "video_processor")
    settings: dict[str, Any] = {
        "min_pixels": data.min_pixels,
        "max_pixels": data.max_pixels,
        "video_min_pixels": data.video_min_pixels,
        "video_max_pixels": data.video_max_pixels,
    }
    if find_value(limits, "max_frames") is not None:  # other families' videos are refused row by row
        most = data.video_max_frames or limits.max_frames
        settings["frames"] = FrameRules(data.video_fps, min_frames=min(limits.min_frames, most), max_frames=most)
    if data.media_cache_gb and data.cache_dir:
        folder = Path(data.cache_dir).expanduser() / "media"
        settings["cache"] = MediaCache(0, folder, int(data.media_cache_gb * GIGABYTE))
    return settings
