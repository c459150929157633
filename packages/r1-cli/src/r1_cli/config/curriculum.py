"""Configuration section `data.curriculum`: which rows are drawn, by how often they are answered rightly."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from r1_cli.config.problems import KeyProblem, KeyRemark
from r1_cli.config.section import Positive, Ratio, Section
from r1_data.curriculum import Band

KEY = "data.curriculum"


class CurriculumConfig(Section):
    by: Literal["pass_rate", "online"] | None = None  # a column of the rows, or the run's answers; null: no curriculum
    band: Annotated[tuple[Ratio, Ratio], Field(strict=False)] = (0.1, 0.9)  # pass rates of the rows that are read
    order: Literal["easy_first"] | None = None  # the highest pass rates begin an epoch; null: as without a curriculum

    target: Ratio = 0.5  # online: rows whose pass rate seems nearest to this one are drawn
    prior: Annotated[tuple[Positive, Positive], Field(strict=False)] = (1.0, 1.0)  # right and wrong answers, in advance
    explore: Annotated[float, Field(ge=0, lt=1)] = 0.1  # share of a batch that is drawn whatever the answers were

    @property
    def read(self) -> Band | None:
        """The band of rows that are read; None: all rows are."""
        return Band(*self.band, easy_first=self.order == "easy_first") if self.by == "pass_rate" else None

    def problems(self) -> Iterator[KeyProblem]:
        if self.band[0] > self.band[1]:
            yield f"{KEY}.band", "must begin with the lower pass rate"


REMARKS = (
    *(
        KeyRemark(f"{KEY}.{name}", f"{KEY}.by is not pass_rate", lambda v, c: c.data.curriculum.by != "pass_rate")
        for name in ("band", "order")
    ),
    *(
        KeyRemark(f"{KEY}.{name}", f"{KEY}.by is not online", lambda v, c: c.data.curriculum.by != "online")
        for name in ("target", "prior", "explore")
    ),
    KeyRemark("data.shuffle", f"{KEY}.by=online draws the rows", lambda v, c: c.data.curriculum.by == "online"),
)
