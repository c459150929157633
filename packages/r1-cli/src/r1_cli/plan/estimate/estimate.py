"""Estimate memory and time of a run, and the settings that make it fit."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import reduce

from r1_cli.config import RunConfig
from r1_cli.config.rollout import AUTO
from r1_cli.config.section import Tree, with_value
from r1_cli.hardware import free_memory
from r1_cli.plan.estimate.cards import Cards
from r1_cli.plan.estimate.times import TO_HOST, Assumptions, find_times
from r1_cli.plan.host import find_host
from r1_cli.plan.memory import Memory, estimate
from r1_cli.plan.model_sizes import Models
from r1_cli.plan.phases import REMEDIES, Phase, Remedy, find_peak, find_phases, find_remedies, write_word

# Ways to train on fewer or smaller GPUs, from the one that changes least.
WAYS: tuple[tuple[str, tuple[Remedy, ...]], ...] = (
    ("as configured", ()),
    ("optimizer states in bfloat16", (("worker.actor.optim.strategy", "adamw_bf16"),)),
    ("weights, states in host memory", (("worker.actor.fsdp.enable_cpu_offload", True),)),
    ("LoRA, rank 32", (("worker.actor.model.lora.rank", 32),)),
    (
        "LoRA, rank 32, base in 4 bits",
        (("worker.actor.model.lora.rank", 32), ("worker.actor.model.quantization", "nf4")),
    ),
)
CPU_REMEDIES = tuple(setting for setting in REMEDIES if "offload" not in setting[0] and "memory_util" not in setting[0])


@dataclass(frozen=True, slots=True)
class Way:
    """A way to run it, with the bytes that it takes of each GPU, and of each machine besides Python and data."""

    name: str
    settings: list[str]
    device: int
    host: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """The estimate of a run, in bytes of one GPU, or of one process without GPUs."""

    devices: str
    capacity: int  # bytes of one GPU, or of this machine for each process
    memory: Memory
    phases: list[Phase]
    times: dict[str, float]  # seconds of each phase; {} on processors, whose speed nobody has message
    tokens: int  # that a step samples; of fine-tuning, that it reads
    overlaps: bool  # sampling runs ahead of learning
    notes: list[str] = field(default_factory=list)
    remedies: list[tuple[str, int]] | None = None  # settings with what each saves, the largest first; None: too few
    host: dict[str, int] = field(default_factory=dict)  # bytes of one machine's memory that GPUs' ranks take
    ways: list[Way] = field(default_factory=list)  # on GPUs: other ways to run it, with this one

    @property
    def fits(self) -> bool:
        return all(phase.total <= self.capacity for phase in self.phases)

    @property
    def seconds(self) -> float:
        sampling = self.times.get("sampling", 0.0)
        rest = sum(self.times.values()) - sampling
        return max(sampling, rest) if self.overlaps else sampling + rest

    def as_json(self) -> Tree:
        phases = [{"name": phase.name, "bytes": phase.total, "parts": phase.parts} for phase in self.phases]
        remedies = None if self.remedies is None else [{"set": text, "saves": saved} for text, saved in self.remedies]
        step = {"seconds": self.seconds, "tokens_per_second": self.tokens / self.seconds} if self.times else None
        return {
            "devices": self.devices,
            "bytes_of_a_device": self.capacity,
            "fits": self.fits,
            "states": self.memory.as_json(),
            "host": self.host,
            "ways": [asdict(way) for way in self.ways],
            "phases": phases,
            "seconds": self.times or None,
            "step": step,
            "remedies": [] if self.fits else remedies,
            "assumptions": self.notes,
        }


def estimate_run(config: RunConfig, models: Models, cards: Cards | None, assumed: Assumptions) -> Estimate:
    """Estimate a run on these GPUs; None: on this machine's processors. Raises ValueError."""
    if cards is None:
        return estimate_on_cpu(config, models, free_memory(), assumed)
    return estimate_on_cards(config, models, cards, assumed)


def estimate_on_cards(config: RunConfig, models: Models, cards: Cards, assumed: Assumptions) -> Estimate:
    notes = []
    if config.worker.rollout.engine == AUTO:
        config = with_value(config, "worker.rollout.name", "vllm")
        notes.append("worker.rollout.name=auto is taken as vllm")
    memory = _require(config, models)
    times = find_times(config, memory, cards, assumed)
    return Estimate(
        str(cards),
        cards.memory,
        memory,
        find_phases(config, memory, cards.memory),
        times,
        _tokens(config, assumed),
        config.trainer.max_staleness > 0,
        [
            *notes,
            *(_assumptions(config, assumed) if times else ["no time: config.json names no sizes that are known"]),
        ],
        find_savings(config, models, cards.memory, on_gpu=True),
        find_host(config, memory),
        list(find_ways(config, models, cards.memory)),
    )


def find_ways(config: RunConfig, models: Models, capacity: int) -> Iterator[Way]:
    """Yield what each of `WAYS` takes on GPUs of this capacity."""
    for name, settings in WAYS:
        changed = reduce(lambda changed, setting: with_value(changed, *setting), settings, config)
        if settings and changed == config:
            continue  # it is configured
        memory = _require(changed, models)
        largest = max(phase.total for phase in find_phases(changed, memory, capacity))
        host = sum(find_host(changed, memory).values())
        yield Way(name, [f"{key}={write_word(value)}" for key, value in settings], largest, host)


def estimate_on_cpu(config: RunConfig, models: Models, capacity: int, assumed: Assumptions) -> Estimate:
    """Estimate a run without GPUs; `capacity` bytes of memory are for all processes."""
    config, devices = as_on_cpu(config), config.trainer.devices
    memory = _require(config, models)
    share = capacity // devices
    notes = [
        "every process takes what Python and torch themselves do on top; no time: a processor's speed is not known"
    ]
    name = "processors" if devices == 1 else f"processors, {devices} processes"
    phases = find_phases(config, memory, on_gpu=False)
    remedies = find_savings(config, models, share, on_gpu=False)
    return Estimate(name, share, memory, phases, {}, _tokens(config, assumed), False, notes, remedies)


def as_on_cpu(config: RunConfig) -> RunConfig:
    values: Tree = {
        "worker.rollout.dtype": "fp32",
        "worker.ref.fsdp.enable_cpu_offload": False,
        "worker.ref.offload.offload_params": False,
    }
    for owner in ("actor", "critic"):
        values |= {
            f"worker.{owner}.fsdp.mp_param_dtype": config.trained(owner).kept_dtype,
            f"worker.{owner}.fsdp.enable_cpu_offload": False,
            f"worker.{owner}.offload.offload_params": False,
            f"worker.{owner}.offload.offload_optimizer": False,
            f"worker.{owner}.model.enable_activation_offload": False,
        }
    if config.worker.rollout.engine == AUTO:
        values["worker.rollout.name"] = "embedded"
    for key, value in values.items():
        config = with_value(config, key, value)
    return config


def find_savings(config: RunConfig, models: Models, capacity: int, *, on_gpu: bool) -> list[tuple[str, int]] | None:
    """Return settings that make it fit, with the bytes that each saves in the largest phase."""
    remedies: Sequence[Remedy] = REMEDIES if on_gpu else CPU_REMEDIES
    found = find_remedies(config, capacity, models=models, remedies=remedies, on_gpu=on_gpu)
    if found is None:
        return None
    chosen = [(key, value) for key, value in remedies if any(text.startswith(f"{key}=") for text in found)]

    def peak(settings: Sequence[Remedy]) -> int:
        changed = reduce(lambda changed, setting: with_value(changed, *setting), settings, config)
        return find_peak(changed, capacity, models=models, on_gpu=on_gpu) or 0

    savings = [peak([other for other in chosen if other != one]) - peak(chosen) for one in chosen]
    return sorted(zip(found, savings, strict=True), key=lambda pair: -pair[1])


def _require(config: RunConfig, models: Models) -> Memory:
    memory = estimate(config, models)
    assert memory is not None  # `find_models` raises otherwise
    return memory


def _tokens(config: RunConfig, assumed: Assumptions) -> int:
    answer = assumed.answer_tokens or config.data.max_response_length
    prompt = 0 if config.samples else assumed.prompt_tokens or config.data.max_prompt_length
    return config.data.rollout_batch_size * config.worker.rollout.n * (prompt + answer)


def _assumptions(config: RunConfig, assumed: Assumptions) -> list[str]:
    data = config.data
    prompt, answer = assumed.prompt_tokens, assumed.answer_tokens
    return [
        f"prompts of {prompt or data.max_prompt_length:,} tokens (--prompt-tokens), "
        f"answers of {answer or data.max_response_length:,} (--answer-tokens)",
        f"passes reach {assumed.learning:.0%} of the GPUs' peak (--learning-efficiency)",
        *(
            [f"decoding reaches {assumed.sampling:.0%} of their memory's bandwidth (--sampling-efficiency)"]
            if config.samples
            else []
        ),
        f"{TO_HOST / 1e9:g} GB a second to and from the processor's memory",
        "rewards, data, and what GPUs tell one another take no time",
        *describe_teacher_prompts(config),
        *(["servers sample: their time is not counted"] if config.worker.rollout.servers.used else []),
    ]


def describe_teacher_prompts(config: RunConfig) -> list[str]:
    """Return a note if a teacher's prompts are longer by a text that is not known here."""
    teacher = config.worker.teacher
    if teacher.max_prompt_length or not any(one.context for one in teacher.read_by_learner):
        return []
    return ["the text of worker.teacher.context is not counted: set worker.teacher.max_prompt_length, and it is"]
