"""Makes what the tests share importable by them, with r1-core's test models and r1-rewards' servers, and by processes
that they start."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "r1-core/tests")]
sys.path.append(str(Path(__file__).parents[2] / "r1-rewards/tests"))
