"""Prompts of every family, rendered as in a run, and a learner that packs them."""

from collections.abc import Iterable
from typing import Any

import families
import torch
from golden import prompt_cases

from r1_cli.models.attention import attend_packed
from r1_cli.train.groups.group import extend_positions
from r1_core.learner import Learner
from r1_core.learner.batching import Batching, MicroLimit
from r1_core.learner.optim import build_optimizer
from r1_core.learner.parallel import Parallel
from r1_core.types import Sample
from r1_data.formats import Columns, detect_columns
from r1_data.messages import to_example
from r1_data.positions import position_ids_of
from r1_data.render import Renderer
from r1_data.types import Example, Prompt
from r1_data.videos import FrameRules

TEXTS = ("What is 2 + 2?", "?", "Which of these numbers are prime: 2, 9, 15, 17, 21, 23?", "Say it again.")


def make_renderer(family: str) -> Renderer:
    return Renderer(
        families.make_processor(family),
        position_ids=position_ids_of(families.make_config(family)),
        frames=FrameRules(fps=prompt_cases.FPS),
    )


def make_example(name: str) -> Example:
    """One of the golden cases, as a row of a data set."""
    row = prompt_cases.written(prompt_cases.CASES[name]["row"])
    return to_example(name, row, detect_columns(row, Columns(), explicit=False))


def make_prompts(family: str, names: Iterable[str] = prompt_cases.CASES) -> list[Prompt]:
    """The golden cases of these names and, which is all for a text model, texts of several lengths."""
    names = () if family in families.TEXT else names
    rows: list[dict[str, Any]] = [{"problem": text, "answer": "4"} for text in TEXTS]
    texts = [to_example(f"text {i}", row, Columns("problem")) for i, row in enumerate(rows)]
    renderer = make_renderer(family)
    return [renderer.render(example) for example in [*map(make_example, names), *texts]]


def make_samples(prompts: list[Prompt]) -> list[Sample]:
    """Each prompt with an answer of random letters."""
    draw, samples = torch.Generator().manual_seed(0), []
    for number, prompt in enumerate(prompts):
        answer = torch.randint(0, 250, (1 + 5 * number % 9,), generator=draw)
        token_ids = torch.cat([torch.tensor(prompt.token_ids), answer])
        samples.append(
            Sample(
                token_ids=token_ids,
                loss_mask=torch.arange(len(token_ids)) >= len(prompt.token_ids),
                position_ids=extend_positions(prompt.position_ids, len(answer)),
                group_id=number,
                reward=0.0,
                model_inputs=prompt.model_inputs,
            )
        )
    return samples


def make_learner(
    model: Any,
    *,
    rows: int = 8,
    padding_free: bool = True,
    temperature: float = 1.0,
    parallel: Parallel | None = None,
) -> Learner:
    """A learner of `model`, with up to `rows` samples in a micro-batch."""
    attend_packed(model)
    optimizer = build_optimizer(model.named_parameters(), lr=1e-3)
    batching = Batching(padding_free, MicroLimit(rows), MicroLimit(rows))
    more = {"batching": batching, "temperature": temperature, "parallel": parallel}
    return Learner(model, optimizer, lambda step: 1.0, **more)
