"""Makes the test models importable by the tests and by the processes they start."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
