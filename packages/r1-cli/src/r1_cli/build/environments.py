"""Build what answers the policy: the setups of the run and of single sources, and the pool that runs them."""

import json
from collections.abc import Mapping, Sequence

from r1_cli.config import ConfigError, Problem, RunConfig
from r1_cli.config.multi_turn import KEY, MultiTurnSettings
from r1_cli.config.section import Tree
from r1_cli.config.sources import Source, source_actors
from r1_rewards.environments.pool import EnvironmentPool
from r1_rewards.environments.types import EnvironmentSetup, EnvironmentSpecError


def open_environments(config: RunConfig, setups: Mapping[str, EnvironmentSetup]) -> EnvironmentPool:
    """Load tools, environments or the agent. Raises ConfigError that names the key and the file."""
    settings, others = config.worker.rollout.multi_turn, dict(setups)
    try:
        return EnvironmentPool(others.pop(""), workers=settings.num_workers, others=others)
    except EnvironmentSpecError as error:
        if others:  # the error names which of them
            raise ConfigError([Problem(KEY, f"or the same of data.sources: {error}")]) from error
        setup = setups[""]
        actors = ("environment", setup.environment), ("agent", setup.agent), ("tools", ", ".join(setup.tools))
        key, value = next((key, value) for key, value in actors if value)
        raise ConfigError([Problem(f"{KEY}.{key}", str(error), value)]) from error


def environment_setups(config: RunConfig) -> tuple[dict[str, EnvironmentSetup], dict[str, str]]:
    """Return what answers the policy by kind, and the kind of each source that has its own.

    The run's is the kind ""; if it has none, that of the first source is. Other kinds are named by their sources.
    """
    settings, actors = config.worker.rollout.multi_turn, source_actors(config.data)
    kinds: dict[str, list[Source]] = {}
    for source in actors.values():
        same = json.dumps(source.actor, sort_keys=True, default=str)
        kinds.setdefault(same, []).append(source)
    named = {", ".join(source.name for source in same): same for same in kinds.values()}
    own = {_last_name(spec) for source in actors.values() for spec in source.tools}
    setups: dict[str, EnvironmentSetup] = {}
    if any(value for _, value in settings.actors()):
        specs = settings.tool_specs()
        theirs = own - {*map(_last_name, specs)}
        kwargs = {name: value for name, value in settings.tool_kwargs.items() if name not in theirs}
        run = settings.environment or "", settings.agent or "", settings.environment_kwargs
        setups[""] = _setup(settings, specs, *run, tool_kwargs=kwargs)
    sources: dict[str, str] = {}
    for name, (first, *others) in named.items():
        names = {*map(_last_name, first.tools)}
        kwargs = {tool: value for tool, value in settings.tool_kwargs.items() if tool in names}
        setup = _setup(settings, first.tools, first.environment or "", "", first.environment_kwargs, tool_kwargs=kwargs)
        kind = name if setups else ""
        setups[kind] = setup
        sources |= {source.name: kind for source in (first, *others)}
    return setups, sources


def _last_name(spec: str) -> str:
    return spec.rpartition(":")[2]


def _setup(
    settings: MultiTurnSettings,
    tools: Sequence[str],
    environment: str,
    agent: str,
    environment_kwargs: Tree,
    tool_kwargs: Mapping[str, Mapping[str, object]],
) -> EnvironmentSetup:
    return EnvironmentSetup(
        tools=tools,
        environment=environment,
        agent=agent,
        environment_kwargs=environment_kwargs,
        tool_kwargs=tool_kwargs,
        tool_timeout=settings.tool_timeout,
        episode_timeout=settings.episode_timeout,
        max_parallel_calls=settings.max_parallel_calls,
        max_response_length=settings.max_tool_response_length,
        truncate_side=settings.tool_response_truncate_side,
        max_images=settings.max_images,
    )
