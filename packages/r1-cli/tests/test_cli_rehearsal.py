"""What a rehearsal makes of passes that do not fit, or that cannot be computed: sizes, and errors that name the key."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from r1_cli.build.longest_sample import LongestSample
from r1_cli.build.profiling import SizeChooser, with_sizes
from r1_cli.config import ConfigError, load_config, printable
from r1_cli.jobs.resume import find_previous_sizes
from r1_core.learner.batching import MicroLimit
from r1_core.learner.profiling import PassProfile
from r1_core.own import OwnCodeError
from r1_core.types import Sample

GB = 10**9
BASE = [
    "data.train_files=owner/rows@train", "worker.actor.model.model_path=owner/model", "trainer.n_gpus_per_node=1",
    "worker.reward.reward_function=math", "data.rollout_batch_size=16", "worker.rollout.n=4", "trainer.nnodes=1",
    "worker.actor.global_batch_size=16",
]  # fmt: skip
UPDATE, EXPERIENCE = (f"worker.actor.micro_batch_size_per_device_for_{kind}" for kind in ("update", "experience"))
LONGEST = LongestSample(prompt=300, response=300, answers=4, axes=1, allowed=range(90))
AUTO = (f"{UPDATE}=auto", f"{EXPERIENCE}=auto")


def stage(
    profile_pass: Callable[[list[Sample], MicroLimit, bool], PassProfile], *words: str, on_gpu: bool = True
) -> SizeChooser:
    config = load_config([*BASE, *words])[0]
    return SizeChooser(config, "actor", on_gpu, True, LONGEST, 10**6, profile_pass)


def full(samples: list[Sample], limit: MicroLimit, gradient: bool) -> PassProfile:
    """A device for 9 sequences with a gradient and for 45 without, with a margin."""
    return taken((10 if gradient else 2) * GB * limit.samples, 100 * GB)


def taken(peak: int, room: int) -> PassProfile:
    if peak > room:
        raise torch.OutOfMemoryError("CUDA out of memory")
    return PassProfile(0.1, peak, room)


def never(samples: list[Sample], limit: MicroLimit, gradient: bool) -> PassProfile:
    raise AssertionError("profiled")


def message(profile_pass: Callable[..., PassProfile], *words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        stage(profile_pass, *words).choose({})
    return str(caught.value)


def test_sizes_that_choose_themselves_are_what_fits(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "r1"):
        assert stage(full, *AUTO).choose({}) == {"update": 9, "experience": 45}
    assert "9 for updates, 45 for log-probs; a sequence has at most 600 tokens" in caplog.text
    assert "peak 90.00 GB of 100 GB" in caplog.text


@pytest.mark.parametrize("settings", [(), ("worker.actor.global_batch_size=1",)])
def test_sizes_on_cpus_follow_from_tokens_without_a_profiling_pass(settings: tuple[str, ...]) -> None:
    found = stage(never, *AUTO, *settings, on_gpu=False).choose({})
    assert found == {"update": 4 if settings else 5, "experience": 5}  # of 600 tokens; 4 are all of an update
    assert stage(never, *AUTO, on_gpu=False).choose({UPDATE: 9}) == {"update": 9, "experience": 5}


def test_a_size_that_a_checkpoint_has_kept_is_rehearsed_and_stays() -> None:
    assert stage(full, *AUTO).choose({UPDATE: 4, EXPERIENCE: 2}) == {"update": 4, "experience": 2}
    with pytest.raises(torch.OutOfMemoryError):  # which the caller takes for a smaller one's turn
        stage(full, *AUTO).attempt("update", 16)


def test_a_size_that_is_set_and_does_not_fit_is_named() -> None:
    said = message(full, f"{UPDATE}=16", f"{EXPERIENCE}=auto")
    assert UPDATE in said
    assert "16 sequences of 600 tokens do not fit into the device's memory: set a smaller number, or auto" in said


def test_a_sequence_that_does_not_fit_names_what_makes_it_so_long() -> None:
    def too_long(samples: list[Sample], limit: MicroLimit, gradient: bool) -> PassProfile:
        if len(samples[0].token_ids) > 256:
            raise torch.OutOfMemoryError("out of memory")
        return PassProfile(1e-4, GB)

    said = message(too_long, *AUTO, "worker.actor.model.enable_gradient_checkpointing=false")
    assert "data.max_response_length" in said
    assert "a sequence of 600 tokens, which it allows with data.max_prompt_length, does not fit" in said
    assert "enable_gradient_checkpointing=true" in said


def test_a_model_that_cannot_read_so_long_a_sequence_says_its_own_reason() -> None:
    def short(samples: list[Sample], limit: MicroLimit, gradient: bool) -> PassProfile:
        if len(samples[0].token_ids) > 256:
            raise IndexError("index 300 is out of bounds for positions\nand more lines")
        return PassProfile(1e-4, GB)

    said = message(short, *AUTO)
    assert "cannot be computed (index 300 is out of bounds for positions): lower one" in said
    assert "more lines" not in said


def test_a_model_that_fails_at_any_length_is_named() -> None:
    def broken(samples: list[Sample], limit: MicroLimit, gradient: bool) -> PassProfile:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    short = replace(LONGEST, prompt=56, response=200)
    with pytest.raises(ConfigError) as caught:
        replace(stage(broken, *AUTO), longest=short).choose({})
    assert "worker.actor.model.model_path" in str(caught.value)
    assert "fails in a profiling pass of 256 tokens: mat1 and mat2 shapes cannot be multiplied" in str(caught.value)


def test_a_users_own_loss_that_fails_says_so_itself() -> None:
    def own(samples: list[Sample], limit: MicroLimit, gradient: bool) -> PassProfile:
        raise OwnCodeError("loss.py: division by zero")

    with pytest.raises(OwnCodeError, match="division by zero"):
        stage(own, *AUTO).choose({})


@pytest.mark.parametrize(("size", "expected"), [(1, 1), (7, 4), (64, 64)])
def test_without_dynamic_batching_a_size_divides_what_there_is_to_cut(size: int, expected: int) -> None:
    def room_for(samples: list[Sample], limit: MicroLimit, gradient: bool) -> PassProfile:
        return taken(9 * GB * limit.samples, 10 * GB * size)

    found = stage(room_for, *AUTO, "worker.actor.dynamic_batching=false").choose({})
    assert found["update"] == expected


def test_a_run_that_starts_again_without_a_checkpoint_has_the_sizes_it_chose_unless_its_settings_changed() -> None:
    config, sizes = load_config([*BASE, *AUTO])[0], {UPDATE: 4, EXPERIENCE: 8}
    settled = printable(with_sizes(config, "actor", {"update": 4, "experience": 8}))
    start = {"config": settled, "host": {"devices": ["cpu"]}, "numerics": {"threads": 2, "micro_batches": sizes}}
    assert find_previous_sizes([start], config, ["cpu"]) == sizes
    assert find_previous_sizes([start], load_config([*BASE, *AUTO, "trainer.max_steps=9"])[0], ["cpu"]) == sizes
    assert find_previous_sizes([start], load_config([*BASE, *AUTO, "data.max_response_length=9"])[0], ["cpu"]) == {}
    assert find_previous_sizes([start], config, ["cuda", "0"]) == {}
    assert (
        find_previous_sizes([], config, ["cpu"])
        == find_previous_sizes([start | {"numerics": {}}], config, ["cpu"])
        == {}
    )
