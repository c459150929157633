"""Find rows that two data sets share: equal or nearly equal texts, problems with other numbers, equal pictures."""

from r1_data.overlap.find import Overlap, find_overlaps
from r1_data.overlap.fingerprints import Fingerprint, Fingerprinter, fingerprint_rows, shown_text

__all__ = ["Fingerprint", "Fingerprinter", "Overlap", "find_overlaps", "fingerprint_rows", "shown_text"]
