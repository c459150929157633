"""Every number that a reference trainer gives, ours gives too, or says why not.

`pytest tests/golden --golden-dir DIR` replays any folder of the same format; `-rs` lists what was skipped and why.
"""

import pytest
from golden import replay


def explain(explanations, case):
    """Return the reason why ours differs in this case, or None."""
    for table in explanations:
        find = table.get(f"{case['fn']}@{case['variant']}", table.get(case["fn"]))
        reason = find(case) if find else None
        if reason:
            return reason
    return None


def test_ours_equals_the_reference(golden_case, adapters):
    table, explanations = adapters
    adapter = replay.find_adapter(table, golden_case)
    if adapter is None:
        pytest.skip(f"no adapter for {golden_case['fn']}@{golden_case['variant']}")
    if not replay.is_target(golden_case):
        pytest.skip(f"the reference is no target: {golden_case.get('note', 'it raises or is not finite')}")
    faults = replay.differences(golden_case, adapter)
    reason = explain(explanations, golden_case) if faults else None
    if reason:
        pytest.skip(f"explained: {reason}")
    assert not faults, "; ".join(faults)
