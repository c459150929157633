"""A reward model that r1-core trained scores in r1-rewards' service as it did in training."""

from pathlib import Path

import families
import pytest
import torch
import transformers as hf

from r1_core.learner.batching import Batching, MicroLimit
from r1_core.learner.critic import Critic
from r1_core.learner.optim import build_optimizer
from r1_core.losses import WeightedValue
from r1_core.reward_model import at_end, use_score_head, weigh_values
from r1_core.types import Sample, tokens
from r1_rewards import RewardInput, load

ANSWERS = [("It is red.", "It is a colour."), ("A red disc, I think", "No.")]
QUESTIONS = ["What colour is it?", "What is there?"]


def test_the_service_scores_as_the_critic_that_was_trained(tmp_path: Path) -> None:
    tokenizer, config = families.make_tokenizer(), families.make_config("qwen3")
    config.num_labels = 1
    torch.manual_seed(0)
    model = use_score_head(hf.AutoModelForTokenClassification.from_config(config))
    optimizer = build_optimizer(model.named_parameters(), lr=1e-2)
    batching = Batching(False, MicroLimit(8), MicroLimit(8))
    critic = Critic(
        model, optimizer, lambda step: 1.0, loss=WeightedValue(), aggregation="seq-mean-token-sum", batching=batching
    )
    samples = []
    for pair, (question, answers) in enumerate(zip(QUESTIONS, ANSWERS, strict=True)):
        for answer in answers:
            talk = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            ids = torch.tensor(tokenizer(tokenizer.apply_chat_template(talk, tokenize=False))["input_ids"])
            mask = torch.ones(len(ids)).bool()
            samples.append(at_end(Sample(ids, mask, torch.arange(len(ids))[None], pair, 0.0)))
    for _ in range(5):
        weighed, metrics = weigh_values(critic.add_values(samples))
        critic.forward_backward(weighed)
        critic.optim_step()
    assert metrics["accuracy"] == 1
    critic.save(tmp_path, model_only=True)
    config.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    expected = tokens(critic.add_values(samples), "values").tolist()
    rows = [
        RewardInput(answer, "", prompt=question)
        for question, answers in zip(QUESTIONS, ANSWERS, strict=True)
        for answer in answers
    ]
    with load("reward_model", {"path": str(tmp_path), "device": "cpu"}) as verifier:
        assert [score.value for score in verifier(rows)] == pytest.approx(expected, abs=1e-4)
    assert expected[0] > expected[1]
    assert expected[2] > expected[3]
