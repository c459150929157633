"""The logits processor in both of vLLM's interfaces; the second, which only GPUs use, on hand-made batches."""

import importlib.util
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]

BANNED, FORCED = "r1_banned_token_ids", "r1_forced_token_ids"


def second_runner() -> Any:
    """The processor with four slots, whose prompts have three tokens."""
    from r1_rollout.vllm.plain_logprobs import PlainLogprobs

    state = SimpleNamespace(device="cpu", max_num_reqs=4, prompt_len=SimpleNamespace(np=np.full(4, 3)))
    return PlainLogprobs(SimpleNamespace(additional_config={BANNED: [2]}), state)


def test_slots_keep_their_own_temperature_whatever_row_they_are_in() -> None:
    from vllm import SamplingParams

    processor = second_runner()
    for slot, temperature in ((3, 0.5), (1, 0.0), (0, 2.0)):
        assert processor.add_request(slot, SamplingParams(temperature=temperature))
    processor.apply_staged_writes()
    processor._staged.fill_(7.0)  # a step without a new request copies nothing
    processor.apply_staged_writes()
    logits = torch.randn(3, 8)
    slots = torch.tensor([1, 3, 0])
    context = SimpleNamespace(expanded_idx_mapping=slots, pos=torch.tensor([2, 2, 2]))
    temperature = torch.tensor([1.0, 0.5, 2.0])[:, None]  # greedy reports at 1
    expected = (logits / temperature).log_softmax(-1)
    expected[:, 2] = -torch.inf
    torch.testing.assert_close(processor.apply(logits.clone(), context) / temperature, expected)


def test_a_forced_answer_is_followed_by_position_and_forgotten_with_its_slot() -> None:
    from vllm import SamplingParams

    processor = second_runner()
    processor.add_request(0, SamplingParams(extra_args={FORCED: [5, 2]}))
    processor.apply_staged_writes()
    for position, token in ((2, 5), (3, 2)):  # the second is banned
        context = SimpleNamespace(expanded_idx_mapping=torch.tensor([0]), pos=torch.tensor([position]))
        logits = torch.randn(1, 8)
        changed = processor.apply(logits.clone(), context)
        assert changed[0].isfinite().nonzero().flatten().tolist() == [token]
        torch.testing.assert_close(changed[0, token], logits.log_softmax(-1)[0, token])
    processor.add_request(0, SamplingParams())
    context = SimpleNamespace(expanded_idx_mapping=torch.tensor([0]), pos=torch.tensor([2]))
    assert processor.apply(torch.randn(1, 8), context).isfinite().sum() == 7
