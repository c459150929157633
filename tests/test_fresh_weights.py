"""The canary in whole runs: a run samples only from the current weights."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from endtoend import QUICKSTART, R1, SMALL, read_log

from r1_cli.build import canary
from r1_cli.build.rendering import build_renderer
from r1_cli.config import load_config
from r1_cli.hardware import Hardware
from r1_cli.models.files import open_model
from r1_core.types import Sample
from r1_rollout import embedded
from r1_rollout.embedded import EmbeddedEngine
from r1_rollout.lora import Adapter
from r1_rollout.probes import Probes
from r1_rollout.weight_checks import TOLERANCE
from r1_rollout.weights import LocalWeights, WeightSource

MORE = ["trainer.val_freq=-1", "trainer.val_before_train=false", "trainer.save_freq=1", "trainer.max_steps=3",
        "trainer.max_restarts=0"]  # fmt: skip


class ForgetfulEngine(EmbeddedEngine):
    """From the second sync on, some tensors stay what they were."""

    forgets = "layers.1."

    @contextmanager
    def active(self, source: WeightSource) -> Iterator[None]:
        first, weights = self.__dict__.setdefault("first", {}), source.tensors()
        assert not isinstance(weights, Adapter)
        named = {name: tensor.clone() for name, tensor in weights}
        changed = {name: first.get(name, tensor) if self.forgets in name else tensor for name, tensor in named.items()}
        first.update({name: tensor for name, tensor in named.items() if name not in first})
        with super().active(LocalWeights(changed.items(), source.version)):
            yield


class BlindEngine(ForgetfulEngine):
    forgets = "visual."


@pytest.mark.parametrize(("engine", "group"), [(ForgetfulEngine, "layer 1"), (BlindEngine, "vision tower")])
def test_a_run_with_a_stale_engine_stops_and_its_last_checkpoint_goes_on(
    r1: R1, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: Any, group: str
) -> None:
    words = ["train", QUICKSTART, *SMALL, *MORE, f"trainer.save_checkpoint_path={tmp_path}"]
    with monkeypatch.context() as patch:
        patch.setattr(embedded, "EmbeddedEngine", engine)
        result = r1(*words, ok=False)
    assert result.exit_code == 2
    assert f"At fault: {group} (" in result.stderr
    assert "after the sync of weight version 1" in result.stderr
    assert [record["step"] for record in read_log(tmp_path)] == [1]
    if engine is BlindEngine:
        return
    r1(*words)
    assert [record["step"] for record in read_log(tmp_path)] == [1, 2, 3]
    for record in read_log(tmp_path):
        assert record["rollout/canary_gap"] < TOLERANCE[torch.float32] / 5


def test_an_engine_that_stays_behind_by_less_than_rounding_is_found_by_its_bytes(
    r1: R1, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "EmbeddedEngine", ForgetfulEngine)
    words = [*SMALL, *MORE, "worker.actor.optim.lr=1e-8", f"trainer.save_checkpoint_path={tmp_path}"]
    result = r1("train", QUICKSTART, *words, ok=False)
    assert result.exit_code == 2
    assert "of the engine's weights are not the learner's. At fault: layer 1 (" in result.stderr


def with_changed(attribute: str, change: Callable[[Any], Any]) -> type[EmbeddedEngine]:
    """An engine whose text model has changed after it was taken over."""

    class Changed(EmbeddedEngine):
        def __init__(self, model: Any, *args: Any, **options: Any) -> None:
            super().__init__(model, *args, **options)
            for module in model.model.language_model.modules():
                if hasattr(module, attribute):
                    setattr(module, attribute, change(getattr(module, attribute)))

    return Changed


def test_in_bf16_too_an_engine_with_other_rotations_or_norms_stops_the_run_at_its_first_sync(
    r1: R1, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["train", QUICKSTART, *SMALL, *MORE, "worker.actor.fsdp.torch_dtype=bf16", "trainer.max_steps=1"]
    # The right engine passes in bfloat16 in test_correction_shaping_filters.
    for name, engine in (
        ("rotations", with_changed("inv_freq", lambda found: found**1.05)),
        ("norms", with_changed("variance_epsilon", lambda found: 1e-3)),
    ):
        monkeypatch.setattr(embedded, "EmbeddedEngine", engine)
        result = r1(*words, f"trainer.save_checkpoint_path={tmp_path / name}", ok=False)
        assert "At fault: the engine's computation, not its weights" in result.stderr


def test_without_the_canary_a_stale_engine_samples_on(r1: R1, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "EmbeddedEngine", ForgetfulEngine)
    more = [*MORE, "worker.rollout.canary=false", "trainer.save_freq=-1", f"trainer.save_checkpoint_path={tmp_path}"]
    r1("train", QUICKSTART, *SMALL, *more)
    records = read_log(tmp_path)
    assert all("rollout/canary_gap" not in record for record in records)
    # What remains is the gap that every step logs, which nobody has to look at.
    assert records[0]["rollout/logprob_gap_max"] < 1e-4 < records[2]["rollout/logprob_gap_max"]


def build(*words: str, variant: int = 0) -> Probes:
    config = load_config([QUICKSTART, *words])[0]
    model = open_model(config)
    return canary.build_probes(config, model, build_renderer(config, model), variant=variant)


@pytest.fixture
def in_root(r1: R1) -> None:
    """The quickstart's paths are from the repository's root, where `r1` goes."""


@pytest.mark.usefixtures("in_root")
def test_the_sequences_fit_the_run_and_one_has_a_picture() -> None:
    probes, again, fresh = build(), build(), build(variant=1)
    assert [p.token_ids for p in probes.prompts] == [p.token_ids for p in again.prompts]
    assert all(len(p.token_ids) <= 64 for p in probes.prompts)
    assert all(len(r) <= 20 for r in probes.responses)
    pictures = [p.model_inputs["pixel_values"] for p in (*probes.prompts, *fresh.prompts) if p.model_inputs]
    assert len(pictures) == 2
    assert not pictures[0].equal(pictures[1])


@pytest.mark.usefixtures("in_root")
def test_a_picture_that_does_not_fit_is_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert not any(p.model_inputs for p in build("data.max_prompt_length=8").prompts)
    config = load_config([QUICKSTART, "data.max_prompt_length=8"])[0]
    model = open_model(config)
    renderer, noisy = build_renderer(config, model), cast(Any, Noisy(torch.float32, 0.0))
    assert canary.build_canary(config, Hardware("cpu"), model, renderer, noisy).pictures is None
    assert caplog.text.count("the canary has no picture: it takes") == 1
    whole = canary.build_probes(config, model, renderer, variant=0, sampled=False)
    assert any(p.model_inputs for p in whole.prompts), "it fits a sample"


@pytest.mark.usefixtures("in_root")
def test_the_tolerance_is_that_of_the_coarser_side() -> None:
    cases: list[tuple[list[str], torch.dtype, float, float]] = [
        ([], torch.float32, 0.0, 2e-5),
        (["worker.actor.fsdp.torch_dtype=bf16"], torch.bfloat16, 0.001, 0.008),
        (["worker.actor.fsdp.torch_dtype=bf16"], torch.bfloat16, 0.1, 0.06),
        (["worker.actor.fsdp.torch_dtype=bf16"], torch.bfloat16, 0.0, 0.06),
    ]
    for words, precision, noise, opening in cases:
        config = load_config([QUICKSTART, *words])[0]
        model = open_model(config)
        built = canary.build_canary(
            config, Hardware("cpu"), model, build_renderer(config, model), cast(Any, Noisy(precision, noise))
        )
        assert built.tolerance == TOLERANCE[precision]
        assert built.opening is not None
        assert built.opening.tolerance == pytest.approx(opening)


class Noisy:
    """A learner with log-probs of 1 nat, which rounding changes by `noise`."""

    def __init__(self, precision: torch.dtype, noise: float) -> None:
        self.precision, self.noise = precision, noise

    def compute_eager_logprobs(self, samples: Sequence[Sample], noise: torch.dtype | None = None) -> list[list[float]]:
        assert noise in (None, self.precision)
        return [[-1.0 - (self.noise if noise else 0.0)] * int(sample.loss_mask.sum()) for sample in samples]


@pytest.mark.usefixtures("in_root")
def test_the_first_sync_is_compared_on_a_sample_as_long_as_the_longest_of_which_no_noise_is_asked() -> None:
    config = load_config([QUICKSTART, "data.max_response_length=300"])[0]
    model = open_model(config)
    asked: list[int] = []

    class Counting(Noisy):
        def compute_eager_logprobs(
            self, samples: Sequence[Sample], noise: torch.dtype | None = None
        ) -> list[list[float]]:
            asked.extend(len(sample.token_ids) for sample in samples)
            return super().compute_eager_logprobs(samples, noise)

    learner = cast(Any, Counting(torch.float32, 0.0))
    built = canary.build_canary(config, Hardware("cpu"), model, build_renderer(config, model), learner).opening
    assert built is not None
    lengths = [len(p.token_ids) + len(r) for p, r in zip(built.probes.prompts, built.probes.responses, strict=True)]
    assert max(lengths) == config.data.max_prompt_length + 300
    assert max(asked) < 200


@pytest.mark.usefixtures("in_root")
@pytest.mark.parametrize(("key", "longest"), [("max_position_embeddings", 900), ("sliding_window", 2000)])
def test_the_longest_probe_of_the_first_sync_ends_where_the_model_does(key: str, longest: int) -> None:
    config = load_config([QUICKSTART, "data.max_prompt_length=1500", "data.max_response_length=500"])[0]
    model = open_model(config)
    setattr(model.config.get_text_config(), key, 900)
    probes = canary.build_probes(config, model, build_renderer(config, model), variant=0, opening=True)
    assert max(len(p.token_ids) + len(r) for p, r in zip(probes.prompts, probes.responses, strict=True)) == longest
