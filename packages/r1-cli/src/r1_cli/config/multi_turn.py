"""Configuration section `worker.rollout.multi_turn`: episodes, in which tools or an environment answer the policy."""

import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from inspect import Parameter, Signature
from os.path import isfile
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field

from r1_cli.config.files import definition_problems, where_or_near
from r1_cli.config.problems import KeyProblem, KeyRemark
from r1_cli.config.section import Count, NonNegative, OneOrMore, Positive, Section, Tree, UserPath
from r1_rewards.spec import MODEL_REWARDS
from r1_rewards.types import suggest

BUILTIN_TOOLS = ("calculator", "crop", "python", "search")
KEY = "worker.rollout.multi_turn"
# Tools that come with veRL, by the last part of their class names, and what they are here.
VERL_TOOLS = {"ImageZoomInTool": "crop", "SandboxFusionTool": "python", "SearchTool": "search"}


class MultiTurnSettings(Section):
    """Episodes: turns of the policy, and after each the answer of tools, an environment or an agent's program.

    Set exactly one of `tools` (or veRL's two paths), `environment` and `agent`.
    """

    enable: bool = False  # sample episodes instead of single answers
    # built-in names (calculator, crop, python, search), file.py:function, or file.py for all its public functions
    tools: Annotated[list[UserPath], OneOrMore] = Field(default_factory=list)
    tool_kwargs: Tree = Field(default_factory=dict)  # keyword-only arguments of tools, by the tool's name
    function_tool_path: UserPath | None = None  # file.py, whose public functions are all tools
    tool_config_path: UserPath | None = None  # YAML with a list `tools`, of which each has `function: file.py:name`
    environment: UserPath | None = None  # file.py:Class with reset and step, or whose public methods are tools
    environment_kwargs: Tree = Field(default_factory=dict)  # of its constructor
    agent: UserPath | None = None  # file.py:function, or a command, that samples from the policy as from a server
    max_assistant_turns: Count | None = None  # turns of the policy; null: as many as max_response_length allows
    max_user_turns: Count | None = None  # answers of tools or the environment; null: no limit
    max_turn_tokens: Count | None = None  # tokens of one turn; null: what data.max_response_length leaves
    max_parallel_calls: Count = 8  # calls of a turn that are executed; the others get an error text
    max_malformed_calls: Count = 3  # turns in a row without a valid call that end the episode
    max_tool_response_length: Count = 4096  # characters, not tokens, of an answer's text
    tool_response_truncate_side: Literal["left", "middle", "right"] = "middle"  # left: keep the beginning, as veRL does
    max_images: Annotated[int, Field(ge=0)] = 8  # pictures that tools or the environment add to an episode
    # how the policy writes calls; auto: as the chat template does
    format: Literal["auto", "hermes", "llama3_json", "pythonic", "qwen3_coder"] = "auto"
    # earlier turns as sampled, or as the chat template shows them later: where these differ, the episode forks
    history: Literal["sampled", "template"] = "sampled"
    scheduling: Literal["arrival", "rounds"] = (
        "arrival"  # go on when an answer arrives; rounds: all at once, bit for bit
    )
    tool_timeout: Positive = 30.0  # seconds of one call
    episode_timeout: Positive = 600.0  # seconds of an episode, the policy's turns included
    num_workers: Count = 8  # processes that run tools; an environment has one of its own for each episode
    max_concurrent: Count | None = None  # episodes at a time; null: all of a sampling round
    prefix_cache_gb: NonNegative = 4.0  # GiB of keys and values that the embedded engine keeps between turns; 0: none

    @property
    def has_environment(self) -> bool:
        """Whether there is one, or an agent, which may judge its episodes itself."""
        return self.enable and (self.environment or self.agent) is not None

    def tool_specs(self) -> list[str]:
        """Return all tools as `tools` has them. Raises ValueError if `tool_config_path` cannot be used."""
        own = [self.function_tool_path] if self.function_tool_path else []
        return [*self.tools, *own, *(_read_tools(Path(self.tool_config_path)) if self.tool_config_path else ())]

    def problems(
        self,
        max_response_length: int,
        rewards: Iterable[str | None],
        *,
        of_sources: bool = False,
        tools_of_sources: bool = False,
    ) -> Iterator[KeyProblem]:
        """Yield what does not fit together.

        Args:
            rewards: the run's reward functions.
            of_sources: all sources have tools or an environment of their own.
            tools_of_sources: a source has tools of its own.
        """
        if not self.enable:
            return
        given = [key for key, value in self.actors() if value]
        if not given and not of_sources:
            yield f"{KEY}.enable", "needs tools, an environment or an agent to answer the policy"
        for key in given[1:]:
            yield f"{KEY}.{key}", f"cannot be used with {given[0]}: set one of tools, environment and agent"
        for key, value, owner in (
            ("tool_kwargs", {} if tools_of_sources else self.tool_kwargs, "tools"),
            ("environment_kwargs", self.environment_kwargs, "environment"),
        ):
            if value and owner not in given:
                yield f"{KEY}.{key}", f"needs {owner}"
        if (self.max_turn_tokens or 0) > max_response_length:
            yield f"{KEY}.max_turn_tokens", f"must be at most data.max_response_length ({max_response_length})"
        if self.tool_timeout > self.episode_timeout:
            yield f"{KEY}.tool_timeout", f"must be at most episode_timeout ({self.episode_timeout:g} s)"
        for reward in sorted({name for name in rewards if name in MODEL_REWARDS}):
            message = f"cannot be used with the reward {reward}, which needs the whole response to be the policy's"
            yield f"{KEY}.enable", message
        yield from self._tool_problems()
        yield from environment_problems(f"{KEY}.environment", self.environment)
        yield from self._agent_problems()

    def actors(self) -> Iterator[tuple[str, object]]:
        """Yield what may answer the policy, of which one is set."""
        yield "tools", self.tools or self.function_tool_path or self.tool_config_path
        yield "environment", self.environment
        yield "agent", self.agent

    def _agent_problems(self) -> Iterator[KeyProblem]:
        if self.agent is None:
            return
        if _is_defined_name(self.agent):
            yield from definition_problems(f"{KEY}.agent", self.agent)
        elif not (words := _split(self.agent)) or words[0].endswith(".py"):
            yield f"{KEY}.agent", "must be file.py:function, or a command such as `python agent.py`"
        elif not shutil.which(words[0], path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"):
            yield f"{KEY}.agent", f"there is no command {words[0]!r}"
        if self.scheduling == "rounds":
            yield f"{KEY}.scheduling", "must be arrival with an agent, which asks when it wants"
        if self.history == "template":
            yield f"{KEY}.history", "must be sampled with an agent, which shows the policy its past itself"

    def _tool_problems(self) -> Iterator[KeyProblem]:
        yield from tool_problems(f"{KEY}.tools", self.tools, twice=False)
        if path := self.function_tool_path:
            yield from _spec_problems(f"{KEY}.function_tool_path", path)
        try:
            names = [spec.rpartition(":")[2] for spec in self.tool_specs() if not spec.endswith(".py")]
        except ValueError as error:
            yield f"{KEY}.tool_config_path", str(error)
            return
        yield from _doubles(f"{KEY}.tools", names)


def environment_problems(key: str, environment: str | None) -> Iterator[KeyProblem]:
    if environment and not _is_defined_name(environment):
        yield key, "must be file.py:Class"
    elif environment:
        yield from definition_problems(key, environment)


def tool_problems(key: str, specs: Sequence[str], *, twice: bool = True) -> Iterator[KeyProblem]:
    """Yield what is wrong with a list of tools; with `twice`, also names that two of them have."""
    for spec in specs:
        yield from _spec_problems(key, spec)
    if twice:
        yield from _doubles(key, [spec.rpartition(":")[2] for spec in specs if not spec.endswith(".py")])


def _doubles(key: str, names: Sequence[str]) -> Iterator[KeyProblem]:
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield key, f"names {name!r} twice: the policy calls tools by their names"


def _spec_problems(key: str, spec: str) -> Iterator[KeyProblem]:
    if spec in BUILTIN_TOOLS:
        return
    if _is_defined_name(spec):
        yield from definition_problems(key, spec)
    elif not spec.endswith(".py"):
        yield key, f"{spec!r} is neither file.py:function, nor file.py, nor built in" + suggest(spec, BUILTIN_TOOLS)
    elif not isfile(spec):
        yield key, f"no such file{where_or_near(spec)}"


def _is_defined_name(text: str) -> bool:
    """Whether a text has the form file.py:name."""
    path, _, name = text.rpartition(":")
    return path.endswith(".py") and name.isidentifier()


def _split(command: str) -> list[str]:
    """Return the words of a command; none if its quotes do not match."""
    try:
        return shlex.split(command)
    except ValueError:
        return []


def _read_tools(path: Path) -> list[str]:
    """Return the functions that a YAML file of tools names.

    Raises ValueError: not such a file, or tools that are classes of veRL, with what to write in their place.
    """
    entries = read_tool_entries(path)
    for number, entry in enumerate(entries, 1):
        if "class_name" in entry:
            name, message = replace_tool_class(entry)
            raise ValueError(f"{path}, tool {number}: {message or f'write {name} into {KEY}.tools'}")
        if not isinstance(entry.get("function"), str):
            raise ValueError(f"{path}, tool {number}: needs `function: file.py:name`, found {', '.join(entry)}")
    return [entry["function"] for entry in entries]


def read_tool_entries(path: Path) -> list[Tree]:
    """Return the list `tools` of a YAML file. Raises ValueError if there is none."""
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    entries = found.get("tools") if isinstance(found, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"{path} must have a list `tools`, of which each entry has `function: file.py:name`")
    return entries


def replace_tool_class(entry: Tree) -> tuple[str, str]:
    """Return the built-in tool that replaces a tool class of veRL, or "" and the function to write in its place."""
    kind = str(entry["class_name"])
    if builtin := VERL_TOOLS.get(kind.rpartition(".")[2]):
        return builtin, ""
    function: Any = (entry.get("tool_schema") or {}).get("function") or {}
    name = function.get("name") or kind.rpartition(".")[2]
    words = [word for word in (function.get("parameters") or {}).get("properties") or {} if str(word).isidentifier()]
    signature = Signature([Parameter(word, Parameter.POSITIONAL_OR_KEYWORD) for word in words])
    return "", f"{kind} is a class: write a function {name}{signature} into a file, and file.py:{name} into {KEY}.tools"


REMARKS = (KeyRemark(KEY, "set its enable to true", lambda v, c: not c.worker.rollout.multi_turn.enable),)
