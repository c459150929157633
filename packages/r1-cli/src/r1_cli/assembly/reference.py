"""Whom rewards ask that are log-probs: found once learner and engine are there."""

from collections.abc import Callable, Sequence

from r1_cli.config import ConfigError, Problem, RunConfig
from r1_cli.hardware import Hardware
from r1_cli.models.files import ModelFiles
from r1_cli.reference.reading import LearnerReading, ReplayReading
from r1_cli.reference.verifier import Asked, ReferenceVerifier
from r1_cli.roles import Learner
from r1_rewards.reference.options import POLICY, REFERENCE
from r1_rollout.types import Generator, Reading, Replaying

FUNCTION = "worker.reward.reward_function"
KWARGS = "worker.reward.reward_function_kwargs"


def attach_models(
    config: RunConfig, model: ModelFiles, verifiers: Sequence[ReferenceVerifier], find: Callable[[str], Reading]
) -> None:
    """Tell each verifier whom it asks, by what `find` gives for its option `model`."""
    for verifier in verifiers:
        verifier.asked = Asked(
            reading=find(verifier.options.model),
            tokenizer=model.tokenizer,
            eos=model.tokenizer.eos_token or "",
            temperature=config.worker.rollout.temperature,
            longest=longest_sequence(config, model),
            longest_response=config.data.max_response_length,
        )


def longest_sequence(config: RunConfig, model: ModelFiles) -> int:
    """Return how many tokens the model knows positions for; where that is not said, what the run allows."""
    known = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return known or config.data.max_prompt_length + 2 * config.data.max_response_length


def in_training(config: RunConfig, hardware: Hardware, learner: Learner, engine: Generator) -> Callable[[str], Reading]:
    """Return how a run in training finds whom to ask.

    The policy is asked in the learner, whose weights are there; where it shares a GPU with an engine that is awake, in
    the engine, which has the same weights.
    """
    temperature = config.worker.rollout.temperature

    def find(name: str) -> Reading:
        if name == POLICY and config.colocated and hardware.on_gpu and isinstance(engine, Replaying):
            return ReplayReading(engine)
        if name == POLICY:
            return LearnerReading(learner, "policy", temperature)
        if name == REFERENCE and not config.algorithm.disable_kl:
            return LearnerReading(learner, "reference", temperature)
        raise ConfigError([Problem(KWARGS, "model=reference is the KL term's, and algorithm.disable_kl is true", name)])

    return find


def in_evaluation(engine: Generator) -> Callable[[str], Reading]:
    """Return how an evaluation finds whom to ask: the model that it evaluates, whatever a run would ask."""

    def find(name: str) -> Reading:
        if isinstance(engine, Replaying):
            return ReplayReading(engine)
        raise ConfigError([Problem(FUNCTION, f"{type(engine).__name__} tells no log-probs of given responses", name)])

    return find
