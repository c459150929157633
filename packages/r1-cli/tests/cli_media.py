"""Rows with pictures, and machines that render them, each in this process and asked by pickles."""

import io
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import families
import torch
from cli_ranks import OneRank, Stored
from PIL import Image

from r1_cli.cluster.remote_rendering import RenderPool, RenderWorker
from r1_cli.cluster.worker_group import WorkerGroup
from r1_data.dataset import PromptDataset
from r1_data.positions import position_ids_of
from r1_data.prefetch import PromptMemory
from r1_data.render import Renderer
from r1_data.types import Example
from r1_data.vision import Pixels
from r1_data.workers import Workers

CRASHES = "crashes"


class Frail(Renderer):
    """A renderer whose decoder some rows break."""

    def load(self, example: Example) -> Pixels:
        if CRASHES in str(example.messages):
            os._exit(7)
        return super().load(example)


def make_renderer(kind: type[Renderer] = Renderer) -> Renderer:
    return kind(families.make_processor("qwen2_5_vl"), position_ids=position_ids_of(families.make_config("qwen2_5_vl")))


def row(number: int, text: str = "<image>?", side: int = 84) -> tuple[str, dict[str, Any]]:
    """A row with a picture of noise."""
    noise, file = torch.randint(256, (side, side, 3), generator=torch.Generator().manual_seed(number)), io.BytesIO()
    Image.fromarray(noise.to(torch.uint8).numpy()).save(file, format="PNG")
    content = {"prompt": text, "answer": str(number), "images": [file.getvalue()], "bulk": bytes(9)}
    return f"rows.parquet:{number}", content


def nobody(renderer: Renderer) -> nullcontext[None]:
    return nullcontext()


def one_worker(renderer: Renderer) -> Workers:
    return Workers(renderer, 1)


def host(
    renderer: Renderer, workers: Callable[[Renderer], Any] = nobody, *, memory: int = 2**20, dtype: Any = None
) -> OneRank:
    return OneRank(RenderWorker(renderer, workers, memory, dtype, Stored.put))  # type: ignore[arg-type]


@contextmanager
def media_of(hosts: Sequence[WorkerGroup], calls: int = 2) -> Iterator[RenderPool]:
    media = RenderPool(lambda: hosts, len(hosts), calls)
    yield media
    media.close()


def dataset_of(rows: Sequence[Any], renderer: Renderer, elsewhere: RenderPool | None = None) -> PromptDataset:
    return PromptDataset(rows, renderer, max_prompt_length=500, memory=PromptMemory(0), remote=elsewhere)
