"""Makes what the tests share importable by them and by their processes: r1-core's models, servers of two more."""

import sys
from pathlib import Path

PACKAGES = Path(__file__).parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(PACKAGES / "r1-core/tests"), str(PACKAGES / "r1-rollout/tests")]
sys.path.append(str(PACKAGES / "r1-rewards/tests"))
