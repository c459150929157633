"""Ranks without processes: verbs and values cross as pickles, as they would to other machines, and are counted."""

import pickle
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
import ranks
import torch
import torch.distributed as dist
from core_models import IMAGE_TOKEN, in_float64, picture_samples, qwen2, qwen25_vl, text_samples
from torch import Tensor

from r1_cli.build.rewards.own_models import LearnerReading
from r1_cli.cluster.rank import Build, Rank
from r1_cli.cluster.rank_client import RankClient, RankedPolicy
from r1_cli.cluster.remote_rendering import RenderPool, RenderWorker
from r1_core.advantages import GRPO, assign
from r1_core.learner import Learner
from r1_core.learner.batching import Batching, MicroLimit
from r1_core.learner.optim import build_optimizer
from r1_core.learner.parallel import Parallel, find_blocks, shard_model
from r1_core.learner.trainable import LearnerInfo
from r1_core.objective import Objective
from r1_core.own import OwnCodeError, as_loss
from r1_core.types import LossInputs, Sample
from r1_data.types import Example, Prompt
from r1_data.vision import Pixels

VIDEO_TOKEN = 59


# --- what crosses ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """A value as a pickle of which the arrays' bytes stand aside, read in place."""

    place: int

    @staticmethod
    def put(value: Any) -> "Stored":
        buffers: list[pickle.PickleBuffer] = []
        head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        STORE.append((head, [bytes(buffer.raw()) for buffer in buffers]))
        return Stored(len(STORE) - 1)

    def load(self) -> Any:
        LOADS.append(self.place)
        head, buffers = STORE[self.place]
        return pickle.loads(head, buffers=buffers)

    @property
    def num_bytes(self) -> int:
        head, buffers = STORE[self.place]
        return len(head) + sum(map(len, buffers))


STORE: list[tuple[bytes, list[bytes]]] = []  # what was put down, by place
LOADS: list[int] = []  # places, in the order in which they were read


def crossed(value: Any) -> Any:
    """What arrives of a value elsewhere."""
    return pickle.loads(pickle.dumps(value, protocol=5))


@dataclass
class OneRank:
    """`WorkerGroup` of one rank, in this process."""

    rank: Rank
    asked: list[tuple[str, int]] = field(default_factory=list)  # verbs, and how many bytes went to and fro with each
    stored: list[Stored] = field(default_factory=list)
    remote_put: Any = Stored.put

    def call(self, verb: str, *args: Any, label: str = "") -> Any:
        sent = pickle.dumps(args, protocol=5)
        answer = pickle.dumps(getattr(self.rank, verb)(*pickle.loads(sent)), protocol=5)
        self.asked.append((label or verb, len(sent) + len(answer)))
        return pickle.loads(answer)

    def call_all(self, verb: str, *args: Any, label: str = "") -> list[Any]:
        return [self.call(verb, *args, label=label)]

    def put(self, value: Any) -> Stored:
        self.stored.append(Stored.put(value))
        return self.stored[-1]

    @property
    def remote_caller(self) -> Any:
        return self.call

    def close(self) -> None:
        self.rank.close()


class Together:
    """A `WorkerGroup` that this process is one of: all make the same calls, and all get rank 0's results."""

    remote_put = Stored.put

    def __init__(self, rank: Rank) -> None:
        self.rank = rank

    def call(self, verb: str, *args: Any, label: str = "") -> Any:
        return self.call_all(verb, *args)[0]

    def call_all(self, verb: str, *args: Any, label: str = "") -> list[Any]:
        answers: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(answers, getattr(self.rank, verb)(*crossed(args)))
        return answers

    def put(self, value: Any) -> Stored:
        return Stored.put(value)

    def close(self) -> None:
        self.rank.close()


def meet(build: Build, **sizes: int) -> Rank:
    """This process's rank, which has met the others at the place that rank 0 has opened."""
    number, world = dist.get_rank(), dist.get_world_size()
    rank, addresses = Rank(build, number, world, timeout=ranks.DEADLINE, **sizes), [None] * world
    dist.all_gather_object(addresses, rank.open_store("127.0.0.1") if number == 0 else None)
    dist.destroy_process_group()
    rank.join(addresses[0])
    return rank


def verb_by_verb(name: str, objective: str) -> tuple[list[Any], int, LearnerInfo]:
    """A case for ranks: what comes back of all verbs, of how many prompts this rank has fetched pictures, info."""
    learner = RankedPolicy(RankClient(Together(meet(partial(build, name, objective)))))
    samples = step_samples(name)
    learner.add_logprobs(samples, ["squared_probs"])
    fetched = {place for place in LOADS if b"pixel_values" in STORE[place][0] and len(STORE[place][1]) == 2}
    return go_through(learner, samples, OBJECTIVES[objective]), len(fetched), learner.describe()


def read_aloud(name: str, asked: Any) -> list[list[float]]:
    """A case for ranks: the policy's log-probs of given responses."""
    learner = RankedPolicy(RankClient(Together(meet(partial(build, name, "KL")))))
    return LearnerReading(learner, "policy", 1.0).read_logprobs(*asked)


def fail_and_save(folder: Path) -> dict[str, Tensor]:
    """A case for ranks: the weights before a user's loss has failed on all of them, which then still write them.

    They write them again from a copy, in threads, when the weights have changed already.
    """
    learner = RankedPolicy(RankClient(Together(meet(partial(build, "text", "failing")))))
    before = {name: tensor.clone() for name, tensor in learner.weights()}
    with pytest.raises(OwnCodeError, match="ValueError: this is mine"):
        learner.forward_backward(ready(step_samples("text")), OBJECTIVES["failing"])
    learner.save(folder)
    assert learner.snapshot(max_bytes=1000) is None
    copied = learner.snapshot()
    assert copied is not None
    learner.zero_weights(dict.fromkeys(before))
    copied.write(folder / "later")
    return before


@dataclass
class Canned:
    """In the place of a renderer: the model inputs of samples."""

    samples: list[Sample] = field(default_factory=list)

    def load(self, example: Example) -> Pixels:
        return Pixels([torch.zeros(3, 64, 64, dtype=torch.uint8)], [], [])

    def render(self, example: Example, pixels: Pixels) -> Prompt:
        sample = self.samples[int(example.id)]
        return Prompt(example.id, "", sample.token_ids.tolist(), [], sample.position_ids, "", (), sample.model_inputs)


def render_elsewhere(media: RenderPool, samples: list[Sample]) -> list[Sample]:
    """The samples with their pictures rendered by a machine of a cluster, once for those that share them."""
    asked: dict[int, Any] = {}
    for number, sample in enumerate(samples):
        if sample.model_inputs and id(sample.model_inputs) not in asked:
            asked[id(sample.model_inputs)] = media((0, 0, number), Example(str(number), [], (b"",), ""))
    found = {one: future.result().model_inputs for one, future in asked.items()}
    return [replace(sample, model_inputs=found.get(id(sample.model_inputs), {})) for sample in samples]


def take_many_steps(steps: int) -> list[int]:
    """A case for ranks: the bytes of this process, driver, rank and machine in one, after each step with pictures."""
    rank = meet(partial(build, "pictures", "KL"))
    rank.learner.batching = Batching(True, MicroLimit(2), MicroLimit(3))  # the fewest in which some are read ahead
    learner = RankedPolicy(RankClient(Together(rank)))
    canned, taken = Canned(), []
    host: Any = RenderWorker(cast(Any, canned), lambda renderer: nullcontext(), 2**16, None, Stored.put)
    media = RenderPool(lambda: [OneRank(host)], 1, calls=2)
    for step in range(steps):
        canned.samples = step_samples("pictures", seed=step)
        samples = learner.add_logprobs(render_elsewhere(media, canned.samples), ["old_logprobs"])
        samples = assign(learner.add_logprobs(samples, ["ref_logprobs"]), GRPO())
        learner.forward_backward(samples, OBJECTIVES["KL"])
        learner.optim_step()
        for store in (STORE, LOADS):  # what an object store lets go of by itself
            store.clear()
        taken.append(psutil.Process().memory_info().rss)
    media.close()
    return taken


# --- what is trained -------------------------------------------------------------------------------------------------


def my_loss(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """A user's own, which is off policy and looks at the reference."""
    ratio = (inputs.logprobs - inputs.old_logprobs).exp()
    assert inputs.ref_logprobs is not None
    return -ratio * inputs.advantages, {"gap": (inputs.logprobs - inputs.ref_logprobs).detach()}


def my_fault(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """A user's own that does not work."""
    raise ValueError("this is mine")


OBJECTIVES = {
    "failing": Objective(as_loss(lambda inputs: my_fault(inputs), "mine")),
    "KL": Objective(kl_penalty="low_var_kl", kl_coef=0.1),
    "full KL": Objective(kl_penalty="full", kl_coef=0.1),
    "own loss": Objective(as_loss(lambda inputs: my_loss(inputs), "mine"), "seq", entropy_coef=0.01),
}


def build(name: str, objective: str, parallel: Parallel) -> tuple[Learner, Objective]:
    """A learner in float64 with a reference, of text or of what else is in `SAMPLES`; its objective has no KL yet."""
    models = [(qwen2 if name == "text" else qwen25_vl)(seed) for seed in (0, 1)]
    for model in models:
        in_float64(model, ranks.patches)
        if name != "text":
            model.config.video_token_id = VIDEO_TOKEN
        if parallel.mesh is not None:
            shard_model(model, find_blocks(model), parallel.mesh)
    optimizer = build_optimizer(models[0].named_parameters(), lr=1e-2)
    batching = Batching(True, MicroLimit(1), MicroLimit(2))
    learner = Learner(
        models[0], optimizer, lambda step: 1.0, reference=models[1], batching=batching, max_grad_norm=0.5,
        parallel=parallel, device=torch.device("cpu"),
    )  # fmt: skip
    return learner, replace(OBJECTIVES[objective], kl_coef=0.0)


def video_samples(seed: int) -> list[Sample]:
    """The samples with pictures, the third's two of which are frames of a video."""
    samples = picture_samples(seed=seed)
    clip = samples[2]
    names = {"pixel_values": "pixel_values_videos", "image_grid_thw": "video_grid_thw"}
    samples[2] = replace(
        clip,
        token_ids=torch.where(clip.token_ids == IMAGE_TOKEN, VIDEO_TOKEN, clip.token_ids),
        model_inputs={names[name]: tensor for name, tensor in clip.model_inputs.items()},
    )
    return samples


def step_samples(name: str, seed: int = 1) -> list[Sample]:
    """A step's samples as they come from an engine: with its log-probs, and of unequal groups."""
    samples = {"text": text_samples, "pictures": picture_samples, "video": video_samples}[name](seed=seed)
    generator = torch.Generator().manual_seed(3)
    return [
        replace(sample, rollout_logprobs=-torch.rand(len(sample.token_ids), generator=generator) * sample.loss_mask)
        for sample in samples
    ]


def ready(samples: list[Sample]) -> list[Sample]:
    """Samples with all that an update asks for."""
    known = [
        replace(s, **dict.fromkeys(("old_logprobs", "ref_logprobs"), -torch.ones(len(s.token_ids)))) for s in samples
    ]
    return assign(known, GRPO())


def go_through(learner: Any, samples: list[Sample], objective: Objective, *, pads: bool = True) -> list[Any]:
    """Call the verbs as a run does, and some as no run does; return all that comes back."""
    seen: list[Any] = []

    def note(annotated: list[Sample]) -> list[Sample]:
        seen.append([(s.old_logprobs, s.ref_logprobs, s.full_kl, s.squared_probs) for s in annotated])
        return annotated

    for needs in (["squared_probs"], ["full_kl"], ["ref_logprobs"], [], ["groups", "old_logprobs"]):
        note(learner.add_logprobs(samples, needs))
    samples = note(learner.add_logprobs(samples, {"old_logprobs", "full_kl", "squared_probs"}))
    samples = assign(note(learner.add_logprobs(samples, ["ref_logprobs"])), GRPO())
    for minibatch in (samples[:2], samples[2:], samples[:1]):  # of the third, the second epoch's, nothing is new
        seen.append({**learner.forward_backward(minibatch, objective), **learner.optim_step()})
    bare = [replace(sample, old_logprobs=None, full_kl=None) for sample in samples]
    once, metrics = learner.forward_backward_on_policy(bare, replace(objective, kl_coef=0.2))
    note(once)
    seen.append({**metrics, **learner.optim_step()})
    learner.zero_weights({name: None for name, _ in learner.weights() if name.endswith("norm.weight")})
    note(learner.add_logprobs(samples[:1], ["old_logprobs"]))
    learner.restore_weights()
    seen.append(learner.compute_logprobs_together(samples[::-1], padding_free=True))
    if pads:
        learner.set_layout("padded")
    note(learner.add_logprobs(samples, ["old_logprobs"]))
    seen.append([learner.describe().parameters, learner.describe().flops_per_token])
    seen.append({name: tensor.clone() for name, tensor in learner.weights()})
    return seen
