"""What of the vLLM engine can be tested without vLLM: its thread, the adapter's names, buckets for other processes."""

import threading
from types import SimpleNamespace

import pytest
import torch

from r1_rollout.errors import EngineError
from r1_rollout.names import core
from r1_rollout.transports.adapter import check_bound, peft_name
from r1_rollout.vllm.compat import extended
from r1_rollout.vllm.sync import absent_names, describe, find_renamings, load_renamed
from r1_rollout.vllm.thread import EngineThread
from r1_rollout.weights import buckets

PATIENCE = 60.0


def test_calls_are_made_one_after_the_other_in_one_thread_that_is_not_the_callers() -> None:
    thread = EngineThread()
    seen = {thread.run(threading.get_ident, deadline=PATIENCE) for _ in range(20)}
    thread.stop()
    assert len(seen) == 1
    assert threading.get_ident() not in seen


def test_an_error_of_a_call_reaches_its_caller_and_harms_no_later_call() -> None:
    thread = EngineThread()
    with pytest.raises(ZeroDivisionError):
        thread.run(lambda: 1 // 0, deadline=PATIENCE)
    assert thread.run(lambda: 3, deadline=PATIENCE) == 3
    thread.stop()


def test_a_timeout_of_the_calls_own_is_not_taken_for_a_hanging_engine() -> None:
    def times_out() -> None:
        raise TimeoutError("own")

    thread = EngineThread()
    with pytest.raises(TimeoutError, match="own"):
        thread.run(times_out, deadline=PATIENCE)
    assert thread.failure is None
    thread.stop()


def test_a_call_that_outlasts_its_deadline_ends_the_engine_with_a_message() -> None:
    thread, release = EngineThread(), threading.Event()
    with pytest.raises(EngineError, match=r"0\.05 s.*hangs"):
        thread.run(release.wait, deadline=0.05)
    with pytest.raises(EngineError, match="hangs"):
        thread.run(lambda: 1, deadline=PATIENCE)
    release.set()
    thread.stop()


def test_a_stopped_thread_takes_no_call() -> None:
    thread = EngineThread()
    thread.stop()
    with pytest.raises(EngineError, match="closed"):
        thread.run(lambda: 1, deadline=PATIENCE)


def test_adapter_names_become_those_of_pefts_files() -> None:
    plain = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert peft_name("model.layers.0.self_attn.q_proj.lora_A.default.weight") == plain
    assert peft_name(plain) == plain


def test_an_adapter_binds_by_layer_and_module_whatever_stands_before() -> None:
    name = "base_model.model.model.language_model.layers.1.mlp.up_proj.lora_B.weight"
    check_bound([name], ["language_model.model.layers.1.mlp.up_proj"])
    with pytest.raises(ValueError, match=r"bound to nothing.*layers\.1\.mlp\.up_proj"):
        check_bound([name], ["language_model.model.layers.0.mlp.up_proj"])


def test_a_bucket_for_other_processes_has_a_handle_for_each_tensor_on_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"gpu {device.index}"))
    monkeypatch.setattr("torch.multiprocessing.reductions.reduce_tensor", lambda tensor: (None, tuple(tensor.shape)))
    weights = [("a", torch.zeros(2, 3)), ("b", torch.zeros(4)), ("c", torch.zeros(5))]
    first = next(buckets(weights, 20, torch.bfloat16))
    devices = [torch.device("cuda", index) for index in range(2)]
    told = describe(first, devices, [[tensor for _, tensor in first]] * 2)
    assert told == {
        "names": ["a", "b"],
        "dtype_names": ["bfloat16", "bfloat16"],
        "shapes": [[2, 3], [4]],
        "ipc_handles": [{"gpu 0": (2, 3), "gpu 1": (2, 3)}, {"gpu 0": (4,), "gpu 1": (4,)}],
    }


def test_what_did_not_come_is_named_as_a_checkpoint_names_it() -> None:
    own = {
        "visual.patch_embed.proj.weight": torch.zeros(4, 3),
        "language_model.model.embed_tokens.weight": torch.zeros(8, 4),
        "language_model.model.layers.0.self_attn.qkv_proj.base_layer.weight": torch.zeros(8, 4),
        "language_model.model.layers.0.mlp.gate_up_proj.weight": torch.zeros(12, 4),
        "language_model.model.layers.1.mlp.experts.w13_weight": torch.zeros(3, 12, 4),
    }
    given = {
        "model.visual.patch_embed.proj.weight": 4,
        "model.language_model.embed_tokens.weight": 8,
        "model.language_model.layers.0.self_attn.q_proj.weight": 4,
        "model.language_model.layers.0.self_attn.k_proj.weight": 2,
        "model.language_model.layers.0.self_attn.v_proj.weight": 2,
        "model.language_model.layers.0.mlp.gate_proj.weight": 6,
        "model.language_model.layers.0.mlp.up_proj.weight": 6,
        "model.language_model.layers.1.mlp.experts.0.gate_proj.weight": 6,  # in a layout of vLLM's own
    }
    assert absent_names(own, given) == []
    layer = "language_model.layers.0"
    for name in ("visual.patch_embed.proj", f"{layer}.self_attn.k_proj", f"{layer}.mlp.up_proj"):
        rest = {own: rows for own, rows in given.items() if own != f"model.{name}.weight"}
        (absent,) = absent_names(own, rest)
        assert core(absent) == core(f"model.{name}.weight")
    assert len(absent_names(own, {})) == 8


def test_an_answer_goes_on_behind_the_largest_position_of_its_prompt() -> None:
    prompt = torch.tensor([[0, 1, 1, 40, 2], [0, 1, 2, 1, 3], [0, 1, 1, 2, 3]])  # seconds that outrun the text
    positions, delta = extended(prompt, 5)
    assert positions.equal(prompt)
    assert delta == 41 - 5
    positions, delta = extended(prompt, 7)
    assert positions[:, 5:].tolist() == [[41, 42]] * 3
    assert delta == 41 - 5


def test_modules_that_an_engine_has_by_the_names_of_files_get_the_learners_weights() -> None:
    def engine_of(block: str) -> torch.nn.Module:
        layer = torch.nn.Module()
        layer.add_module(block, torch.nn.Linear(2, 2))
        model = torch.nn.Module()
        model.layers = torch.nn.ModuleList([layer])
        return model

    published, renamed = engine_of("block_sparse_moe"), engine_of("mlp")
    assert find_renamings(published, "mixtral") == [(".mlp.", ".block_sparse_moe.")]
    assert find_renamings(renamed, "mixtral") == []
    assert find_renamings(renamed, "qwen3_moe") == find_renamings(renamed, "no such family") == []
    tower, held, both = (torch.nn.Module() for _ in range(3))
    tower.vision_model, both.vision_model, both.projector = (torch.nn.Linear(2, 2) for _ in range(3))
    held.tower, held.other = tower, both
    assert find_renamings(held, "llava") == [("tower.", "tower.vision_model.")]
    loaded = list[str]()
    load_renamed(held, lambda weights: loaded.extend(dict(weights)), [("tower.", "tower.vision_model.")], [
        ("model.tower.a", torch.zeros(1)), ("tower.vision_model.b", torch.zeros(1)),
    ])  # fmt: skip
    assert loaded == ["model.tower.vision_model.a", "tower.vision_model.b"]
    published.layers[0].block_sparse_moe.ckpt_gate_proj_name = "w1"
    names = find_renamings(published, "mixtral")
    assert names[1:] == [(".experts.gate_up_proj", ".experts.w13"), (".experts.down_proj", ".experts.w2")]


def test_an_embedding_that_an_engine_names_in_its_own_way_is_not_missed_if_the_learners_came() -> None:
    own = {"model.embedding.weight": torch.zeros(8, 4), "lm_head.weight": torch.zeros(8, 4)}
    assert absent_names(own, {"model.embed_tokens.weight": 8, "lm_head.weight": 8}) == []
    assert absent_names(own, {"lm_head.weight": 8}) == ["model.embedding.weight"]
