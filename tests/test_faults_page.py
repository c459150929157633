"""Each row of the table in `docs/faults.md` is made by a test, and each test that makes a fault has its row."""

import faults_table
import pytest
from faults_table import note_fault, noted_in_tests, read_rows

LEAST = 25  # rows whose fault is one of real processes, files, signals or servers


def test_each_row_of_the_table_is_made_by_a_test_with_its_outcome() -> None:
    noted = noted_in_tests()
    rows = read_rows()
    assert not [fault for fault in rows if fault not in noted]
    assert not [f for f, row in rows.items() if not all(row[-1].startswith(one) for one in noted[f])]


def test_the_table_of_real_processes_files_and_servers_is_long_enough() -> None:
    text = faults_table.PAGE.read_text()
    real = text.partition("## Table of faults")[2].partition("## Faults that a test plants")[0]
    assert sum(f"| {fault} |" in real for fault in read_rows()) >= LEAST


def test_a_fault_without_a_row_or_with_another_outcome_fails_its_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("R1_FAULTS", raising=False)
    with pytest.raises(AssertionError, match="has no row 'a meteorite'"):
        note_fault("a meteorite")
    fault = next(iter(read_rows()))
    with pytest.raises(AssertionError, match="found 'ends'"):
        note_fault(fault, outcome="ends")
    note_fault(fault, {"seconds_to_restart": 12.3, "steps_again": 2})
    assert faults_table.TESTED[-1].endswith("(12 s to restart, 2 steps taken again)")
    faults_table.TESTED.clear()  # nothing was made
