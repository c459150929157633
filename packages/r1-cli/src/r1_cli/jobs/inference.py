"""What `r1 eval` and `r1 sample` share: the prompts of a configuration, and a model that answers them, scored."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from rich.console import Console

from r1_cli.build.endpoint import EndpointEngine
from r1_cli.build.prompts import build_prompts
from r1_cli.build.rendering import build_renderer, open_rendering
from r1_cli.build.rewards.connect import connect_models, in_evaluation
from r1_cli.build.rewards.dispatch import DispatchingVerifier, open_verifier, require_columns
from r1_cli.build.rows import OpenSource, open_sources
from r1_cli.build.sampler import build_engine, build_sampler, load_engine_weights, open_player
from r1_cli.config import RunConfig
from r1_cli.config.model import LoraConfig
from r1_cli.config.sources import Source
from r1_cli.hardware import Hardware, find_hardware
from r1_cli.models.files import ModelFiles, open_model
from r1_cli.models.load import ModelError
from r1_cli.runs.track.console import ConsoleReporter, configure_logging
from r1_cli.train.types import Sampler
from r1_data.dataset import Mixture
from r1_data.render import Renderer
from r1_rewards.services.endpoint import HttpEndpoint
from r1_rollout.types import Generator
from r1_rollout.weights import LocalWeights

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from r1_cli.train.episodes.agents import Player


@dataclass(frozen=True, slots=True)
class Inference:
    """A model without a learner: its files, and the rows that it answers. `stack` closes what a method opens."""

    config: RunConfig
    files: ModelFiles
    hardware: Hardware
    sources: Sequence[Source]
    opened: Sequence[OpenSource]
    prompts: Mixture
    renderer: Renderer
    player: "Player | None"
    reporter: ConsoleReporter
    stack: ExitStack

    def open_sampler(self) -> tuple[Sampler, Any]:
        """Load the weights, and return the sampler with its engine, and the weights to activate it with."""
        weights = load_engine_weights(self.config, self.hardware, self.files)
        verifier = self.open_verifier()
        engine = build_engine(self.config, self.hardware, self.files, lambda: weights, self.stack)
        return self.connect(verifier, engine), LocalWeights(weights.state_dict, 0)

    def open_endpoint(self, endpoint: HttpEndpoint, served_name: str) -> Sampler:
        """Return a sampler that asks a server. Raises ModelError: the server cannot do what the configuration needs."""
        if self.player is not None:
            raise ModelError("worker.rollout.multi_turn.enable: a server of others plays no episodes")
        verifier = self.open_verifier()
        if verifier.asking:
            raise ModelError(
                "worker.reward.reward_function asks the model itself, which a server of others does not answer"
            )
        self.stack.callback(endpoint.close)
        engine = EndpointEngine(endpoint, served_name, self.files.tokenizer)
        sampler = build_sampler(self.config, self.files, verifier, cast("Generator", engine))
        return replace(sampler, tokenizer=cast("PreTrainedTokenizerBase", engine))

    def open_verifier(self) -> DispatchingVerifier:
        """Raises RewardSpecError: a reward does not exist, or needs a column that its rows lack."""
        verifier = open_verifier(self.config, self.sources, self.stack)
        require_columns(verifier, self.sources, self.prompts.parts)
        return verifier

    def connect(self, verifier: DispatchingVerifier, engine: Generator) -> Sampler:
        asked = in_evaluation(self.config, self.hardware, self.files, engine)
        connect_models(self.config, self.files, verifier.asking, asked)
        return build_sampler(self.config, self.files, verifier, engine, self.player)


def open_inference(config: RunConfig, sources: Sequence[Source], console: Console, stack: ExitStack) -> Inference:
    """Read the files of the configuration's model, and check every row of `sources`.

    Raises:
        DataError, ModelError: something cannot work.
    """
    config = with_all_weights(config)
    configure_logging(console)
    files = open_model(config)
    reporter = stack.enter_context(ConsoleReporter(console, step_lines=False))
    renderer = build_renderer(config, files)
    player = open_player(config, files, renderer, stack)
    rendering = stack.enter_context(open_rendering(config, renderer))
    rendering = replace(rendering, prepare=player.prepare if player else None)
    opened = open_sources(sources)
    prompts = build_prompts(config, opened, rendering, reporter.counter)
    return Inference(config, files, find_hardware(), sources, opened, prompts, renderer, player, reporter, stack)


def with_all_weights(config: RunConfig) -> RunConfig:
    actor = config.worker.actor
    model = actor.model.model_copy(update={"lora": LoraConfig()})
    worker = config.worker.model_copy(update={"actor": actor.model_copy(update={"model": model})})
    return config.model_copy(update={"worker": worker})
