"""Configuration section `data.curriculum`: which rows are drawn, by how often they are answered rightly."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from r1_cli.config.problems import KeyProblem, KeyRemark
from r1_cli.config.section import Ratio, Section
from r1_data.curriculum import Band

KEY = "data.curriculum"


class CurriculumConfig(Section):
    by: Literal["pass_rate"] | None = None  # a column of the rows; null: no curriculum
    band: Annotated[tuple[Ratio, Ratio], Field(strict=False)] = (0.1, 0.9)  # pass rates of the rows that are read
    order: Literal["easy_first"] | None = None  # the highest pass rates begin an epoch; null: as without a curriculum

    @property
    def read(self) -> Band | None:
        """The band of rows that are read; None: all rows are."""
        return Band(*self.band, easy_first=self.order == "easy_first") if self.by == "pass_rate" else None

    def problems(self) -> Iterator[KeyProblem]:
        if self.band[0] > self.band[1]:
            yield f"{KEY}.band", "must begin with the lower pass rate"


REMARKS = tuple(
    KeyRemark(f"{KEY}.{name}", f"{KEY}.by is not pass_rate", lambda v, c: c.data.curriculum.by != "pass_rate")
    for name in ("band", "order")
)
