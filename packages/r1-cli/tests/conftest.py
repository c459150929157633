"""Makes what the tests share importable by them, with r1-core's test models, and by processes that they start."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "r1-core/tests")]
