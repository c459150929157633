"""A packed row attends as its sequences do alone, forwards and backwards, for every family that r1 trains."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import families
import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    bidirectional_mask_function,
    blockwise_overlay,
    causal_mask_function,
    or_masks,
)

from r1_cli.models import attention, kernels
from r1_cli.models.attention import PACKED_ATTENTION, VISION_ATTENTION, RowMask, attend_packed, packed_mask
from r1_cli.models.kernels import Pieces, find_kernel
from r1_core.learner.pack import Pack, SequenceGroup
from r1_rollout.embedded import scores
from r1_rollout.embedded.windows import AttentionWindow

TEXT: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
FAMILIES = {
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**TEXT)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**TEXT)),
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT)),
    "mistral with a window": lambda: hf.MistralForCausalLM(hf.MistralConfig(**TEXT, sliding_window=3)),
}
LENGTHS = [5, 1, 9, 3]


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("build", FAMILIES.values(), ids=FAMILIES.keys())
def test_a_pack_equals_its_sequences_one_by_one(build: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model = build().double().eval()
    sequences = [torch.randint(0, 50, (1, length)) for length in LENGTHS]
    weights = [torch.randn(1, length, 50).double() for length in LENGTHS]
    alone = [model(input_ids=ids).logits for ids in sequences]
    sum((logits * w).sum() for logits, w in zip(alone, weights, strict=True)).backward()
    expected = gradients(model)
    model.zero_grad()

    model.set_attn_implementation(PACKED_ATTENTION)
    position_ids = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    packed = model(input_ids=torch.cat(sequences, dim=1), position_ids=position_ids, use_cache=False).logits
    (packed * torch.cat(weights, dim=1)).sum().backward()
    # Hugging Face computes norms and rotations in float32 whatever the model's precision.
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), rtol=1e-6, atol=1e-6)
    for ours, theirs in zip(gradients(model), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_the_cut_follows_the_positions_of_every_call() -> None:
    torch.manual_seed(0)
    model = FAMILIES["qwen2"]().eval()
    model.set_attn_implementation(PACKED_ATTENTION)
    ids, one = torch.randint(0, 50, (1, 8)), torch.arange(8)[None]
    two = torch.cat([torch.arange(5), torch.arange(3)])[None]

    def logits(position_ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model(input_ids=ids, position_ids=position_ids, use_cache=False).logits
        return found

    whole, cut = logits(one), logits(two)
    assert not torch.allclose(whole[:, 5:], cut[:, 5:])
    one.copy_(two)  # the same tensor with other positions in it
    assert torch.equal(logits(one), cut)


def test_a_padded_batch_keeps_its_mask() -> None:
    torch.manual_seed(0)
    model = FAMILIES["qwen2"]().eval()
    ids, mask = torch.randint(0, 50, (2, 6)), torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    expected = model(input_ids=ids, attention_mask=mask).logits
    model.set_attn_implementation(PACKED_ATTENTION)
    actual = model(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()], rtol=1e-6, atol=1e-6)


# --- the kernels, by stand-ins ---------------------------------------------------------------------------------------


def attend(
    query: Tensor, key: Tensor, value: Tensor, ends: tuple[Tensor, Tensor], scale: float, window: tuple[int, int]
) -> Tensor:
    """What a kernel computes of [T, heads, size], from its definition: the last query stands at the last key."""
    pieces, back_from_end = [], []
    for bounds in ends:
        lengths = bounds.diff()
        pieces.append(torch.arange(len(lengths)).repeat_interleave(lengths))
        back_from_end.append(torch.cat([torch.arange(length).flip(0) for length in lengths.tolist()]))
    back = back_from_end[1] - back_from_end[0][:, None]
    seen = pieces[0][:, None] == pieces[1]
    seen &= (window[0] < 0) | (back <= window[0])
    seen &= (window[1] < 0) | (-back <= window[1])
    key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for each in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value)


def newer(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """Takes what torch 2.12 and later do."""
    assert cu_seq_q.dtype == torch.int32
    assert (max_q, max_k) == (int(cu_seq_q.diff().max()), int(cu_seq_k.diff().max()))
    assert enable_gqa == (query.shape[1] != key.shape[1])
    return attend(query, key, value, (cu_seq_q, cu_seq_k), scale or query.shape[-1] ** -0.5, window_size)


def older(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
) -> Tensor:
    """Takes no more than the first version did."""
    assert query.shape[1] == key.shape[1]
    return attend(query, key, value, (cu_seq_q, cu_seq_k), query.shape[-1] ** -0.5, (-1, 0) if is_causal else (-1, -1))


def efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    custom_mask_type: int,
    compute_log_sumexp: bool,
    *,
    scale: float | None,
) -> tuple[Tensor]:
    """Takes [1, T, heads, size], as many key heads as query heads, and no window."""
    assert (len(query), query.shape[2]) == (1, key.shape[2])
    assert (bias, dropout_p, compute_log_sumexp) == (None, 0.0, torch.is_grad_enabled())
    counts = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    window = {0: (-1, -1), 2: (-1, 0)}[custom_mask_type]
    return (newer(query[0], key[0], value[0], *counts, scale=scale, window_size=window)[None],)


KERNELS = {"newer": (newer, torch.bfloat16), "older": (older, torch.bfloat16), "efficient": (None, torch.float32)}


def give_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a row go where a GPU would send one of the kernel's precision."""
    varlen, dtype = KERNELS[name]
    device = torch.device("cuda")
    monkeypatch.setattr(kernels, "generation", lambda device: 9)
    monkeypatch.setattr(kernels, "varlen_attn", varlen)
    monkeypatch.setattr(kernels, "_efficient", efficient)
    monkeypatch.setattr(attention, "_find_kernel", lambda query, **asked: find_kernel(device, dtype, 64, **asked))


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel of one signature or another."""
    give_kernel(request.param, monkeypatch)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("told", [True, False])
@pytest.mark.usefixtures("kernel")
def test_one_call_of_the_kernel_gives_what_the_pieces_give(
    name: str, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = FAMILIES[name]().double().eval()
    ids = torch.randint(0, 50, (1, sum(LENGTHS)))
    position_ids = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    more = {"pack": Pack.of(LENGTHS, "cpu")} if told else {}
    with monkeypatch.context() as without:
        without.setattr(attention, "_find_kernel", lambda query, **asked: None)
        attend_packed(model)
        assert model.reads_pack
        expected = model(input_ids=ids, position_ids=position_ids, use_cache=False, **more).logits
    found = model(input_ids=ids, position_ids=position_ids, use_cache=False, **more).logits
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


# Two sequences of their own, a prompt with a short, a long and a middling answer, two of similar length with two, and a
# last sequence, nearly as long as the first.
RUNS, BEHIND = [7, 200, 6, 1, 150, 4, 9, 3, 3, 10, 2, 1, 6], [-1, -1, -1, 2, 2, 2, -1, 6, 6, -1, 9, 9, -1]


@pytest.mark.parametrize(
    "window", [None, AttentionWindow(200), AttentionWindow(30), AttentionWindow(30, chunked=True)], ids=str
)
@pytest.mark.parametrize("way", ["on processors", "run by run", "newer", "efficient"])
def test_answers_attend_to_their_prompt_and_themselves_forwards_and_backwards(
    way: str, window: AttentionWindow | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    pack, size, options = Pack.of(RUNS, "cpu", behind=BEHIND), 8, dict[str, Any](scaling=0.3)
    query, key, value = (torch.randn(1, sum(RUNS), heads, size).double().transpose(1, 2) for heads in (4, 2, 2))
    given = [each.requires_grad_() for each in (query, key, value)]
    weights = torch.randn(1, sum(RUNS), 4, size).double()
    place = torch.cat([torch.arange(n) + (RUNS[run] if run >= 0 else 0) for n, run in zip(RUNS, BEHIND, strict=True)])
    assert torch.equal(pack.places, place)
    seen = pack.visible() & (window is None or place >= window.begin(place)[:, None])
    expected = torch.nn.functional.scaled_dot_product_attention(
        *given, attn_mask=seen, scale=0.3, enable_gqa=True
    ).transpose(1, 2)
    if way in KERNELS:
        give_kernel(way, monkeypatch)
    if way == "run by run":
        options["position_bias"] = torch.zeros(())
    layer = SimpleNamespace(is_causal=True, num_key_value_groups=2)
    monkeypatch.setattr(scores, "sdpa_attention_forward", without_bias)
    if window is not None and window.chunked:
        pack, window = pack.chunked(window.size), None
    found = attention._attend_within(layer, *given, pack, window, options)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    grads = (torch.autograd.grad((each * weights).sum(), given) for each in (found, expected))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def without_bias(*args: Any, position_bias: Tensor | None = None, **kwargs: Any) -> Any:
    return sdpa_attention_forward(*args, **kwargs)


@pytest.mark.parametrize("family", families.VISION_FAMILIES)
@pytest.mark.usefixtures("kernel")
def test_a_tower_attends_within_pictures_and_windows_however_it_is_called(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = families.make_model(family).double()
    tower = model.model.visual
    config = model.config.vision_config
    grid = torch.tensor([[1, 8, 8], [1, 4, 12], [2, 4, 4]])
    values = 3 * config.temporal_patch_size * config.patch_size**2
    patches = torch.randn(int(grid.prod(-1).sum()), values, generator=torch.Generator().manual_seed(0)).double()

    def features() -> Tensor:
        found: Tensor = tower(patches, grid_thw=grid).pooler_output
        return found

    plain = features()
    attend_packed(model)
    assert tower.config._attn_implementation == VISION_ATTENTION
    torch.testing.assert_close(features(), plain, rtol=1e-6, atol=1e-6)
    with monkeypatch.context() as without:
        without.setattr(attention, "_find_kernel", lambda query, **asked: None)
        assert torch.equal(features(), plain)


def test_processors_have_no_kernel_and_every_gpu_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert find_kernel(cpu, torch.bfloat16, 64) is None
    half, other = kernels.attend_in_half_precision, kernels.attend_in_any_precision
    monkeypatch.setattr(kernels, "generation", lambda device: 8)
    assert find_kernel(gpu, torch.bfloat16, 64) is find_kernel(gpu, torch.float16, 256, windowed=True) is half
    for dtype, head in ((torch.float32, 64), (torch.bfloat16, 12), (torch.float16, 512)):
        assert find_kernel(gpu, dtype, head) is other
        assert find_kernel(gpu, dtype, head, windowed=True) is None
    monkeypatch.setattr(kernels, "generation", lambda device: 7)
    assert find_kernel(gpu, torch.float16, 64) is other


def test_torch_has_the_memory_efficient_kernel_and_its_gradient() -> None:
    query, key, value = (torch.empty(1, heads, 9, 8, device="meta", requires_grad=True) for heads in (4, 2, 2))
    ends = torch.empty(3, dtype=torch.int32, device="meta")
    pieces = Pieces(ends, 5, ends, 5)
    found = kernels.attend_in_any_precision(query, key, value, pieces, None, kernels.CAUSAL)
    assert found.shape == (1, 9, 4, 8)
    found.sum().backward()
    assert key.grad is not None
    assert key.grad.shape == key.shape


def test_a_row_is_asked_for_its_mask_only_where_some_tokens_see_later_ones():
    """A vision tower, whose tokens all see the next one, and a causal row need none."""
    blocks = torch.tensor([[-1, 0, 0, 0, -1, 1, 1]])
    pictures = or_masks(causal_mask_function, blockwise_overlay(blocks))
    how = {"batch_size": 1, "q_length": 7, "kv_length": 7, "device": "cpu", "dtype": torch.float32}
    assert packed_mask(mask_function=causal_mask_function, **how) is None
    assert packed_mask(mask_function=bidirectional_mask_function, **how) is None
    found = packed_mask(mask_function=pictures, **how)
    assert isinstance(found, RowMask)
    seen = found.within(1, 6)
    same = (blocks[0, 1:6, None] == blocks[0, 1:6]) & (blocks[0, 1:6, None] >= 0)
    assert torch.equal(seen, same | torch.ones(5, 5, dtype=torch.bool).tril())


def test_ranks_that_share_a_row_with_pictures_that_see_later_tokens_are_refused():
    mask = RowMask(bidirectional_mask_function, 4, torch.device("cpu"))
    heads, pack = torch.zeros(1, 2, 4, 8), Pack.of([4], "cpu", SequenceGroup(0, 1, None))
    layer = SimpleNamespace(is_causal=True)
    with pytest.raises(ValueError, match="attends in both directions, which ranks that share a row cannot"):
        attention.packed_attention(layer, heads, heads, heads, mask, pack=pack)
