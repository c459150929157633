"""One real group's way through a step, in numbers: what stands in `docs/one-step.md`.

    uv run python docs/one_step.py            # prints it
    uv run python docs/one_step.py --write    # and writes it into the page

It goes the way of `examples/one_file.py`, whose parts are those of a run, and stops at each to look.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
PAGE = HERE / "one-step.md"
BEGIN, END = "<!-- numbers: begin (written by docs/one_step.py) -->\n", "<!-- numbers: end -->"
SHOWN = 4  # responses of the group that are written out

sys.path.insert(0, str(HERE.parent / "examples"))

from one_file import ClippedLoss, Objective, grpo_advantages, open_trainer, replace, to_sample  # noqa: E402

from r1_rewards import RewardInput  # noqa: E402
from r1_rollout import SamplingParams  # noqa: E402
from r1_rollout.weights import LocalWeights  # noqa: E402


def numbers() -> Iterator[str]:
    """Take one step on one prompt with eight responses; yield what there is to see, line by line."""
    with open_trainer(prompts=1) as trainer:
        row = trainer.stream.batch(2)[0]
        prompt = trainer.dataset[row]
        pixels = {name: list(value.shape) for name, value in prompt.model_inputs.items()}
        yield f"row        {prompt.id}, ground truth {prompt.ground_truth}"
        yield f"prompt     {len(prompt.token_ids)} tokens, position_ids {list(prompt.position_ids.shape)}, {pixels}"

        learner, engine = trainer.learner, trainer.engine
        with engine.active(LocalWeights(learner.weights(), version=0)):
            params = SamplingParams(max_tokens=20, n=8, temperature=1.0, seed=0)
            [(_, completions)] = list(engine.generate([prompt], params))
        texts = [trainer.decode(completion.token_ids) for completion in completions]
        yield f"group      {len(completions)} completions of {[len(one.token_ids) for one in completions]} tokens"

        rewards = torch.tensor(
            trainer.judge([RewardInput(text, prompt.ground_truth) for text in texts]), dtype=torch.float64
        )
        advantages = grpo_advantages(rewards[None])[0]
        yield f"rewards    mean {rewards.mean():.3f}, std {rewards.std():.3f}"
        for text, reward, advantage in list(zip(texts, rewards, advantages, strict=True))[:SHOWN]:
            yield f"           reward {reward:.2f}  advantage {advantage:+.3f}  {text}"

        samples = [to_sample(prompt, completion, group=0) for completion in completions]
        samples = learner.add_logprobs(samples, {"old_logprobs"})
        samples = [
            replace(sample, advantages=sample.loss_mask * float(advantage))
            for sample, advantage in zip(samples, advantages, strict=True)
        ]
        first = samples[0]
        trained = first.loss_mask.nonzero().flatten()
        yield f"sample     {len(first.token_ids)} tokens, of which {len(trained)} are trained"
        assert first.old_logprobs is not None
        theirs, ours = torch.tensor(list(completions[0].logprobs)), first.old_logprobs[trained]
        gap = float((theirs - ours).abs().max())
        yield f"log-probs  of its tokens {[round(value, 2) + 0.0 for value in ours.tolist()]}"
        yield f"           engine and learner differ by less than 0.0001: {gap < 1e-4}"

        before = logprob_of_best(trainer, samples)
        metrics = learner.forward_backward(samples, Objective(ClippedLoss()))
        update = learner.optim_step()
        yield f"update     loss {metrics['pg_loss']:.4f}, grad_norm {update['grad_norm']:.3f}, lr {update['lr']:.2g}"
        after = logprob_of_best(trainer, samples)
        yield f"after      log-prob of the best response {before:.3f} -> {after:.3f}"


def logprob_of_best(trainer, samples) -> float:  # type: ignore[no-untyped-def]
    """Return the sum of the log-probs of the response with the largest advantage, under the weights there are."""
    best = max(samples, key=lambda sample: float(sample.advantages.max()))
    [annotated] = trainer.learner.add_logprobs([replace(best, old_logprobs=None)], {"old_logprobs"})
    return float(annotated.old_logprobs[annotated.loss_mask].sum())


def written(page: str, lines: list[str]) -> str:
    """Return the page with these lines between its marks."""
    head, rest = page.split(BEGIN)
    return head + BEGIN + "\n```text\n" + "\n".join(lines) + "\n```\n\n" + END + rest.split(END)[1]


def main() -> None:
    """Print the numbers; write them with `--write`."""
    parser = argparse.ArgumentParser(description="One group's way through a step, in numbers.")
    parser.add_argument("--write", action="store_true")
    write = parser.parse_args().write
    lines = list(numbers())
    print("\n".join(lines))
    if write:
        PAGE.write_text(written(PAGE.read_text("utf-8"), lines), "utf-8")


if __name__ == "__main__":
    main()
