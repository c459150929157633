"""The base of all sections, and types of fields."""

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

HOME = re.compile(r"(?:^|(?<=@))~(?=/|$)")
Tree = dict[str, Any]  # nested settings, or options that a user names
PRECISION_NAMES = {"float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}


class Section(BaseModel):
    """One section. Unknown keys and values of another type (`"5"` for 5, `true` for 1) are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=(), allow_inf_nan=False)


def lookup(section: BaseModel, key: str) -> Any:
    """Return the value of a dotted key, e.g. `worker.rollout.n` of a `RunConfig`."""
    value: Any = section
    for name in key.split("."):
        value = getattr(value, name)
    return value


def with_value(section: Any, key: str, value: Any) -> Any:
    """Return the section with another value of a dotted key, unchecked."""
    name, _, rest = key.partition(".")
    return section.model_copy(update={name: with_value(lookup(section, name), rest, value) if rest else value})


def flatten(tree: Mapping[str, Any], separator: str = ".", prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield joined key and value of each leaf; lists and empty mappings are leaves."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, separator, f"{prefix}{name}{separator}")
        else:
            yield f"{prefix}{name}", value


def _short_precision(value: object) -> object:
    return PRECISION_NAMES.get(value, value) if isinstance(value, str) else value


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def one_of(names: Sequence[str]) -> AfterValidator:
    """Return a validator of names found at import, which cannot be a `Literal`."""

    def known(name: str) -> str:
        if name not in names:
            near = get_close_matches(name.lower(), names, n=1, cutoff=0.5)
            raise ValueError(f"must be one of {', '.join(names)}" + (f"; did you mean {near[0]}?" if near else ""))
        return name

    return AfterValidator(known)


Precision = Annotated[Literal["fp32", "bf16", "fp16"], BeforeValidator(_short_precision)]
Count = Annotated[int, Field(ge=1)]
AtLeastMinusOne = Annotated[int, Field(ge=-1)]
Ratio = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
AUTO_SIZE = "auto"
SizeOrAuto = Count | Literal["auto"]  # `auto`: found by a profiling pass at start
# `~/` is the user's home folder, at the beginning and behind the `@` of `json@~/rows`.
UserPath = Annotated[str, AfterValidator(lambda value: HOME.sub(str(Path.home()), value))]
Files = UserPath | list[UserPath]
# A user's own function in place of a named choice.
FileFunction = Annotated[UserPath, Field(pattern=r"^.+\.py:[A-Za-z_]\w*$")]
OneOrMore = BeforeValidator(_as_list)
