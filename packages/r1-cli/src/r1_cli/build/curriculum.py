"""Build the curriculum of a run: read the pass rates of its rows."""

from collections.abc import Sequence

from r1_cli.build.rows import OpenSource
from r1_cli.config import RunConfig
from r1_data.curriculum import PassRates, read_pass_rates
from r1_data.dataset import Mixture
from r1_data.types import DataError


def read_rates(config: RunConfig, opened: Sequence[OpenSource], rows: Mixture) -> PassRates | None:
    """Return the pass rates of the kept rows; None unless the configuration has a band of them.

    Raises DataError naming source and row, if one has no pass rate or a source has no row in the band.
    """
    band = config.data.curriculum.read
    if band is None:
        return None
    found = list[list[float]]()
    for one, part in zip(opened, rows.parts, strict=True):
        try:
            found.append(read_pass_rates((one.rows[part.job(index).row] for index in range(len(part))), band))
        except DataError as error:
            raise DataError(f"{one.source.label}: data.curriculum: {error}") from error
    return PassRates(found, band)
