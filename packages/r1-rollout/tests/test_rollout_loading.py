"""The front door: a path or a model becomes an engine that takes text and token ids."""

import subprocess
import sys
from inspect import signature
from typing import Any

import pytest
import torch
import transformers
from embedded_cases import END, copy_of, picture_prompt, plain_logprobs, text_prompt
from rollout_models import make_tokenizer

from r1_rollout import LoadedEngine, SamplingParams, load
from r1_rollout.embedded import EmbeddedEngine
from r1_rollout.tokens import media_token_ids
from r1_rollout.types import accept_old_names
from r1_rollout.weights import LocalWeights

PARAMS = SamplingParams(max_tokens=6, n=2, seed=3)


@pytest.fixture
def engine(checkpoint: Any) -> LoadedEngine:
    return load(str(checkpoint), engine="embedded")


def answers(engine: LoadedEngine, prompts: Any, params: SamplingParams = PARAMS) -> list[list[list[int]]]:
    groups = dict(engine.generate(prompts, params))
    return [[completion.token_ids.tolist() for completion in groups[index]] for index in range(len(groups))]


def test_importing_the_package_loads_neither_torch_nor_transformers():
    code = "import sys, r1_rollout; sys.exit(bool({'torch', 'transformers', 'vllm'} & sys.modules.keys()))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_loaded_engine_samples_at_once_from_version_0(engine, text_model):
    ((_, group),) = engine.generate([[5, 9, 7]], PARAMS)
    assert [completion.weight_version for completion in group] == [0, 0]
    prompt = text_prompt("p", 3)
    prompt.token_ids[:] = [5, 9, 7]
    for completion in group:
        expected = plain_logprobs(text_model, prompt, completion.token_ids.tolist(), 1.0)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=2e-6, rtol=2e-6)


def test_text_messages_and_token_ids_that_say_the_same_get_the_same_answers(engine):
    (chat,) = answers(engine, ["what"])
    (messages,) = answers(engine, [[{"role": "user", "content": "what"}]])
    (token_ids,) = answers(engine, [engine.tokenizer("UwhatA")["input_ids"]])
    assert chat == messages == token_ids


def test_plain_text_is_taken_as_it_stands(checkpoint):
    engine = load(str(checkpoint), engine="embedded", chat=False)
    assert answers(engine, ["what"]) == answers(engine, [engine.tokenizer("what")["input_ids"]])
    assert answers(engine, ["what"]) != answers(load(str(checkpoint), engine="embedded"), ["what"])


def test_answers_depend_on_what_a_prompt_says_and_not_on_its_neighbours(engine):
    alone, together = answers(engine, ["what"]), answers(engine, ["who", "what", "what"])
    assert together[1] == alone[0]
    assert together[2] != alone[0], "the same prompt twice gave the same samples"


def test_the_text_of_an_answer_leaves_special_tokens_out(engine):
    ((_, group),) = engine.generate(["what"], SamplingParams(max_tokens=40, n=8))
    for completion in group:
        text = engine.text(completion)
        assert len(text) == len(completion.token_ids) - (completion.finish_reason == "stop")
        assert (completion.finish_reason == "stop") == (completion.token_ids[-1] == END)


def test_stop_strings_work_with_the_loaded_tokenizer(engine):
    ((_, (free,)),) = engine.generate(["what"], SamplingParams(max_tokens=12, ignore_eos=True))
    stop = engine.tokenizer.decode(free.token_ids.tolist())[4:7]
    ((_, (cut,)),) = engine.generate(["what"], SamplingParams(max_tokens=12, ignore_eos=True, stop=(stop,)))
    assert cut.finish_reason == "stop"
    assert cut.token_ids.tolist() == free.token_ids[: len(cut.token_ids)].tolist()
    assert engine.tokenizer.decode(cut.token_ids.tolist()).endswith(stop)


def test_another_trainer_pushes_weights_to_it(engine, text_model):
    greedy = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    first = answers(engine, ["what"], greedy)
    engine.load_weights(LocalWeights(((name, -tensor) for name, tensor in text_model.state_dict().items()), 1))
    assert answers(engine, ["what"], greedy) != first
    assert len(engine.logprobs_of(["what"], [[1, 2]])[0]) == 2
    with engine.active(LocalWeights(text_model.state_dict().items(), 2)):
        assert answers(engine, ["what"], greedy) == first


def test_a_model_object_is_taken_with_its_end_tokens_and_without_a_tokenizer(text_model):
    text_model.generation_config.eos_token_id = [END, 8]
    engine = load(text_model)
    ((_, group),) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=60, n=8))
    assert {c.token_ids[-1] for c in group if c.finish_reason == "stop"} <= {END, 8}
    with pytest.raises(ValueError, match="a prompt of text needs a tokenizer"):
        engine.generate(["what"], PARAMS)


def test_a_vision_language_model_never_says_its_placeholders_and_takes_text_and_pictures(vision_model):
    engine = load(copy_of(vision_model), end_token_ids={END})
    hot = SamplingParams(max_tokens=30, n=8, temperature=3.0)
    picture = picture_prompt(vision_model, "p", 4, [(1, 4, 4)])
    for prompts in ([[1, 2, 3]], [picture]):
        for _, group in engine.generate(prompts, hot):
            assert not any(token >= 60 for completion in group for token in completion.token_ids.tolist())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"engine": "sglang"}, ValueError, "engine='sglang'"),
        ({"engine": "vllm"}, ValueError, "vLLM loads models from a path, got a Qwen2ForCausalLM"),
        ({}, ValueError, "Qwen2ForCausalLM names no end token"),
    ],
)
def test_what_cannot_be_loaded_is_refused(text_model, change, error, message):
    with pytest.raises(error, match=message):
        load(text_model, **change)


@pytest.mark.parametrize("model", [None, 3, torch.nn.Linear(2, 2)])
def test_what_is_neither_a_path_nor_a_model_is_refused_at_once(model):
    with pytest.raises(ValueError, match=f"a path, a name or a transformers model, got a {type(model).__name__}"):
        load(model)


def test_token_ids_may_come_as_a_tensor_or_an_array(engine):
    expected = answers(engine, [[5, 9, 7]])
    assert answers(engine, [torch.tensor([5, 9, 7])]) == answers(engine, torch.tensor([[5, 9, 7]])) == expected
    assert answers(engine, [torch.tensor([5, 9, 7]).numpy()]) == expected


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([5, 9, 7], "prompt 0 is a int: a prompt is a string"),
        ([{"role": "user", "content": "what"}], "prompt 0 is a dict"),
        (["what", None], "prompt 1 is a NoneType"),
        ([b"what"], "prompt 0 is a bytes"),
        ([[5, 9.5]], "prompt 0 is a list of something else than whole numbers"),
        ([["what", "who"]], "prompt 0 is a list of something else"),
    ],
)
def test_what_is_no_prompt_is_named(engine, prompts, message):
    with pytest.raises(ValueError, match=message):
        engine.generate(prompts, PARAMS)


def test_a_models_precision_can_be_chosen(text_model):
    engine = load(text_model, end_token_ids={END}, dtype="bfloat16")
    assert next(engine.engine._model.parameters()).dtype == torch.bfloat16
    assert list(engine.generate([[5, 9, 7]], PARAMS))


@pytest.mark.parametrize(
    ("config", "banned"),
    [
        ("LlavaConfig", {"image_token_id": 60}),
        ("Gemma3Config", {"image_token_id": 60, "boi_token_index": 61, "eoi_token_index": 62}),
        ("InternVLConfig", {"image_token_id": 60}),
        ("Glm4vConfig", {"image_token_id": 60, "image_start_token_id": 61, "video_token_id": 62}),
        ("Qwen2_5_VLConfig", {"image_token_id": 60, "vision_start_token_id": 61, "vision_end_token_id": 62}),
    ],
)
def test_placeholders_are_found_by_whatever_name_a_configuration_has_for_them(config, banned):
    found = media_token_ids(getattr(transformers, config)(**banned))
    assert {*banned.values()} <= found
    assert media_token_ids(transformers.Qwen2Config(pad_token_id=3, bos_token_id=4, eos_token_id=5)) == frozenset()


@pytest.mark.parametrize("kind", ["text", "pictures"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_both_engines_are_loaded_with_the_same_defaults(request, monkeypatch, tmp_path, kind, device):
    tokenizer = make_tokenizer()
    tokenizer.eos_token = "k"  # not the model's
    tokenizer.save_pretrained(tmp_path)
    model = request.getfixturevalue("text_model" if kind == "text" else "vision_model")
    model.generation_config.eos_token_id = END
    model.save_pretrained(tmp_path)
    taken: dict[str, Any] = {}
    monkeypatch.setattr("r1_rollout.loading.find_spec", lambda name: object())
    monkeypatch.setattr("r1_rollout.vllm.engine.VllmEngine.start", lambda path, options: taken.update(vllm=options))
    monkeypatch.setattr("r1_rollout.embedded.EmbeddedEngine", lambda model, **said: taken.update(model=model, **said))
    monkeypatch.setattr("torch.cuda.is_available", lambda: device == "cuda")
    load(str(tmp_path), engine="vllm")
    load(str(tmp_path), engine="embedded", device="cpu" if device == "cpu" else "meta")
    assert taken["vllm"].end_token_ids == taken["end_token_ids"] == {END, tokenizer.eos_token_id}
    assert taken["vllm"].banned_token_ids == taken["banned_token_ids"]
    assert bool(taken["banned_token_ids"]) == (kind == "pictures")
    assert taken["vllm"].dtype == str(taken["model"].dtype).removeprefix("torch.") == "float32"
    assert taken["vllm"].max_sequences == signature(EmbeddedEngine).parameters["max_sequences"].default


def test_vllm_is_asked_for_by_name_where_it_is_not_installed(checkpoint, monkeypatch):
    monkeypatch.setattr("r1_rollout.loading.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="vllm is not installed"):
        load(str(checkpoint), engine="vllm")


def test_a_string_in_place_of_a_list_of_prompts_is_refused(engine):
    with pytest.raises(ValueError, match="put it in a list"):
        engine.generate("what", PARAMS)
    engine.tokenizer.chat_template = None
    with pytest.raises(ValueError, match="chat=False"):
        engine.generate(["what"], PARAMS)


def test_engines_and_those_of_users_keep_their_old_method_names_for_a_version(engine, text_model):
    weights = LocalWeights(text_model.state_dict().items(), 1)
    with pytest.warns(DeprecationWarning, match=r"call engine\.load_weights"):
        engine.update(weights)
    with pytest.warns(DeprecationWarning, match=r"call engine\.active"), engine.awake(weights):
        assert answers(engine, [[5, 9, 7]])

    class Old:
        def awake(self, source: Any = None) -> str:
            return f"awake {source}"

        def update(self, source: Any) -> str:
            return f"updated {source}"

    with pytest.warns(DeprecationWarning, match=r"Old\.awake is deprecated: call it active"):
        old = accept_old_names(Old())
    assert (old.active(3), old.load_weights(4)) == ("awake 3", "updated 4")
    assert accept_old_names(engine) is engine
