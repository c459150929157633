"""What every section of the configuration shares: closed, frozen and strict about types."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

PRECISION_NAMES = {"float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}


class Section(BaseModel):
    """One section. Unknown keys, and values of another type (`"5"` for 5, `true` for 1), are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=(), allow_inf_nan=False)


def _short_precision(value: Any) -> Any:
    return PRECISION_NAMES.get(value, value) if isinstance(value, str) else value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Precision = Annotated[Literal["fp32", "bf16", "fp16"], BeforeValidator(_short_precision)]
Count = Annotated[int, Field(ge=1)]
AtLeastMinusOne = Annotated[int, Field(ge=-1)]
Ratio = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Files = str | list[str]
# A user's own function in place of a named choice.
FileFunction = Annotated[str, Field(pattern=r"^.+\.py:[A-Za-z_]\w*$")]
OneOrMore = BeforeValidator(_as_list)
