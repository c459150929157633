"""What `r1 eval` and `r1 sample` share: the prompts of a configuration, and a model that answers them, scored."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rich.console import Console

from r1_cli.build.endpoint import EndpointEngine, ReplyLog
from r1_cli.build.prompts import build_prompts
from r1_cli.build.rendering import build_renderer, open_rendering
from r1_cli.build.rewards.connect import connect_models, in_evaluation
from r1_cli.build.rewards.dispatch import DispatchingVerifier, open_verifier, require_columns
from r1_cli.build.rows import open_sources
from r1_cli.build.sampler import build_engine, build_sampler, load_engine_weights, open_player
from r1_cli.config import RunConfig
from r1_cli.config.model import LoraConfig
from r1_cli.config.sources import Source
from r1_cli.hardware import Hardware, find_hardware
from r1_cli.jobs.context import Context
from r1_cli.jobs.data import DataSplit
from r1_cli.models.adapters import AdapterError, merge_adapter
from r1_cli.models.files import ModelFiles, open_model
from r1_cli.models.load import ModelError
from r1_cli.runs.track.console import ConsoleReporter, configure_logging
from r1_cli.runs.track.timing import Timeline
from r1_cli.train.types import Sampler
from r1_data.render import Renderer
from r1_rewards.services.endpoint import HttpEndpoint
from r1_rollout.types import Generator
from r1_rollout.weights import LocalWeights

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from r1_cli.train.episodes.agents import Player


@dataclass(frozen=True, slots=True)
class Inference:
    """A model without a learner, and the rows that it answers."""

    context: Context
    data: DataSplit
    renderer: Renderer
    player: "Player | None"

    def open_sampler(self, adapter: Path | None = None) -> tuple[Sampler, LocalWeights]:
        """Load the weights, and return the sampler with its engine, and the weights to activate it with.

        Args, Raises: as `open_engine`.
        """
        config, hardware, model = self.context.config, self.context.hardware, self.context.model
        verifier = self.open_verifier()
        engine, weights = open_engine(config, hardware, model, self.context.stack, adapter)
        connect_models(config, model, verifier.asking, in_evaluation(config, hardware, model, engine))
        sampler = build_sampler(config, model, verifier, engine, self.player)
        return sampler, weights

    def open_endpoint(self, endpoint: HttpEndpoint, served_name: str, replies: Path) -> Sampler:
        """Return a sampler that asks a server, and keeps its answers in the file `replies` until they are recorded.

        Raises ModelError: the server cannot do what the configuration needs.
        """
        if self.player is not None:
            raise ModelError("worker.rollout.multi_turn.enable: a server of others plays no episodes")
        verifier = self.open_verifier()
        if verifier.asking:
            raise ModelError(
                "worker.reward.reward_function asks the model itself, which a server of others does not answer"
            )
        self.context.stack.callback(endpoint.close)
        engine = EndpointEngine(endpoint, served_name, self.context.model.tokenizer, ReplyLog(replies))
        sampler = build_sampler(self.context.config, self.context.model, verifier, cast("Generator", engine))
        return replace(sampler, tokenizer=cast("PreTrainedTokenizerBase", engine))

    def open_verifier(self) -> DispatchingVerifier:
        """Raises RewardSpecError: a reward does not exist, or needs a column that its rows lack."""
        verifier = open_verifier(self.context.config, self.data.sources, self.context.stack)
        require_columns(verifier, self.data.sources, self.data.prompts.parts)
        return verifier


def open_inference(config: RunConfig, sources: Sequence[Source], console: Console, stack: ExitStack) -> Inference:
    """Read the files of the configuration's model, and check every row of `sources`.

    Raises:
        DataError, ModelError: something cannot work.
    """
    config = with_all_weights(config)
    configure_logging(console)
    model = open_model(config)
    reporter = stack.enter_context(ConsoleReporter(console, step_lines=False))
    renderer = build_renderer(config, model)
    player = open_player(config, model, renderer, stack)
    rendering = stack.enter_context(open_rendering(config, renderer))
    rendering = replace(rendering, prepare=player.prepare if player else None)
    opened = open_sources(sources)
    data = DataSplit(sources, opened, build_prompts(config, opened, rendering, reporter.counter))
    context = Context(config, model, find_hardware(), reporter, Timeline(), stack)
    return Inference(context, data, renderer, player)


def open_engine(
    config: RunConfig, hardware: Hardware, model: ModelFiles, stack: ExitStack, adapter: Path | None = None
) -> tuple[Generator, LocalWeights]:
    """Load the weights of a model; return its engine, and the weights to activate it with.

    Args:
        adapter: a folder of peft's whose adapter is merged into the weights.

    Raises:
        ModelError: the engine cannot run this model, or the adapter is not one of it.
    """
    weights = load_engine_weights(config, hardware, model)
    if adapter is not None:
        try:
            merge_adapter(weights, adapter, hardware.engine_dtype(config.worker.rollout.dtype))
        except AdapterError as error:
            raise ModelError(str(error)) from error
    return build_engine(config, hardware, model, lambda: weights, stack), LocalWeights(weights.state_dict, 0)


def with_all_weights(config: RunConfig) -> RunConfig:
    actor = config.worker.actor
    model = actor.model.model_copy(update={"lora": LoraConfig()})
    worker = config.worker.model_copy(update={"actor": actor.model_copy(update={"model": model})})
    return config.model_copy(update={"worker": worker})
