"""vLLM samples with pictures of families whose processor alone decides a picture's size."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import vllm_pictures

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]
KNOWN: dict[str, Any] = json.loads(vllm_pictures.RECORD.read_text(encoding="utf-8"))


@pytest.mark.parametrize("family", ["internvl", "llava"])
def test_vllm_samples_with_pictures_as_the_page_says(family: str, tmp_path: Path) -> None:
    assert vllm_pictures.ask(family, tmp_path) == KNOWN[family]


def test_a_prompt_whose_tokens_are_not_those_of_vllms_processor_is_refused() -> None:
    from r1_data.types import Prompt
    from r1_rollout.errors import PromptError
    from r1_rollout.vllm.media import process_pictures

    class Renderer:
        def process_for_engine(self, prompt: Any, arrival: float) -> Any:
            if prompt["multi_modal_data"]["image"] == ["unreadable"]:
                raise TypeError("no picture")
            return {"prompt_token_ids": [*prompt["prompt_token_ids"], 7]}

    def prompt_of(images: list[str], token_ids: list[int]) -> Any:
        import torch

        positions = torch.arange(len(token_ids))[None]
        inputs = {"pixel_values": torch.zeros(1)}
        return Prompt("row 3", "", token_ids, [5], positions, "", images=images, model_inputs=inputs)  # type: ignore[arg-type]

    renderer: Any = Renderer()
    assert process_pictures(renderer, prompt_of(["one"], [5, 7]))["prompt_token_ids"] == [5, 7]
    with pytest.raises(PromptError, match="prompt row 3: vLLM's processor makes 2 tokens of it, not these 3"):
        process_pictures(renderer, prompt_of(["one"], [5, 7, 7]))
    with pytest.raises(PromptError, match="prompt row 3: vLLM cannot read its pictures: no picture"):
        process_pictures(renderer, prompt_of(["unreadable"], [5, 7]))
    with pytest.raises(PromptError, match=r"prompt row 3 has pixel_values, but vLLM takes only pictures"):
        process_pictures(renderer, prompt_of([], [5, 7]))
