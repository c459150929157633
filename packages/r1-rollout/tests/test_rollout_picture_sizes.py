"""Pictures of unequal size, whose tensors cannot be concatenated, in one call with text: a tiny Mistral 3."""

import copy

import torch
from embedded_cases import END, HandPrompt
from rollout_models import sharpen
from transformers import Mistral3Config, Mistral3ForConditionalGeneration

from r1_rollout.embedded import EmbeddedEngine
from r1_rollout.types import SamplingParams
from r1_rollout.weights import LocalWeights

IMAGE, CELL = 60, 16 * 16  # pixels of a token
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
TEXT = {"vocab_size": 64, "num_hidden_layers": 2, "num_key_value_heads": 1, "head_dim": 16, "sliding_window": None}
CONFIG = Mistral3Config(
    text_config={"model_type": "mistral", "max_position_embeddings": 256, **SIZES, **TEXT},
    vision_config={"model_type": "pixtral", "num_hidden_layers": 1, "image_size": 64, "patch_size": 8, **SIZES},
    image_token_index=IMAGE,
    spatial_merge_size=2,
)


def prompt(number: int, length: int, height: int = 0, width: int = 0) -> HandPrompt:
    generator = torch.Generator().manual_seed(number)
    text = torch.randint(0, 50, (length,), generator=generator).tolist()
    token_ids, media = [5, *[IMAGE] * (height * width // CELL), *text], {}
    if height:
        pixels = torch.randn(1, 3, height, width, generator=generator)
        media = {"pixel_values": pixels, "image_sizes": torch.tensor([[height, width]])}
    return HandPrompt(f"p{number}", token_ids, torch.arange(len(token_ids))[None], media)


@torch.no_grad()
def test_pictures_of_unequal_size_and_text_are_sampled_together_as_each_alone_would_be() -> None:
    torch.manual_seed(0)
    model = sharpen(Mistral3ForConditionalGeneration(CONFIG))
    engine = EmbeddedEngine(type(model)(copy.deepcopy(CONFIG)), end_token_ids={END}, banned_token_ids={IMAGE})
    prompts = [prompt(0, 4, 32, 32), prompt(1, 7, 48, 32), prompt(2, 9), prompt(3, 5, 32, 32)]
    with engine.active(LocalWeights(model.state_dict().items(), 0)):
        groups = dict(engine.generate(prompts, SamplingParams(max_tokens=5, n=2, seed=1)))
    for index, one in enumerate(prompts):
        for completion in groups[index]:
            answer = torch.tensor(completion.token_ids.tolist())
            ids = torch.cat([torch.tensor(one.token_ids), answer])[None]
            logits = model(input_ids=ids, use_cache=False, **one.model_inputs).logits[0, len(one.token_ids) - 1 : -1]
            plain = logits.log_softmax(-1).gather(1, answer[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(completion.logprobs), plain, atol=5e-6, rtol=1e-5)
