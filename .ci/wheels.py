"""Build each package as a wheel, install it alone into a bare environment, and import all of it there.

What stands on vLLM's own classes cannot be imported without vLLM, nor Ray's actors without Ray; every other module has
to do without extras.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ["r1-core", "r1-rollout", "r1-rewards", "r1-data", "r1-cli"]
PINNED = ["torch==2.13.0", "torchvision==0.28.0", "transformers==5.19.*"]
IMPORT_ALL = """
import sys, {module}
from importlib import import_module
from importlib.metadata import version
from importlib.resources import files
from pkgutil import walk_packages
assert files({module}).joinpath("py.typed").is_file(), "type checkers are not told"
assert {module}.__version__ == version("{package}"), {module}.__version__
needing = {{"vllm": "r1_rollout.vllm.", "ray": "r1_cli.cluster.actors"}}
for found in walk_packages({module}.__path__, "{module}."):
    try:
        import_module(found.name)
    except ModuleNotFoundError as error:
        if not found.name.startswith(needing.get(error.name, "nothing")):
            raise
print("{package}: every module imports alone")
"""
OTHERS = "sorted(m for m in sys.modules if m.startswith('r1_') and m.split('.')[0] != {module!r})"


def run(*command: str) -> None:
    subprocess.run(command, check=True, cwd=ROOT)


def check(package: str, folder: Path) -> None:
    """Install one wheel and import it; a leaf must bring no other package of r1 with it."""
    module, environment = package.replace("-", "_"), folder / package
    python = str(environment / "bin" / "python")
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(PINNED))
    install = ["uv", "pip", "install", "--quiet", "--python", python, "--find-links", str(folder / "wheels")]
    run("uv", "venv", "--quiet", "--python", sys.executable, str(environment))
    run(*install, "-c", str(constraints), package)
    code = IMPORT_ALL.format(module=module, package=package)
    if package != "r1-cli":
        code += f"others = {OTHERS.format(module=module)}; assert not others, others"
    run(python, "-I", "-c", code)
    if package == "r1-cli":  # as the wheel has it, hook and all
        run(*install, "-c", str(constraints), "r1-cli[easyr1]")
        run(python, "-m", "verl.trainer.main", "--help")


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run("uv", "build", "--quiet", "--wheel", "--all-packages", "--out-dir", str(folder / "wheels"))
        for package in PACKAGES:
            check(package, folder)


if __name__ == "__main__":
    main()
