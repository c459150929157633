"""`python3 -m verl.trainer.main …` starts `r1 train …`, where no real verl is there: for scripts of EasyR1's users.

`r1_easyr1.pth` imports this whenever Python starts, so that nothing but `sys` is loaded here.
"""

import sys
from typing import Any

COMMAND = "verl.trainer.main"


class Finder:
    """Says where `verl` is. Stands last, so that it is only asked for what is nowhere else."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec of our `verl`. Raises ImportError where a real one has no `trainer.main`."""
        from importlib.util import spec_from_file_location
        from pathlib import Path

        if name == "verl":
            folder = Path(__file__).parent / "verl"
            return spec_from_file_location(name, folder / "__init__.py", submodule_search_locations=[str(folder)])
        if name == COMMAND:
            found = ", ".join(getattr(sys.modules.get("verl"), "__path__", []))
            raise ImportError(
                f"the verl in {found} is not EasyR1's and has no trainer.main, and r1-easyr1 never hides a real verl: "
                "type `r1 train` in place of `python3 -m verl.trainer.main`, or uninstall that verl"
            )
        return None


if any(word.endswith(COMMAND) for word in sys.orig_argv):
    sys.meta_path.append(Finder)
