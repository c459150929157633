"""What a run computes on the device, against the CPU: the checks of `r1 check --device`."""

from collections.abc import Iterator

from gpu_stages.bench import Bench, Row
from r1_cli.plan.check.device import list_checks, run_device_checks


def measure(bench: Bench) -> Iterator[Row]:
    for finding in run_device_checks(list_checks(runs=not bench.tiny)):
        yield {"result": "ok" if finding.level == "note" else "FAILED", "check": finding.message, "set": finding.fix}
