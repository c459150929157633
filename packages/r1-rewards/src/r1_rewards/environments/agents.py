"""Run an agent that talks to the policy as to a server: a command, or a function. Runs in a worker only."""

import importlib
import importlib.util
import inspect
import json
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

from r1_rewards.environments.shapes import PICTURES, Given, Loaded, find_file, wait
from r1_rewards.environments.types import EnvironmentSpecError
from r1_rewards.types import RewardSpecError, suggest
from r1_rewards.workers.source import import_file

MAX_ROW = 120_000  # bytes of R1_ROW; Linux refuses variables of 128 KiB
TAIL = 8192  # bytes of a command's output that are kept
_LOCAL = "127.0.0.1,localhost"  # not through a proxy
_OFFERED = ("row", "client", "base_url", "api_key", *PICTURES)

Address = Mapping[str, str]  # base_url and api_key of the server


class AgentError(RuntimeError):
    """A command that failed, with its exit code and the last line of its output."""


@dataclass(frozen=True, slots=True)
class AgentClient:
    """What `solve(row, client)` gets where the package `openai` is not installed."""

    base_url: str
    api_key: str


def load_agent(spec: str) -> Loaded:
    """Load FILE.py:FUNCTION, or split a command. Raises EnvironmentSpecError."""
    if not is_function(spec):
        return Loaded("agent", {}, run=partial(run_command, _split(spec)))
    path, name = find_file(spec, "agent")
    try:
        module = import_file(path, "agent", "r1_agent")
    except RewardSpecError as error:
        raise EnvironmentSpecError(str(error)) from error
    function = getattr(module, name, None)
    if not inspect.isfunction(function):
        names = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise EnvironmentSpecError(f"agent file {path} has no function {name!r}{suggest(name, names)}")
    places = _places(function, spec)
    if "client" in places.values() and importlib.util.find_spec("openai"):
        importlib.import_module("openai")  # once, before workers are forked
    wants_pictures = any(offered in PICTURES for offered in places.values())
    run = partial(run_function, function, places)
    return Loaded("agent", {}, run=run, wants_pictures=wants_pictures, files=(str(path),))


def is_function(spec: str) -> bool:
    """Whether an agent is FILE.py:FUNCTION, and not a command."""
    path, _, name = spec.rpartition(":")
    return path.endswith(".py") and name.isidentifier() and " " not in path


def run_function(function: Callable[..., Any], places: Mapping[str, str], given: Given, address: Address) -> Any:
    os.environ.update(_variables(address))
    offered: dict[str, Any] = {**address}
    if "client" in places.values():
        offered["client"] = _make_client(address, is_async=inspect.iscoroutinefunction(function))
    values = {name: offered[what] if what in offered else given.value(what) for name, what in places.items()}
    bound = inspect.signature(function).bind_partial()
    bound.arguments.update({name: values[name] for name in inspect.signature(function).parameters if name in values})
    return wait(function(*bound.args, **bound.kwargs))


def run_command(words: Sequence[str], given: Given, address: Address) -> None:
    """Run a command to its end; it inherits this process's limits. Raises AgentError."""
    row = json.dumps(given.row, ensure_ascii=False)
    if (size := len(row.encode())) > MAX_ROW:
        raise AgentError(f"the row has {size:,} bytes, too many for R1_ROW ({MAX_ROW:,}); write file.py:function")
    scripts = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    environment = {**os.environ, **_variables(address), "R1_ROW": row, "PATH": scripts}
    try:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
        )
    except OSError as error:
        raise AgentError(f"{words[0]} cannot be started: {error.strerror}") from error
    tail = bytearray()
    assert process.stdout is not None
    reader = threading.Thread(target=_keep_tail, args=(process.stdout, tail), daemon=True)
    reader.start()
    code = process.wait()
    reader.join(1.0)  # what it started in the background may hold the pipe open
    if code:
        lines = bytes(tail).decode("utf-8", "replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
        raise AgentError(f"exit code {code}: {last[-500:]}")


def _split(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise EnvironmentSpecError(f"agent {command!r} cannot be split into words: {error}") from error
    if not words:
        raise EnvironmentSpecError("the agent is an empty command")
    return words


def _places(function: Callable[..., Any], spec: str) -> dict[str, str]:
    """Return what each parameter gets: by its name, otherwise the row first and the client second."""
    places, others = dict[str, str](), list[inspect.Parameter]()
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if name in _OFFERED:
            places[name] = name
        elif parameter.default is parameter.empty:
            others.append(parameter)
    free = [what for what in ("row", "client") if what not in places]
    if len(others) > len(free) or any(one.kind is one.KEYWORD_ONLY for one in others):
        unknown = others[-1].name
        raise EnvironmentSpecError(f"agent {spec!r} is called as solve(row, client), and {unknown!r} has no value")
    return places | {parameter.name: what for parameter, what in zip(others, free, strict=False)}


def _variables(address: Address) -> dict[str, str]:
    proxies = {
        key: ",".join(filter(None, [os.environ.get(key, ""), _LOCAL])) for key in ("NO_PROXY", "no_proxy")
    }  # fmt: skip
    url, key = address["base_url"], address["api_key"]
    # Anthropic's clients add "/v1" themselves.
    anthropic = {"ANTHROPIC_BASE_URL": url.removesuffix("/v1"), "ANTHROPIC_API_KEY": key}
    return {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": key, **anthropic, **proxies}


def _make_client(address: Address, *, is_async: bool) -> Any:
    if importlib.util.find_spec("openai") is None:
        return AgentClient(**address)
    openai = importlib.import_module("openai")
    return (openai.AsyncOpenAI if is_async else openai.OpenAI)(**address)


def _keep_tail(output: IO[bytes], tail: bytearray) -> None:
    while piece := os.read(output.fileno(), 1 << 16):
        tail += piece
        del tail[:-TAIL]
