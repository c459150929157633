"""Makes what the tests share importable by them and by their processes: r1-core's models, r1-rollout's servers."""

import sys
from pathlib import Path

PACKAGES = Path(__file__).parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(PACKAGES / "r1-core/tests"), str(PACKAGES / "r1-rollout/tests")]
