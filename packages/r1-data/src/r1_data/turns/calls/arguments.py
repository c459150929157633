"""Check the arguments of a call against the JSON schema of its tool. Errors name the parameter."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from r1_data.turns.calls.json_values import BrokenJson, read_text
from r1_data.types import JsonObject

_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list, "object": dict,
    "null": type(None),
}  # fmt: skip
_DEEPEST = 32  # levels of a schema, whose references may form a circle
_SPELLINGS = {"True": True, "False": False, "None": None, "TRUE": True, "FALSE": False}


class WrongArgument(ValueError):
    """An argument that the schema does not allow; the message names it and is for the policy."""


def check_arguments(schema: JsonObject, arguments: Mapping[str, object], *, as_text: bool) -> dict[str, object]:
    """Return the arguments of a call, as the schema's types.

    Checked are types, `enum`, `const`, `required`, unknown names, items, properties, `anyOf`, `oneOf`, `allOf` and
    `$ref` within the schema. A whole number written as 3.0 becomes the integer that the schema asks for.

    Args:
        schema: of the tool's parameters, an object.
        as_text: the values are text to be read as the schema's types.

    Raises:
        WrongArgument: for the first argument that does not fit.
    """
    properties = schema.get("properties", {})
    if as_text:
        arguments = {name: _read(value, properties.get(name), schema) for name, value in arguments.items()}
    return _check_object(arguments, schema, "", schema, _DEEPEST)


def _check(value: object, schema: object, name: str, root: JsonObject, depth: int) -> object:
    if not isinstance(schema, Mapping) or not schema or depth < 0:
        return value
    if "$ref" in schema:
        return _check(value, _resolve(schema["$ref"], root), name, root, depth - 1)
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return _check_any(value, choices, name, root, depth)
    for part in schema.get("allOf", ()):
        value = _check(value, part, name, root, depth - 1)
    value = _check_type(value, schema, name)
    if "enum" in schema and not any(_same(value, one) for one in schema["enum"]):
        listed = ", ".join(json.dumps(one, ensure_ascii=False) for one in schema["enum"])
        raise WrongArgument(f"{name} must be one of {listed}, found {brief(value)}")
    if "const" in schema and not _same(value, schema["const"]):
        raise WrongArgument(f"{name} must be {brief(schema['const'])}, found {brief(value)}")
    if isinstance(value, list) and "items" in schema:
        return [_check(item, schema["items"], f"{name}[{i}]", root, depth - 1) for i, item in enumerate(value)]
    if isinstance(value, dict) and ("properties" in schema or "additionalProperties" in schema):
        return _check_object(value, schema, name, root, depth)
    return value


def _check_object(
    value: Mapping[str, object], schema: Mapping[str, Any], name: str, root: JsonObject, depth: int
) -> dict[str, object]:
    properties, others = schema.get("properties", {}), schema.get("additionalProperties", False)
    where = f"{name}." if name else ""
    unknown = [key for key in value if key not in properties]
    if unknown and others is False:
        known = f"the parameters are {', '.join(properties)}" if properties else "there are no parameters"
        raise WrongArgument(f"unknown parameter {where}{brief(unknown[0])[1:-1]}; {known}")
    for key in schema.get("required", ()):
        if key not in value:
            raise WrongArgument(f"parameter {where}{key} is missing")
    return {
        key: _check(item, properties.get(key, others), f"{where}{key}", root, depth - 1) for key, item in value.items()
    }


def _check_any(value: object, choices: list[object], name: str, root: JsonObject, depth: int) -> object:
    errors = []
    for choice in choices:
        try:
            return _check(value, choice, name, root, depth - 1)
        except WrongArgument as error:
            errors.append(str(error))
    raise WrongArgument(" or ".join(dict.fromkeys(errors)))


def _check_type(value: object, schema: Mapping[str, object], name: str) -> object:
    allowed = _type_names(schema)
    if not allowed:
        return value
    if isinstance(value, float) and value.is_integer() and "integer" in allowed:
        return int(value)
    for one in allowed:
        if isinstance(value, _TYPES[one]) and (not isinstance(value, bool) or one == "boolean"):
            return value
    wanted = " or ".join(f"an {one}" if one[0] in "aio" else f"a {one}" if one != "null" else one for one in allowed)
    raise WrongArgument(f"{name} must be {wanted}, found {brief(value)}")


def _type_names(schema: Mapping[str, object]) -> list[str]:
    written = schema.get("type")
    listed = written if isinstance(written, list) else [written]
    return [one for one in listed if isinstance(one, str) and one in _TYPES]


def _read(text: object, schema: object, root: JsonObject) -> object:
    """Read an argument written as text: as it stands where the schema has a string first, else as JSON."""
    allowed = list(_types_of(schema, root, _DEEPEST))
    assert isinstance(text, str)
    if "null" in allowed and text.strip() in ("null", "None"):
        return None
    if not allowed or next((one for one in allowed if one != "null"), "") == "string":
        return text
    if text.strip() in _SPELLINGS:
        return _SPELLINGS[text.strip()]
    try:
        return read_text(text)
    except BrokenJson:
        return text


def _types_of(schema: object, root: JsonObject, depth: int) -> Iterator[str]:
    if not isinstance(schema, Mapping) or depth < 0:
        return
    if "$ref" in schema:
        yield from _types_of(_resolve(schema["$ref"], root), root, depth - 1)
    for keyword in ("anyOf", "oneOf", "allOf"):
        for choice in schema.get(keyword, ()):
            yield from _types_of(choice, root, depth - 1)
    yield from _type_names(schema)
    names = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
    yield from (names[type(one)] for one in schema.get("enum", ()) if type(one) in names and "type" not in schema)


def _resolve(reference: object, root: JsonObject) -> object:
    found: object = root
    for key in str(reference).removeprefix("#/").split("/"):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _same(value: object, other: object) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def brief(value: object) -> str:
    """Return a value as JSON of at most 60 characters."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 60 else f"{text[:40]}…{text[-19:]}"
