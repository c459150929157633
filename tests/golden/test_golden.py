"""Every number that a reference trainer gives, ours gives too; or what the paper's formula gives, and says why.

`pytest tests/golden --golden-dir DIR` replays any folder of the same format; `-rs` lists the cases without an adapter,
which alone are skipped. A case whose reference is no target (it raises, is not finite, or is noise) must at least run
and give finite numbers.
"""

import pytest
from golden import replay


def explain(explanations, case):
    """Return the explanation of why ours differs in this case, or None."""
    for table in explanations:
        find = table.get(f"{case['fn']}@{case['variant']}", table.get(case["fn"]))
        found = find(case) if find else None
        if found:
            return found
    return None


def test_ours_equals_the_reference_or_the_formula_that_it_misses(golden_case, adapters):
    table, explanations = adapters
    adapter = replay.find_adapter(table, golden_case)
    if adapter is None:
        pytest.skip(f"no adapter for {golden_case['fn']}@{golden_case['variant']}")
    target = replay.is_target(golden_case)
    faults = replay.target_faults(golden_case, adapter) if target else ["the reference is no target"]
    if not faults:
        return
    explanation = explain(explanations, golden_case)
    if explanation:
        wrong = replay.explained_faults(golden_case, adapter, explanation)
        assert not wrong, f"although {explanation.reason}: {'; '.join(wrong)}"
    elif target:
        pytest.fail("; ".join(faults))
    else:
        assert not replay.strange_numbers(golden_case, adapter)
