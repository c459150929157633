"""Load a user's tools or environment, find out its shape, and call it. Runs in a worker only."""

import ast
import asyncio
import functools
import importlib
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from r1_rewards.environments import openenv
from r1_rewards.environments.schema import function_schema
from r1_rewards.environments.types import EnvironmentSpecError, JsonObject
from r1_rewards.types import RewardSpecError, suggest
from r1_rewards.workers.source import import_file

Shape = Literal["tools", "methods", "gym", "agent"]

BUILT_IN = ("calculator", "crop", "python", "search")
PICTURES = ("image", "images")
_RESERVED = ("reset", "step", "score", "get_reward", "close")
_WITHOUT_REWARD = frozenset({"str", "int", "float", "bool", "bytes", "None", "Image"})  # what a tool may return


@dataclass(frozen=True, slots=True)
class Tool:
    """A function and the keyword-only parameters that r1 fills in: `row`, `image`, `images`, needed columns."""

    name: str
    function: Callable[..., Any]
    schema: JsonObject
    kwargs: Mapping[str, object]
    fills: tuple[str, ...]
    needs: tuple[str, ...]  # those without a default


@dataclass(frozen=True, slots=True)
class Loaded:
    shape: Shape
    tools: Mapping[str, Tool]
    make: Callable[[], Any] | None = None  # an environment for one episode
    run: "Callable[[Given, Mapping[str, str]], Any] | None" = None  # an agent, with base_url and api_key
    score: str = ""  # its method
    rewards: bool = True  # a turn may have a reward
    closes: bool = False
    deterministic: bool = False
    wants_pictures: bool = False
    files: tuple[str, ...] = ()  # of the user

    def describe(self) -> JsonObject:
        return {
            "shape": self.shape,
            "tools": [tool.schema for tool in self.tools.values()],
            "fills": {tool.name: list(tool.fills) for tool in self.tools.values()},
            "needs": {tool.name: list(tool.needs) for tool in self.tools.values()},
            "scores": bool(self.score),
            "rewards": self.rewards,
            "closes": self.closes,
            "deterministic": self.deterministic,
            "wants_pictures": self.wants_pictures,
        }


def load(setup: Mapping[str, Any]) -> Loaded:
    """Load what an `EnvironmentSetup` names. Raises EnvironmentSpecError."""
    try:
        if setup["environment"]:
            return _load_environment(setup["environment"], setup["environment_kwargs"])
        return _load_tools(setup["tools"], setup["tool_kwargs"])
    except RewardSpecError as error:
        raise EnvironmentSpecError(str(error)) from error


def _load_tools(specs: Iterable[str], kwargs: Mapping[str, Mapping[str, object]]) -> Loaded:
    tools, files = dict[str, Tool](), list[str]()
    for position, spec in enumerate(specs):
        functions, file = _find_functions(spec, position)
        files += [file] if file else []
        for name, function in functions.items():
            if name in tools:
                raise EnvironmentSpecError(f"two tools are called {name!r}; rename one")
            tools[name] = read_tool(function, kwargs.get(name, {}), name)
    if unknown := [name for name in kwargs if name not in tools]:
        raise EnvironmentSpecError(f"tool_kwargs name {unknown[0]!r}, which is no tool" + suggest(unknown[0], tools))
    wants_pictures = any(name in PICTURES for tool in tools.values() for name in tool.fills)
    rewards = any(_may_reward(tool.function) for tool in tools.values())
    return Loaded("tools", tools, rewards=rewards, wants_pictures=wants_pictures, files=tuple(files))


def _find_functions(spec: str, position: int) -> tuple[dict[str, Callable[..., Any]], str]:
    if spec in BUILT_IN:
        return {spec: getattr(importlib.import_module(f"r1_rewards.environments.tools.{spec}"), spec)}, ""
    path, name = find_file(spec, "tool", BUILT_IN)
    module = import_file(path, "tool", f"r1_tools_{position}")
    public: dict[str, Callable[..., Any]] = {
        key: value
        for key, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not key.startswith("_")
    }
    if not name:
        if not public:
            raise EnvironmentSpecError(f"tool file {path} has no public function")
        return public, str(path)
    function = getattr(module, name, None)
    if inspect.isclass(function):
        raise EnvironmentSpecError(f"{spec} is a class: name it as the environment, and not among the tools")
    if not callable(function):
        raise EnvironmentSpecError(f"tool file {path} has no function {name!r}" + suggest(name, public))
    return {name: function}, str(path)


def find_file(spec: str, kind: str, built_in: Sequence[str] = ()) -> tuple[Path, str]:
    """Return the file and the name of FILE.py:NAME; "" without a name. Raises EnvironmentSpecError."""
    path_text, colon, name = spec.rpartition(":")
    if spec.endswith(".py"):
        path_text, name = spec, ""
    elif not colon or not name.isidentifier():
        named = f" nor one of {', '.join(built_in)}" if built_in else ""
        raise EnvironmentSpecError(f"{kind} {spec!r} is not FILE.py:NAME{named}")
    path = Path(path_text).expanduser()
    if not path.is_file():
        neighbours = sorted(entry.name for entry in path.parent.glob("*.py")) if path.parent.is_dir() else []
        raise EnvironmentSpecError(
            f"{kind} {spec!r}: there is no file {path.absolute()}{suggest(path.name, neighbours)}"
        )
    return path.resolve(), name


def is_environment(spec: str) -> bool:
    """Whether FILE.py:NAME names a class. The file is read and not run. Raises EnvironmentSpecError."""
    if spec.startswith(openenv.PREFIXES):
        return True
    if spec in BUILT_IN or spec.endswith(".py"):
        return False
    path, name = find_file(spec, "environment", BUILT_IN)
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return True  # the error that follows names the line
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return name not in functions


def read_tool(function: Callable[..., Any], kwargs: Mapping[str, object], name: str) -> Tool:
    """Raises EnvironmentSpecError if the function cannot be a tool, or does not take `kwargs`."""
    parameters = inspect.signature(function).parameters
    filled = [key for key, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY]
    for key in kwargs:
        if key not in filled:
            raise EnvironmentSpecError(f"the tool {name!r} has no keyword-only {key!r}" + suggest(key, filled))
    needs = tuple(key for key in filled if key not in kwargs and parameters[key].default is inspect.Parameter.empty)
    # A column fills no parameter that has a default: rows must not choose where `search` sends its requests.
    fills = tuple(key for key in filled if key not in kwargs and (key in needs or key in ("row", *PICTURES)))
    return Tool(name, function, function_schema(function, name), kwargs, fills, needs)


def _load_environment(spec: str, kwargs: Mapping[str, object]) -> Loaded:
    factory, file = _find_factory(spec)
    try:
        inspect.signature(factory).bind(**kwargs)
    except (TypeError, ValueError) as error:
        raise EnvironmentSpecError(f"environment {spec!r}: {error}; set it in environment_kwargs") from error
    kind = factory
    if not inspect.isclass(factory):  # a function that makes environments
        try:
            kind = type(factory(**kwargs))
        except Exception as error:
            raise EnvironmentSpecError(f"environment {spec!r} raised {type(error).__name__}: {error}") from error
    methods = {
        key: value
        for key, value in inspect.getmembers(kind, callable)
        if not key.startswith("_") and key not in _RESERVED and not inspect.isclass(value)
    }
    gym = callable(getattr(kind, "step", None))
    if gym and not callable(getattr(kind, "reset", None)):
        raise EnvironmentSpecError(f"environment {spec!r} has step and no reset(self, row)")
    if not gym and not methods:
        raise EnvironmentSpecError(
            f"environment {spec!r} has neither step(self, text) nor public methods to offer as tools"
        )
    tools = {} if gym else {key: _read_method(value, key) for key, value in methods.items()}
    reset = getattr(kind, "reset", None)
    wants = [*(inspect.signature(reset).parameters if reset else ()), *(k for t in tools.values() for k in t.fills)]
    return Loaded(
        "gym" if gym else "methods",
        tools,
        make=lambda: factory(**kwargs),
        rewards=gym or any(map(_may_reward, methods.values())),
        score=next((key for key in ("score", "get_reward") if callable(getattr(kind, key, None))), ""),
        closes=callable(getattr(kind, "close", None)),
        deterministic=bool(getattr(kind, "deterministic", False)),
        wants_pictures=any(key in PICTURES for key in wants),
        files=(file,) if file else (),
    )


def _find_factory(spec: str) -> tuple[Callable[..., Any], str]:
    """Return what makes environments, and the user's file."""
    if spec.startswith(openenv.PREFIXES):
        openenv.check_url(spec)
        return functools.partial(openenv.OpenEnv, spec), ""
    path, name = find_file(spec, "environment")
    module = import_file(path, "environment", "r1_environment")
    classes = [key for key, value in vars(module).items() if inspect.isclass(value)]
    if not name:
        raise EnvironmentSpecError(f"environment {spec!r}: name the class after a colon" + suggest("", classes))
    factory = getattr(module, name, None)
    if not callable(factory):
        raise EnvironmentSpecError(f"environment file {path} has no class {name!r}" + suggest(name, classes))
    return factory, str(path)


def _read_method(function: Callable[..., Any], name: str) -> Tool:
    """Read a function of a class as the tool that it is on an instance."""
    parameters = list(inspect.signature(function).parameters.values())
    own = not inspect.ismethod(function) and parameters[:1] and parameters[0].name == "self"
    if not own:
        return read_tool(function, {}, name)

    def bound(*args: object, **kwargs: object) -> None: ...

    bound.__signature__ = inspect.Signature(parameters[1:])  # type: ignore[attr-defined]
    bound.__doc__, bound.__wrapped__ = function.__doc__, function  # type: ignore[attr-defined]
    bound.__annotations__ = dict(function.__annotations__)
    return read_tool(bound, {}, name)


def _may_reward(function: Callable[..., Any]) -> bool:
    """Whether a call may give a reward, as an `Observation` has it: not if the return annotation rules that out."""
    annotation = inspect.signature(function).return_annotation
    names = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    return not {name.strip() for name in names.split("|")} <= _WITHOUT_REWARD


def call_tool(tool: Tool, function: Callable[..., Any], arguments: Mapping[str, Any], given: "Given") -> Any:
    filled = {name: given.value(name) for name in tool.fills if name in tool.needs or given.has(name)}
    return wait(function(**arguments, **tool.kwargs, **filled))


@dataclass(frozen=True, slots=True)
class Given:
    """What an episode's row offers to parameters by name."""

    row: Mapping[str, Any]
    pictures: Sequence[Any] = field(default=())  # PIL images

    def has(self, name: str) -> bool:
        return name in ("row", "images") or name in self.row or (name == "image" and bool(self.pictures))

    def value(self, name: str) -> Any:
        """Raises LookupError for what the row lacks."""
        if name == "row":
            return dict(self.row)
        if name == "images" and name not in self.row:
            return list(self.pictures)
        if name == "image" and name not in self.row:
            if not self.pictures:
                raise LookupError("the parameter 'image' asks for a picture, and the row has none")
            return self.pictures[0]
        if name not in self.row:
            raise LookupError(f"the parameter {name!r} asks for a column that the row lacks" + suggest(name, self.row))
        return self.row[name]


def call_reset(reset: Callable[..., Any], given: Given) -> Any:
    """Call reset(row), reset(**row), or reset with the columns that it names."""
    parameters = inspect.signature(reset).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    first = positional[0] if positional else None
    required = [p for p in positional if p.default is p.empty]
    if first is not None and (first.name == "row" or (required == [first] and not given.has(first.name))):
        rest = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
        filled = {p.name: given.value(p.name) for p in rest if p.default is p.empty or given.has(p.name)}
        return wait(reset(dict(given.row), **filled))
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    filled = {p.name: given.value(p.name) for p in named if p.default is p.empty or given.has(p.name)}
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        filled = {**given.row, **filled}
    return wait(reset(**filled))


_runner: asyncio.Runner | None = None  # of this process: clients that `reset` opens live in its loop


def wait(value: Any) -> Any:
    """Return the value, or the result of what can be awaited."""
    global _runner
    if not inspect.isawaitable(value):
        return value
    _runner = _runner or asyncio.Runner()
    return _runner.run(_await(value))


async def _await(value: Awaitable[Any]) -> Any:
    return await value
