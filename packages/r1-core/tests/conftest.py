"""Makes the test models importable by the tests and by the processes they start; gives properties time."""

import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))
# A busy machine is no reason for a property to fail.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")
