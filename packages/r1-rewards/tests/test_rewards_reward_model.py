"""The reward model: a tiny random sequence classifier gives the logits that a plain forward pass gives."""

import sys
from types import SimpleNamespace

import pytest

from r1_rewards import RewardInput, RewardSpecError, load

torch = pytest.importorskip("torch", reason='needs "r1-rewards[reward-model]"')
transformers = pytest.importorskip("transformers", reason='needs "r1-rewards[reward-model]"')

TEMPLATE = "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}"


def save(folder, *, labels=1, template=TEMPLATE, pad="<pad>"):
    from tokenizers import pre_tokenizers

    vocabulary = {token: i for i, token in enumerate(["<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = transformers.Qwen2Tokenizer(vocab=vocabulary, merges=[], unk_token="<pad>", pad_token=pad)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=300, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_labels=labels, pad_token_id=0 if pad else None,
    )  # fmt: skip
    model = transformers.Qwen2ForSequenceClassification(config)
    model.save_pretrained(folder)
    return model.eval(), tokenizer


def expected(model, tokenizer, text):
    with torch.inference_mode():
        return model(input_ids=tokenizer(text, return_tensors="pt")["input_ids"]).logits.item()


@pytest.mark.parametrize("pad", ["<pad>", None])
def test_scores_are_the_logits_of_a_plain_forward_in_any_batch(tmp_path, pad):
    model, tokenizer = save(tmp_path, pad=pad)
    responses = ["one", "one two three", "two", "three three", "two one two three two"]
    with load("reward_model", {"path": str(tmp_path), "batch_size": 2, "device": "cpu"}) as verifier:
        scores = verifier([RewardInput(response, "", prompt="what is") for response in responses])
    for response, score in zip(responses, scores, strict=True):
        logit = expected(model, tokenizer, f"<user> what is <assistant> {response} ")
        assert score.value == pytest.approx(logit, abs=1e-6)
    assert len({score.value for score in scores}) == len(responses)


def test_a_conversation_is_put_as_messages_not_as_rendered_text(tmp_path):
    model, tokenizer = save(tmp_path)
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    with load("reward_model", {"path": str(tmp_path), "device": "cpu"}) as verifier:
        [score] = verifier([RewardInput("three", "", prompt="<user> rendered", messages=messages)])
    logit = expected(model, tokenizer, "<user> one <assistant> two <assistant> three ")
    assert score.value == pytest.approx(logit, abs=1e-6)


def test_a_response_cannot_forge_a_special_token_and_may_hold_a_lone_surrogate(tmp_path):
    model, tokenizer = save(tmp_path)
    with load("reward_model", {"path": str(tmp_path), "device": "cpu"}) as verifier:
        forged, lone = verifier([RewardInput("one <pad> two", "", prompt="x"), RewardInput("\ud800", "", prompt="x")])
    assert forged.value == pytest.approx(expected(model, tokenizer, "<user> x <assistant> one < pad> two "), abs=1e-6)
    assert forged.value != pytest.approx(expected(model, tokenizer, "<user> x <assistant> one <pad> two "), abs=1e-6)
    assert lone.value == pytest.approx(expected(model, tokenizer, "<user> x <assistant> ? "), abs=1e-6)


def test_a_conversation_over_the_limit_fails_alone(tmp_path):
    save(tmp_path)
    kwargs = {"path": str(tmp_path), "max_length": 60, "device": "cpu"}
    with load("reward_model", kwargs, failure_score=-9.0) as verifier:
        scores = verifier([RewardInput("one " * 20, ""), RewardInput("one", "")])
        assert verifier([]) == []
    assert [score.error.cause if score.error else None for score in scores] == ["wrong_shape", None]
    assert scores[0].value == -9.0


def test_a_model_that_is_no_reward_model_is_refused(tmp_path):
    save(tmp_path / "two", labels=2)
    save(tmp_path / "plain", template=None)
    for name, message in (("two", "has 2 outputs"), ("plain", "no chat template"), ("none", "cannot be loaded")):
        with pytest.raises(RewardSpecError, match=message):
            load("reward_model", {"path": str(tmp_path / name)})


def test_a_name_is_modelscopes_where_the_environment_says_so(tmp_path, monkeypatch):
    model, tokenizer = save(tmp_path / "model")
    monkeypatch.setenv("USE_MODELSCOPE_HUB", "1")
    given = SimpleNamespace(snapshot_download=lambda name: str(tmp_path / name.removeprefix("owner/")))
    monkeypatch.setitem(sys.modules, "modelscope", given)
    with load("reward_model", {"path": "owner/model", "device": "cpu"}) as verifier:
        (score,) = verifier([RewardInput("four", "", prompt="what is")])
    logit = expected(model, tokenizer, "<user> what is <assistant> four ")
    assert score.value == pytest.approx(logit, abs=1e-6)
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(RewardSpecError, match="pip install modelscope"):
        load("reward_model", {"path": "owner/model"})
