"""Ask of every architecture of the installed transformers what r1 can do with it, from tiny random weights.

uv run python tests/architectures.py [NAME …]     # prints a line each; --write puts them into architectures.json
"""

import copy
import json
import logging
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from tiny_models import NAMES, VISION, VOCAB, make_model
from torch import Tensor
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from r1_cli.build.packing import find_faults
from r1_cli.build.refusals import explain_refusal
from r1_cli.models.load import configure_modules
from r1_core.learner import Learner
from r1_core.objective import Objective
from r1_core.types import LossInputs, LossOutput, Sample
from r1_data.positions import position_ids_of
from r1_rollout.embedded import EmbeddedEngine
from r1_rollout.probes import Probes, text_probes
from r1_rollout.routing import Routing, require_routing
from r1_rollout.types import SamplingParams

RECORD = Path(__file__).with_name("architectures.json")
TOLERANCE = 1e-5
# Of samples, which an engine computes token by token. minicpm3 is off by 1.5e-5 to 1.9e-5 on one processor, and by less
# than 1e-5 on another.
ENGINE_TOLERANCE = 3e-5


@dataclass(frozen=True, slots=True)
class Answer:
    """What r1 does with an architecture. Log-probs, gradients and samples were compared with its own eager forward."""

    layout: str = ""  # shared, packed, padded, single; "" if it cannot be trained
    attention: str = "r1"  # or its own
    engine: bool = False  # whether the embedded engine samples from it
    why: str = ""  # the first thing that it cannot do, and why
    refusal: str = ""  # by which the embedded engine refuses it
    wrong: str = ""  # what differs from its own eager forward without a word; never in the record
    replay: str = ""  # of a model with layers of experts: whether its routers can be replayed, yes or no


class SumOfLogprobs(Objective):
    token_wise = False

    def __call__(self, inputs: LossInputs) -> LossOutput:
        return LossOutput(torch.where(inputs.loss_mask, inputs.logprobs, 0.0).sum())


def make_samples(axes: int) -> list[Sample]:
    """Two answers to each of two prompts, of different lengths."""
    draw, found = torch.Generator().manual_seed(1), []
    for group, length in enumerate((37, 9)):
        prompt = torch.randint(0, 250, (length,), generator=draw)
        for own in (6, 11 - group):
            ids = torch.cat([prompt, torch.randint(0, 250, (own,), generator=draw)])
            found.append(
                Sample(
                    ids, torch.arange(len(ids)) >= length, torch.arange(len(ids)).expand(axes, -1), group_id=group,
                    reward=0.0, prompt_length=length, old_logprobs=torch.zeros(len(ids)),
                    advantages=torch.ones(len(ids)),
                )
            )  # fmt: skip
    return found


def compute_alone(model: Any, sample: Sample) -> Tensor:
    logits = model(input_ids=sample.token_ids[None], use_cache=False).logits[0].float()[:-1]
    taken = logits.log_softmax(-1).gather(1, sample.token_ids[1:, None])[:, 0]
    return taken[sample.loss_mask[1:]]


def ask(name: str) -> Answer:
    try:
        model = make_model(name)
    except Exception as error:
        return Answer(why=explain_untried(error))
    plain = copy.deepcopy(model)
    with suppress(Exception):  # some have no other
        plain.set_attn_implementation("eager")
    engine, refusal = ask_engine(plain)
    replay = ask_replay(plain)
    answer = replace(ask_learner(model, plain), engine=engine == "right", replay=replay)
    if engine and engine != "right":
        answer = replace(answer, wrong=answer.wrong or engine)
    return replace(answer, why=without_figures(answer.why), refusal=without_figures(refusal if answer.layout else ""))


def without_figures(why: str) -> str:
    """Leave out what differs between machines."""
    return re.sub(r" \((log-probs )?off by [^)]*\)| by [\d.e-]+ of their size, [\d.e-]+ allowed", "", why)


def ask_learner(
    model: Any,
    plain: Any,
    samples: list[Sample] | None = None,
    alone: Callable[[Any, Sample], Tensor] = compute_alone,
    pictures: Sequence[Probes] = (),
) -> Answer:
    """Compare with `alone`, which computes one of the samples; `pictures` are two probes beside those of text."""
    try:
        configure_modules(model, torch.float32, torch.device("cpu"))
        axes = 1 if position_ids_of(model.config) is None else 4
        learner = Learner(model, torch.optim.SGD(model.parameters(), lr=0.0), lambda step: 1.0)
        learner.batching = replace(learner.batching, padding_free=True, share_prompts=True)
        probes = [text_probes(range(250), axes=axes, longest_prompt=60, longest_response=6, variant=v) for v in (0, 1)]
        probes = [text + picture for text, picture in zip(probes, pictures, strict=True)] if pictures else probes
        faults, attention = find_faults(learner, probes[0], probes[1], torch.float32), "r1"
        if faults.single is not None:
            learner.set_layout("padded", own_attention=True)
            first, attention = faults.single, "own"
            faults = replace(find_faults(learner, probes[0], probes[1], torch.float32), packed=first, shared=first)
    except Exception as error:
        return Answer(why=f"not tried: the test could not set it up ({first_line(error)})")
    if faults.single is not None:
        return Answer(attention=attention, why=faults.single)
    found = {"shared": faults.shared, "packed": faults.packed, "padded": faults.padded, "single": None}
    right = [name for name, fault in found.items() if fault is None]
    answer = Answer(right[0], attention, why=next((fault for fault in found.values() if fault), ""))
    for layout in right[:1] if samples is None else right:
        try:
            if layout != "shared":
                learner.set_layout(layout, own_attention=attention == "own")
            wrong = compare(learner, plain, samples or make_samples(axes), layout, alone)
            answer = replace(answer, wrong=answer.wrong or wrong)
        except Exception as error:  # of something that none of the four questions asks for
            return Answer(attention=attention, why=first_line(error))
    return answer


def explain_untried(error: Exception) -> str:
    missing = re.search(r"requires the (\w+) library|No module named '(\w+)'", str(error))
    if missing:
        return f"not tried: it needs the package {missing[1] or missing[2]}, which was not installed for this page"
    return "not tried: the rules of the test give it no tiny configuration"


@contextmanager
def named(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ValueError(f"{what} ({first_line(error)})") from error


def measure_gap(found: Tensor, expected: Tensor) -> float:
    """In nats, and of the size of log-probs beyond −1: large logits round in their last places."""
    return float(((found - expected).abs() / expected.abs().clamp(min=1.0)).max())


def compare(
    learner: Learner, plain: Any, samples: list[Sample], layout: str, alone: Callable[[Any, Sample], Tensor]
) -> str:
    """Return how log-probs or gradients of a layout differ from those of each sample alone."""
    with named(f"{layout}: its log-probs cannot be computed"):
        found = [one.old_logprobs[one.loss_mask] for one in learner.add_logprobs(samples, ["old_logprobs"])]
    with named("its own forward fails on these samples"), torch.no_grad():
        gaps = [measure_gap(one, alone(plain, sample)) for one, sample in zip(found, samples, strict=True)]
    for gap in gaps:
        if not gap <= TOLERANCE:
            return f"{layout}: log-probs are off by {gap:.2g}"
    gaps = measure_gradient_gaps(learner, plain, samples, layout, alone)
    if "vision tower" not in gaps and not gaps["rest"] <= TOLERANCE:
        # BLT amplifies rounding 1,000 times, and its eager masks are not finite in float64.
        for model in (learner.model, plain):
            model.zero_grad()
            model.double()
        plain.set_attn_implementation("sdpa")
        gaps = measure_gradient_gaps(learner, plain, samples, layout, alone)
    for part, off in gaps.items():
        if not off <= TOLERANCE:
            return f"{layout}: the gradient of the {part} is off by {off:.2g} of its norm".replace("of the rest ", "")
    return ""


def measure_gradient_gaps(
    learner: Learner, plain: Any, samples: list[Sample], layout: str, alone: Callable[[Any, Sample], Tensor]
) -> dict[str, float]:
    """How far the learner's gradients are from those of each sample alone, by part of the model, of their norm."""
    learner.model.zero_grad()
    with named(f"{layout}: it has no gradient"):
        learner.forward_backward(samples, SumOfLogprobs())
    if all(parameter.grad is None for parameter in plain.parameters()):  # else it is there since the layout before
        with named("its own forward has no gradient"):
            torch.stack([alone(plain, sample).sum() for sample in samples]).sum().backward()
    own, tower = dict(learner.model.named_parameters()), find_tower(plain)
    pairs = [(key, parameter.grad, own[key].grad) for key, parameter in plain.named_parameters() if key in own]
    found = {}
    for part in ("vision tower", "rest") if any(sample.model_inputs for sample in samples) else ("rest",):
        chosen = [(grad, mine) for key, grad, mine in pairs if grad is not None and (part != "rest") == (key in tower)]
        expected = torch.cat([grad.flatten() for grad, _ in chosen]) if chosen else torch.zeros(1)
        mine = torch.cat([torch.zeros_like(grad).flatten() if its is None else its.flatten() for grad, its in chosen])
        found[part] = float((mine - expected).norm() / expected.norm())
    return found


def find_tower(model: Any) -> set[str]:
    """Return the names of the parameters that a picture's features are computed from.

    Phi-4-multimodal has its tower within the decoder.
    """
    decoder = {id(parameter) for parameter in model.get_decoder().parameters()}
    head = model.get_output_embeddings()
    decoder |= {id(parameter) for parameter in head.parameters()} if head is not None else set()
    decoder |= {id(parameter) for parameter in model.get_input_embeddings().parameters()}
    return {
        name for name, parameter in model.named_parameters() if id(parameter) not in decoder or "image_embed." in name
    }


def ask_replay(plain: Any) -> str:
    model = copy.deepcopy(plain)
    routing = Routing.of(model)
    if routing is None or not routing.routers:  # some tiny models have no layer of experts
        return ""
    try:
        require_routing(model)
    except Exception:
        return "no"
    return "yes"


def ask_engine(plain: Any) -> tuple[str, str]:
    """Return "right", what is wrong, or "" with the refusal."""
    banned = [*range(256, 258), *range(259, VOCAB)]
    try:
        engine = EmbeddedEngine(copy.deepcopy(plain), end_token_ids=[258], banned_token_ids=banned, version=0)
        axes = 1 if position_ids_of(plain.config) is None else 4
    except Exception as error:
        return "", first_line(error)
    # Longer than the window of tiny models, which is 24.
    prompts = text_probes(range(250), axes=axes, longest_prompt=30, longest_response=4).prompts
    try:
        with engine.active():
            groups = [*engine.generate(list(prompts), SamplingParams(n=2, max_tokens=6, seed=1))]
    except Exception as error:
        return "", first_line(error)
    worst = 0.0
    for index, completions in groups:
        for one in completions:
            ids = torch.tensor([*prompts[index].token_ids, *map(int, one.token_ids)])
            mask = torch.arange(len(ids)) >= len(prompts[index].token_ids)
            sample = Sample(ids, mask, torch.arange(len(ids))[None], group_id=0, reward=0.0)
            with torch.no_grad():
                expected = compute_alone(plain, sample)
            worst = max(worst, measure_gap(torch.as_tensor(one.logprobs), expected))
    return ("right", "") if worst <= ENGINE_TOLERANCE else (f"the embedded engine is off by {worst:.2g}", "")


# --- the page ---------------------------------------------------------------------------------------------------------

HEAD = """# Which models learn

A run compares four ways to compute log-probs with the model's own eager attention when it starts, and takes the
fastest that is right: prompts shared by a packed row, a packed row, a padded batch, one sample at a time. `r1 check
MODEL` prints the answers for your model. This page has them for every architecture of transformers {version}, each
from a tiny random model in float32 on a processor: log-probs within 1e-5 of the model's own, gradients within 1e-5 of
their norm (in float64 where float32 rounds by more), samples of the embedded engine within 3e-5, beyond the window of
sliding layers, too. The embedded engine samples from {sampled} of the {learn} architectures of the first table. Rows
of this comparison are text. {shown} architectures also train with pictures: their tokens and inputs are those of the
processor's own call, log-probs and gradients (of the vision tower, too) those of the model's own forward. No weights
of a published checkpoint were tried for this page, and nothing of it ran on a GPU. vLLM: whether vLLM {vllm} lists
the architecture; "with pictures", where it was tried on a processor: started, given the learner's weights, its
log-probs are within 1e-4 of the model's own. Replay: of mixtures of experts, whether the learner can use the experts
that an engine chose ([router replay](engines.md#mixtures-of-experts)).

The shapes of {shapes} published checkpoints, from Qwen3-0.6B to DeepSeek-V3, were tried without their weights: they
have their published number of parameters, and `r1 merge` writes the names of a published checkpoint. Weights published
in FP8 or MXFP4 (DeepSeek-V3, gpt-oss) are read, trained and saved as plain ones. Other quantized files (AWQ, GPTQ) are
refused.

| architecture | learns | pictures | videos | embedded engine | vLLM | replay | why not more |
|---|---|---|---|---|---|---|---|
"""
PICTURES = """
## Pictures

Pictures are read in one of two ways, which `r1 check MODEL` names. If the processor counts a picture's tokens from its
size (the Qwen line), r1 resizes it once, within `data.min_pixels` and `data.max_pixels`. Otherwise r1 calls the
processor with the picture as it is, and the processor alone decides its size. At its start a run compares the
placeholders that the processor writes for a picture with the features that the model's vision tower computes. Videos
are read in the first way only. Where the tokens of a picture depend on the others of its row (llava_onevision),
later turns cannot add pictures.

Rows with pictures are refused for the models below; runs without pictures train. Each line is what the error says.

| architecture | why |
|---|---|
"""
REST = """
## Not trained

Text that attends in both directions, models that need a picture or another input with every row, and models that were
not tried. Each line is what a run says when it refuses the model.

| architecture | why |
|---|---|
"""
WAYS = {"shared": "packed, prompts shared", "packed": "packed", "padded": "padded", "single": "one by one"}
VLLM = "0.32.0"


def page() -> str:
    """The page of all architectures, from the record."""
    record = {name: Answer(**held) for name, held in json.loads(RECORD.read_text(encoding="utf-8")).items()}
    served = set(json.loads(RECORD.with_name("architectures_vllm.json").read_text(encoding="utf-8")))
    shown = json.loads(RECORD.with_name("picture_families.json").read_text(encoding="utf-8"))
    sampled_by_vllm = json.loads(RECORD.with_name("vllm_pictures.json").read_text(encoding="utf-8"))
    classes = {**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    lines, rest, learn = [], [], [answer for answer in record.values() if answer.layout]
    for name, answer in record.items():
        tried = sampled_by_vllm.get(name, "")
        vllm = "yes" if classes[name] in served else "no"
        vllm = "with pictures" if tried == "right" else vllm
        bad = f"vLLM does not sample with pictures ({tried})" if tried not in ("", "right") else ""
        why = "; ".join(filter(None, [answer.why, answer.refusal if answer.layout else "", bad])).replace("|", "\\|")
        if answer.layout:
            way = WAYS[answer.layout] + (", own attention" if answer.attention == "own" else "")
            engine = "yes" if answer.engine else "no"
            media = " | ".join(describe_media(name, shown))
            lines.append(f"| {name} | {way} | {media} | {engine} | {vllm} | {answer.replay} | {why} |")
        else:
            rest.append(f"| {name} | {why if why.startswith('not tried') else explain_refusal(name, why)} |")
    left_out = {name: one["why"] for name, one in shown.items() if not one["layout"] and record[name].layout}
    own = "pictures of"  # a processor's; other reasons are the model's
    refused = [
        f"| {name} | {why if why.startswith(own) else explain_refusal(name, why)} |" for name, why in left_out.items()
    ]
    shapes = json.loads(RECORD.with_name("published_models.json").read_text(encoding="utf-8"))["models"]
    sampled = sum(answer.engine for answer in learn)
    head = HEAD.format(
        version=transformers.__version__,
        vllm=VLLM,
        shapes=len(shapes),
        learn=len(learn),
        sampled=sampled,
        shown=sum(bool(one["layout"]) for one in shown.values()),
    )
    return (
        "\n".join(
            [
                head.rstrip("\n"),
                *lines,
                *PICTURES.rstrip("\n").split("\n"),
                *refused,
                *REST.rstrip("\n").split("\n"),
                *rest,
            ]
        )
        + "\n"
    )


def describe_media(name: str, shown: Mapping[str, Any]) -> tuple[str, str]:
    """Whether pictures and videos are read."""
    if name not in VISION:
        return "", ""
    if name not in shown:
        return "not tried", "not tried"
    return "yes" if shown[name]["layout"] else "no", "yes" if shown[name]["videos"] else "no"


def first_line(error: Exception) -> str:
    line = (str(error).strip() or " ").splitlines()[0][:400]
    return line if type(error) is ValueError else f"{type(error).__name__}: {line}"


@contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings and messages inside the block only: later tests of this process expect them."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
        transformers.logging.set_verbosity(before)


def main(words: list[str]) -> None:
    torch.set_num_threads(1)
    found = {}
    with quiet():
        for name in [word for word in words if word != "--write"] or NAMES:
            start = time.process_time()
            found[name] = ask(name)
            print(f"{name} {time.process_time() - start:.1f} s {asdict(found[name])}", flush=True)
    if "--write" in words:
        known = json.loads(RECORD.read_text(encoding="utf-8"))
        found = {name: found.get(name) or Answer(**known[name]) for name in NAMES}
        lines = [f"  {json.dumps(name)}: {json.dumps(asdict(answer))}" for name, answer in found.items()]
        RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
