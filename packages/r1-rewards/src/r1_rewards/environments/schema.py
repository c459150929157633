"""The OpenAI schema of a function, from its type hints and docstring, and arguments checked against it."""

import enum
import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

from r1_rewards.environments.types import EnvironmentSpecError, JsonObject
from r1_rewards.types import suggest

_BASIC: dict[object, str] = {
    str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null",
    list: "array", tuple: "array", set: "array", dict: "object",
}  # fmt: skip
_WORDS = {"string": "text", "integer": "an integer", "number": "a number", "boolean": "true or false",
          "null": "null", "array": "a list", "object": "an object"}  # fmt: skip
_ARGUMENTS = ("args", "arguments", "parameters", "params", "other parameters")
_SECTIONS = (*_ARGUMENTS, "returns", "return", "yields", "raises", "example", "examples", "note", "notes", "see also",
             "warnings", "references", "attributes")  # fmt: skip
# "x (float): …", "x, y: …", "x : float"; stars of *args too
_NAMES = r"(\*{0,2}\w+(?:\s*,\s*\*{0,2}\w+)*)"
_GOOGLE = re.compile(rf"{_NAMES}\s*(?:\([^)]*\))?\s*:\s+?(.*)|{_NAMES}\s*(?:\([^)]*\))?\s*:()$")
_NUMPY = re.compile(rf"{_NAMES}(?:\s*:.*)?$")
_SPHINX = re.compile(r":param\s+(?:[^:]*\s)?(\w+)\s*:\s*(.*)")


def function_schema(function: Callable[..., object], name: str | None = None) -> JsonObject:
    """Return {"type": "function", "function": {name, description, parameters}} of a function or bound method.

    Keyword-only parameters are left out: r1 fills them in. Google, NumPy and Sphinx docstrings are read. A parameter
    without a type hint accepts anything. Raises EnvironmentSpecError for hints that JSON has no type for, and for
    positional-only or starred parameters.
    """
    name = name or str(getattr(function, "__name__", type(function).__name__))
    parameters = inspect.signature(function).parameters.values()
    hints = _type_hints(function, name)
    description, descriptions = read_docstring(inspect.getdoc(function) or "")
    properties: dict[str, JsonObject] = {}
    required = []
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY:
            continue
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            raise EnvironmentSpecError(
                f"the tool {name!r} has a parameter {parameter}; a call has named arguments only"
            )
        schema = _schema_of(hints.get(parameter.name, Any), f"the tool {name!r}: parameter {parameter.name!r}")
        if text := descriptions.get(parameter.name):
            schema["description"] = text
        properties[parameter.name] = schema
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    shown: JsonObject = {"type": "object", "properties": properties}
    if required:
        shown["required"] = required
    return {"type": "function", "function": {"name": name, "description": description, "parameters": shown}}


def check_arguments(arguments: object, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments for a function with this schema; whole floats become integers where it wants those.

    Raises ValueError with a text for the policy, which names the parameter.
    """
    if not isinstance(arguments, Mapping):
        raise ValueError(f"the arguments must be an object, not {_shown(arguments)}")
    known = parameters["properties"]
    for name in arguments:
        if name not in known:
            raise ValueError(f"there is no parameter {_shown(name)}" + suggest(str(name)[:80], known))
    for name in parameters.get("required", ()):
        if name not in arguments:
            raise ValueError(f"the parameter {name!r} is missing")
    return {name: _convert(value, known[name], name) for name, value in arguments.items()}


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the description, and each parameter's."""
    sections = dict[str, list[str]]()
    current = sections.setdefault("", [])
    lines = text.splitlines()
    skip = False
    for line, following in zip(lines, [*lines[1:], ""], strict=False):
        title = line.strip().rstrip(":").lower()
        underlined = re.fullmatch(r"-{3,}", following.strip()) is not None
        if skip:
            skip = False
        elif title in _SECTIONS and (line.strip().endswith(":") or underlined):
            current = sections.setdefault("args" if title in _ARGUMENTS else title, [])
            skip = underlined
            if underlined:
                current.append("numpy")
        elif match := _SPHINX.match(line.strip()):
            sections.setdefault("sphinx", []).append(line.strip())
        elif not re.match(r":(returns?|rtype|raises?|type)\b", line.strip()):
            current.append(line)
    arguments = sections.get("args", [])
    entries = _numpy_entries(arguments[1:]) if arguments[:1] == ["numpy"] else _google_entries(arguments)
    found = {name: text for names, text in entries for name in re.findall(r"\w+", names)}
    for line in sections.get("sphinx", []):
        if match := _SPHINX.match(line):
            found[match[1]] = match[2].strip()
    return "\n".join(sections[""]).strip(), found


def _google_entries(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    indents = [len(line) - len(line.lstrip()) for line in lines if line.strip()]
    indent = min(indents, default=0)
    names, words = "", list[str]()
    for line in lines:
        match = _GOOGLE.fullmatch(line.strip()) if len(line) - len(line.lstrip()) == indent else None
        if match:
            yield names, " ".join(words)
            names, words = match[1] or match[3], [match[2]] if match[2] else []
        elif line.strip():
            words.append(line.strip())
    yield names, " ".join(words)


def _numpy_entries(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    names, words = "", list[str]()
    for line in lines:
        if line and not line[0].isspace() and (match := _NUMPY.fullmatch(line.strip())):
            yield names, " ".join(words)
            names, words = match[1], []
        elif line.strip():
            words.append(line.strip())
    yield names, " ".join(words)


def _type_hints(function: Callable[..., object], name: str) -> dict[str, Any]:
    target = function if inspect.isroutine(function) else type(function).__call__
    try:
        return typing.get_type_hints(target)
    except Exception:  # a hint of what is imported for type checkers only, perhaps of a parameter that is not shown
        hints: dict[str, Any] = {}
        surroundings = getattr(inspect.unwrap(target), "__globals__", {})
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind is parameter.KEYWORD_ONLY or parameter.annotation is parameter.empty:
                continue
            one = types.SimpleNamespace(__annotations__={parameter.name: parameter.annotation})
            try:
                hints |= typing.get_type_hints(one, surroundings)
            except Exception as error:
                where = f"the tool {name!r}: the type hint of parameter {parameter.name!r} cannot be read"
                raise EnvironmentSpecError(f"{where} ({type(error).__name__}: {error})") from error
        return hints


def _schema_of(hint: Any, where: str) -> JsonObject:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any or hint is inspect.Parameter.empty or hint is object:
        return {}
    if origin is typing.Annotated:
        return _schema_of(arguments[0], where)
    if origin is Literal or (inspect.isclass(hint) and issubclass(hint, enum.Enum)):
        values = list(arguments) if origin is Literal else [member.value for member in hint]
        kinds = list(dict.fromkeys(_BASIC.get(type(value), "") for value in values))
        if "" in kinds:
            raise EnvironmentSpecError(f"{where}: {hint} has values that JSON does not")
        return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": values}
    if origin is Union or origin is types.UnionType:
        return _schema_of_union(arguments, where)
    if typing.is_typeddict(hint):
        fields = {name: _schema_of(one, f"{where}.{name}") for name, one in typing.get_type_hints(hint).items()}
        return {"type": "object", "properties": fields, "required": sorted(hint.__required_keys__)}
    base = origin or hint
    if base in (list, set, frozenset, Sequence) or base is tuple:
        items = arguments[0] if arguments and (base is not tuple or arguments[1:] == (...,)) else None
        if base is tuple and arguments and items is None:
            return {"type": "array", "prefixItems": [_schema_of(one, where) for one in arguments]}
        return {"type": "array"} if items is None else {"type": "array", "items": _schema_of(items, where)}
    if base in (dict, Mapping) or (inspect.isclass(base) and issubclass(base, Mapping)):
        return {"type": "object"} | (
            {"additionalProperties": _schema_of(arguments[1], where)} if len(arguments) == 2 else {}
        )
    if base in _BASIC:
        return {"type": _BASIC[base]}
    raise EnvironmentSpecError(
        f"{where} has the type {hint}, which JSON has no type for; write str, int, float, bool, list, dict or Literal, "
        "or make it keyword-only if r1 is to fill it in"
    )


def _schema_of_union(arguments: Sequence[Any], where: str) -> JsonObject:
    schemas = [_schema_of(one, where) for one in arguments if one is not type(None)]
    if len(schemas) == 1:
        found = schemas[0]
    elif all(schema.keys() == {"type"} and isinstance(schema["type"], str) for schema in schemas):
        found = {"type": sorted({schema["type"] for schema in schemas})}
    else:
        found = {"anyOf": schemas}
    return {**found, "nullable": True} if len(schemas) < len(arguments) else found


def _convert(value: Any, schema: Mapping[str, Any], name: str) -> Any:
    if value is None and schema.get("nullable"):
        return value
    if "anyOf" in schema:
        for one in schema["anyOf"]:
            try:
                return _convert(value, one, name)
            except ValueError:
                continue
        raise ValueError(f"{name!r} has no type that is allowed: {_shown(value)}")
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds:
        value = _of_kind(value, kinds, name)
    if "enum" in schema and value not in schema["enum"]:
        allowed = ", ".join(map(repr, schema["enum"]))
        raise ValueError(f"{name!r} must be one of {allowed}, not {_shown(value)}")
    if isinstance(value, list):
        items = schema.get("prefixItems") or [schema.get("items", {})] * len(value)
        if len(items) != len(value):
            raise ValueError(f"{name!r} must have {len(items)} items, not {len(value)}")
        return [_convert(item, one, f"{name}[{i}]") for i, (item, one) in enumerate(zip(value, items, strict=True))]
    if isinstance(value, dict):
        others = schema.get("additionalProperties", {})
        fields = schema.get("properties", {})
        for key in schema.get("required", ()):
            if key not in value:
                raise ValueError(f"{name!r} lacks {key!r}")
        return {key: _convert(item, fields.get(key, others), f"{name}.{key}") for key, item in value.items()}
    return value


def _of_kind(value: Any, kinds: Sequence[str], name: str) -> Any:
    if isinstance(value, float) and "number" not in kinds and "integer" in kinds and value.is_integer():
        return int(value)
    found = _BASIC.get(type(value), "")
    if found == "integer" and "integer" not in kinds and "number" in kinds:
        try:
            return float(value)
        except OverflowError:
            found = ""
    if found not in kinds or (isinstance(value, float) and not math.isfinite(value)):
        allowed = " or ".join(_WORDS[kind] for kind in kinds)
        raise ValueError(f"{name!r} must be {allowed}, not {_shown(value)}")
    return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:79] + "…"
