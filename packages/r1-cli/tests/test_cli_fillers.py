"""Ranks without pictures compute tiny ones, whatever size the run's own have."""

from typing import Any

import families
import pytest
import torch

from r1_cli.build.learner import build_fillers
from r1_cli.config import load_config
from r1_cli.models.files import ModelFiles

LARGE = [
    "data.train_files=owner/rows@train",
    "worker.actor.model.model_path=owner/model",
    "data.min_pixels=262144",
    "data.video_min_pixels=262144",
    "trainer.n_gpus_per_node=1",
]


def fillers_of(family: str) -> Any:
    processor = families.make_processor(family)
    config = load_config([*LARGE, "worker.reward.reward_function=math"])[0]
    tokenizer = getattr(processor, "tokenizer", processor)
    return build_fillers(config, ModelFiles("", families.make_config(family), tokenizer, processor))


@pytest.mark.parametrize("family", families.VISION_FAMILIES)
def test_there_is_a_tiny_sample_of_each_kind_that_trains_nothing(family: str) -> None:
    picture, video = fillers_of(family)
    assert {"pixel_values", "image_grid_thw"} == set(picture.model_inputs)
    assert {"pixel_values_videos", "video_grid_thw"} <= set(video.model_inputs)
    assert not {"pixel_values", "image_grid_thw"} & set(video.model_inputs)
    for sample in (picture, video):
        assert len(sample.token_ids) < 80
        assert not sample.loss_mask.any()
        assert torch.equal(sample.position_ids[0], torch.arange(len(sample.token_ids)))


def test_text_models_need_none() -> None:
    assert fillers_of("qwen2") == []
