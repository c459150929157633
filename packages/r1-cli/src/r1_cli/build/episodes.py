"""Build what plays and scores episodes: the environments' processes, the turns of the chat template, the limits."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from r1_cli.build.environments import environment_setups, open_environments
from r1_cli.config import ConfigError, Problem, RunConfig
from r1_cli.config.multi_turn import KEY
from r1_cli.config.sources import training_sources, validation_sources
from r1_cli.gateway.server import GatewayServer
from r1_cli.models import load as models
from r1_cli.models.files import ModelFiles
from r1_cli.train.episodes.agent_events import AgentSource, RequestQueue, live_agents
from r1_cli.train.episodes.agents import AgentPlayer, Player
from r1_cli.train.episodes.answers import AnswerRecord
from r1_cli.train.episodes.episode import EpisodeLimits
from r1_cli.train.episodes.player import EpisodePlayer
from r1_cli.train.episodes.recorded_agents import replay_agents
from r1_cli.train.episodes.recorded_environments import Environments, RecordedEnvironments, replay_answers
from r1_cli.train.groups.group import SampledInput
from r1_cli.train.groups.trajectory import Trajectory
from r1_data.render import Renderer
from r1_data.turns.probe import probe_template
from r1_data.turns.turn_renderer import TurnRenderer
from r1_rewards.environments.pool import EnvironmentPool
from r1_rewards.types import FailureRule, RewardInput, Score, Verifier
from r1_rollout.tokens import end_token_ids

ENDLESS = 10**6  # turns, where max_response_length is the only limit


def open_player(
    config: RunConfig, model: ModelFiles, renderer: Renderer, stack: ExitStack, recorded: Path | None = None
) -> Player:
    """Start the environments or the agents' server, and probe the chat template. `stack` ends their processes.

    Args:
        recorded: a run's folder, whose recorded answers are repeated: nothing is started.

    Raises:
        ConfigError: the tools, the environment or the agent cannot be loaded.
        DataError: turns cannot be appended with the model's chat template, or there are no recorded answers.
    """
    settings = config.worker.rollout.multi_turn
    setups, sources = environment_setups(config)
    record = AnswerRecord(recorded) if recorded else None
    environments: EnvironmentPool | RecordedEnvironments = (
        RecordedEnvironments(record.kinds(setups)) if record else stack.enter_context(open_environments(config, setups))
    )
    unjudged = sources_without_reward(config)
    if isinstance(environments, EnvironmentPool) and not settings.agent:
        _require_rewards(environments, {sources.get(name, "") for name in unjudged})
    generation = models.load_generation_config(model.path, model.config)
    ends = frozenset(end_token_ids(generation, model.config, model.tokenizer))
    renderers = _open_renderers(config, renderer, ends, environments)
    if settings.agent:
        return AgentPlayer(
            environments,
            replay_agents(record) if record else _open_agents(environments, stack),
            renderers[""],
            model.tokenizer,
            ends,
            _limits(config),
            max_prompt_tokens=config.data.max_prompt_length,
            max_concurrent=settings.max_concurrent,
            needs_score=unjudged,
        )
    return EpisodePlayer(
        environments,
        renderers.pop(""),
        model.tokenizer,
        ends,
        _limits(config),
        rounds=settings.scheduling == "rounds",
        max_concurrent=settings.max_concurrent,
        answers=replay_answers(record) if record else None,
        sources=sources,
        renderers=renderers,
        needs_score={*unjudged},
    )


def _open_renderers(
    config: RunConfig, renderer: Renderer, ends: frozenset[int], environments: Environments
) -> dict[str, TurnRenderer]:
    """Return the renderer of each kind of environment, whose tools differ; "" is the run's own."""
    settings = config.worker.rollout.multi_turn
    render = partial(
        TurnRenderer,
        renderer,
        probe_template(renderer, end_token_ids=sorted(ends)),
        tool_format=settings.format,
        history=settings.history,
        max_parallel_calls=settings.max_parallel_calls,
    )
    return {name: render(tools=kind.tools) for name, kind in environments.kinds.items()}


def _limits(config: RunConfig) -> EpisodeLimits:
    settings = config.worker.rollout.multi_turn
    return EpisodeLimits(
        max_tokens=config.data.max_response_length,
        max_turns=min(settings.max_assistant_turns or ENDLESS, (settings.max_user_turns or ENDLESS) + 1),
        max_turn_tokens=settings.max_turn_tokens,
        max_malformed_calls=settings.max_malformed_calls,
    )


def sources_without_reward(config: RunConfig) -> frozenset[str]:
    """Return the names of the sources that no reward function judges."""
    sources = [*training_sources(config.data), *validation_sources(config.data)]
    if config.worker.reward.reward_function:
        return frozenset()
    judged = {source.name for source in sources if source.reward_function}
    return frozenset(source.name for source in sources) - judged


def _require_rewards(pool: EnvironmentPool, unjudged: Iterable[str]) -> None:
    """Raise ConfigError for a kind that can give no reward, among those that no reward function judges."""
    for name in unjudged:
        kind = pool.kinds[name]
        if not kind.scores and not kind.loaded.rewards:
            message = f"is missing: {kind.setup.name} can give no reward; name math, r1v, gsm8k or ./file.py:function"
            message += ", or give it a method get_reward()" if kind.setup.environment else ""
            raise ConfigError([Problem("worker.reward.reward_function", message)])


def _open_agents(pool: Environments, stack: ExitStack) -> AgentSource:
    assert isinstance(pool, EnvironmentPool)
    queue = RequestQueue()
    try:
        server = GatewayServer(queue.answer, reward=queue.reward)
    except ModuleNotFoundError as error:
        raise ConfigError([Problem(f"{KEY}.agent", str(error))]) from error
    stack.callback(server.close)
    return live_agents(pool, server, queue)


def episode_verifier(config: RunConfig, verifier: Verifier) -> Verifier:
    """Return a verifier that takes the environment's own score where there is one."""
    reward = config.worker.reward
    return partial(score_episodes, verifier, FailureRule(reward.failure_policy, reward.failure_score))


def score_episodes(verifier: Verifier, rule: FailureRule, inputs: Sequence[RewardInput]) -> list[Score]:
    """Return one score per episode, in order.

    An environment that failed gives what the failure policy of rewards says. An environment without a score of its own
    leaves the episode to the verifier. The rewards of turns are added, and reported as the part `turns`.

    Raises:
        RewardFailure: an environment failed, and the policy is "stop".
    """
    scores: dict[int, Score] = {}
    for index, item in enumerate(inputs):
        episode = item.completion if isinstance(item, SampledInput) else None
        if not isinstance(episode, Trajectory):
            continue
        if episode.failure is not None:
            scores[index] = rule.apply("environment", index, episode.failure)
        elif episode.score is not None:
            scores[index] = episode.score
    others = [index for index in range(len(inputs)) if index not in scores]
    scores |= dict(zip(others, verifier([inputs[index] for index in others]) if others else [], strict=True))
    return [_with_turns(scores[index], inputs[index]) for index in range(len(inputs))]


def _with_turns(score: Score, item: RewardInput) -> Score:
    episode = item.completion if isinstance(item, SampledInput) else None
    if not isinstance(episode, Trajectory) or score.error:
        return score
    if not episode.has_turn_rewards:
        return score
    turns = episode.turn_rewards
    return replace(score, value=score.value + turns, parts={**score.parts, "turns": turns})
