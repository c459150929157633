"""Print what keeps the house small enough to live in, and fail where a limit is broken.

Measured in the sources of the packages: lines a file, lines a function, modules a folder, who imports whom; and in one
step of the quickstart: the files between a row and a gradient, the containers between a row and the loss.
"""

import ast
import json
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("r1_core", "r1_rollout", "r1_rewards", "r1_data", "r1_cli")
LONGEST_FILE = 400
LONGEST_FUNCTION = 50
MODULES_A_FOLDER = 25
FILES_TO_A_GRADIENT = 40
CONTAINERS_TO_THE_LOSS = 10

# Functions that may be longer than LONGEST_FUNCTION, each with its reason.
LONG_FUNCTIONS = {
    "r1_cli.train.sampling.generate.sample_groups": "overlaps sampling with scoring",
    "r1_rewards.services.serve.build_app": "holds its routes",
    "r1_rollout.vllm.servers.pool.__init__": "describes its arguments",
}

# What a reader opens who follows a row to a gradient of the quickstart, in order.
WALK = [
    "r1_cli.train.loop",
    "r1_cli.train.sampling.collect",
    "r1_cli.train.sampling.generate",
    "r1_data.stream",
    "r1_data.dataset",
    "r1_data.types",
    "r1_data.messages",
    "r1_data.pictures",
    "r1_data.render",
    "r1_data.vision",
    "r1_rollout.types",
    "r1_rollout.weights",
    "r1_rollout.sampling",
    "r1_rollout.embedded.engine",
    "r1_rollout.embedded.decoding",
    "r1_rollout.embedded.prefill",
    "r1_rollout.embedded.rows",
    "r1_rollout.embedded.choices",
    "r1_cli.train.groups.group",
    "r1_cli.build.verifiers",
    "r1_rewards.types",
    "r1_rewards.workers.pool",
    "r1_rewards.workers.batch",
    "r1_cli.train.groups.shaping",
    "r1_cli.train.groups.estimate",
    "r1_core.types",
    "r1_core.rows",
    "r1_core.advantages.assign",
    "r1_core.advantages.inputs",
    "r1_core.advantages.groups",
    "r1_core.advantages.grpo",
    "r1_core.learner.learner",
    "r1_core.learner.passes",
    "r1_core.learner.microbatch",
    "r1_core.learner.token_model",
    "r1_core.learner.linear_head",
    "r1_core.objective",
    "r1_core.losses.policy",
    "r1_core.losses.ppo",
    "r1_core.losses.aggregation",
]
# What a step enters beside the walk, by why the walk goes past it.
ASIDE = {
    "tells of the step": """
        r1_cli.build.truths r1_cli.train.metrics r1_cli.runs.track r1_cli.runs.record
        r1_cli.checkpoint.background r1_cli.hardware
        r1_core.learner.trainable
        r1_core.losses.correction
    """,
    "stops the run, proves the sync, judges the group": """
        r1_cli.train.roles r1_cli.checkpoint r1_cli.train.sampling.proof r1_rollout.canary
        r1_rollout.checksums r1_core.filtering r1_core.kl_control r1_cli.train.recorder
    """,
    "finds, keeps and prepares what the walk takes": """
        r1_data.workers r1_data.tables r1_data.formats r1_data.mixture r1_data.prompt_memory r1_data.references
        r1_data.reader r1_data.positions r1_data.sources r1_core.registry r1_rollout.handover r1_rollout.names
        r1_rollout.lora
    """,
    "speaks with the processes of rewards": """
        r1_rewards.workers.failures r1_rewards.workers.frames r1_rewards.workers.process
    """,
    "lays tensors out": """
        r1_rollout.embedded.kv r1_rollout.embedded.segments r1_rollout.embedded.stack r1_core.advantages.scan
        r1_core.learner.parallel r1_core.learner.sequence
        r1_core.learner.offload
        r1_core.learner.batching r1_core.learner.checkpoint r1_core.learner.optim r1_cli.models
        r1_core.learner.pack r1_core.prompts
    """,
}
# The containers that an item is in on its way from a row to the loss, in order.
ROW_TO_LOSS = [
    "r1_data.types.Example",
    "r1_data.types.Prompt",
    "r1_rollout.types.Completion",
    "r1_rewards.types.Score",
    "r1_cli.train.groups.group.Response",
    "r1_cli.train.groups.group.Group",
    "r1_core.types.Sample",
    "r1_core.learner.microbatch.MicroBatch",
    "r1_core.learner.token_model.TokenStats",
    "r1_core.types.LossInputs",
]
# What else a step makes, by what it holds instead.
NOT_ON_THE_WAY = {
    "settings and positions": """
        r1_cli.train.groups.supply.Supply r1_cli.train.roles.Position r1_cli.train.sampling.collect.Draws
        r1_core.objective.Objective
        r1_rollout.types.SamplingParams r1_core.learner.linear_head.Settings r1_rollout.embedded.choices.Choices
    """,
    "what one function hands to the next": """
        r1_data.vision.Pixels r1_cli.train.groups.group.SampledInput r1_core.advantages.inputs.AdvantageInputs
        r1_core.advantages.groups.GroupStatistics r1_core.learner.linear_head._Chunk r1_core.types.LossOutput
        r1_core.learner.pack.Pack r1_core.prompts.Work r1_core.learner.passes.Passes
        r1_rollout.embedded.segments.Readers r1_cli.models.shared_prompts.Alike r1_cli.models.shared_prompts.Plan
    """,
    "what is known of rows, names and the step": """
        r1_data.formats.Columns r1_data.formats.Detected r1_rollout.names.Place r1_core.types.Totals
        r1_core.learner.trainable.LearnerInfo r1_cli.models.attention._Seen r1_cli.runs.track.types.Generation
        r1_rollout.handover.LocalWeights r1_rollout.checksums.Expected r1_core.learner.pack.Pack
        r1_rollout.checksums.Comparison r1_cli.train.sampling.proof.Expectation
    """,
}

Graph = dict[str, set[str]]


@dataclass(frozen=True)
class Measure:
    """One figure: what it is, what was found, the most it may be, and what stands behind it."""

    name: str
    found: int
    limit: int
    what: tuple[str, ...] = ()

    def __str__(self) -> str:
        mark = "TOO MUCH" if self.found > self.limit else "ok"
        lines = [f"{self.name:<52} {self.found:>5} of {self.limit:<4} {mark}"]
        return "\n".join([*lines, *(f"    {one}" for one in self.what)])


def folder_of(package: str) -> Path:
    return ROOT / "packages" / package.replace("_", "-") / "src" / package


def modules(package: str) -> dict[str, Path]:
    """The files of a package by dotted name; a package's `__init__` has the package's own."""
    base = folder_of(package)
    named = {path.relative_to(base.parent).with_suffix("").parts: path for path in sorted(base.rglob("*.py"))}
    return {".".join(parts[:-1] if parts[-1] == "__init__" else parts): path for parts, path in named.items()}


def imports(modules: dict[str, Path]) -> Graph:
    """Which of these modules each names in an import statement, wherever it stands: in functions, for types only."""
    graph: Graph = {}
    for module, path in modules.items():
        here = module if path.name == "__init__.py" else module.rpartition(".")[0]
        named: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                above = here.split(".")[: here.count(".") + 2 - node.level] if node.level else []
                base = ".".join([*above, *([node.module] if node.module else [])])
                named |= {full if (full := f"{base}.{alias.name}") in modules else base for alias in node.names}
        graph[module] = {name for name in named if name in modules and name != module}
    return graph


def rooms(graph: Graph, folder: str) -> Graph:
    """The same arrows between what stands in one folder: its modules, and its folders each taken as a whole."""

    depth = folder.count(".") + 2

    def room(module: str) -> str | None:
        inside = module == folder or module.startswith(folder + ".")
        return ".".join(module.split(".")[:depth]) if inside else None

    arrows: Graph = defaultdict(set)
    for module, others in graph.items():
        if here := room(module):
            arrows[here] |= {there for other in others if (there := room(other)) and there != here}
    return dict(arrows)


def circles(graph: Graph) -> list[list[str]]:
    """Each way round that leads back to its start, once, as the rooms on it: `[a, b, a]`."""
    found, seen = [], set()
    for start in sorted(graph):
        came = {start: ""}
        waiting = [start]
        while waiting and start not in seen:
            here = waiting.pop(0)
            for there in sorted(graph.get(here, ())):
                if there == start:
                    way = [here]
                    while way[0] != start:
                        way.insert(0, came[way[0]])
                    found.append([*way, start])
                    seen |= set(way)
                    waiting.clear()
                    break
                if there not in came and there not in seen:
                    came[there] = here
                    waiting.append(there)
    return found


def floors(graph: Graph) -> list[list[str]]:
    """The rooms by how many floors they stand above those that import nothing. Without circles only."""
    height: dict[str, int] = {}

    def climb(room: str) -> int:
        if room not in height:
            height[room] = 1 + max((climb(below) for below in graph.get(room, ())), default=-1)
        return height[room]

    drawn: list[list[str]] = [[] for _ in range(1 + max(map(climb, graph), default=-1))]
    for room, floor in sorted(height.items()):
        drawn[floor].append(room)
    return drawn


def folders(modules: dict[str, Path]) -> list[str]:
    """The dotted names of a package and of the folders in it."""
    return [name for name, path in modules.items() if path.name == "__init__.py"]


def all_circles() -> list[str]:
    """Circles between modules, and between what stands in any folder of any package."""
    found = []
    for package in PACKAGES:
        files = modules(package)
        graph = imports(files)
        drawn = [graph, *(rooms(graph, folder) for folder in folders(files))]
        found += [" → ".join(way) for level in drawn for way in circles(level)]
    return sorted(set(found))


def arrows_out() -> list[str]:
    """Imports of one package by another: only the application may, and it of any."""
    found = []
    for package in PACKAGES[:-1]:
        every = {name: path for one in PACKAGES for name, path in modules(one).items()}
        own = modules(package)
        graph = imports(every)
        found += [f"{module} → {other}" for module in own for other in graph[module] if other not in own]
    return found


def long_functions() -> list[tuple[int, str]]:
    """Functions of more than LONGEST_FUNCTION lines, nested ones counted with what they stand in."""
    found = []
    for package in PACKAGES:
        for module, path in modules(package).items():
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    length = (node.end_lineno or node.lineno) - node.lineno + 1
                    if length > LONGEST_FUNCTION:
                        found.append((length, f"{module}.{node.name}"))
    return sorted(found, reverse=True)


def folder_sizes() -> list[tuple[int, str]]:
    """Modules in each folder, its `__init__` not counted, the fullest first."""
    counts: dict[str, int] = defaultdict(int)
    for package in PACKAGES:
        for module, path in modules(package).items():
            if path.name != "__init__.py":
                counts[module.rpartition(".")[0]] += 1
    return sorted(((count, name) for name, count in counts.items()), reverse=True)


def file_lengths() -> list[tuple[int, str]]:
    """Lines of each file, the longest first."""
    every = [path for package in PACKAGES for path in modules(package).values()]
    return sorted(((len(path.read_text().splitlines()), str(path.relative_to(ROOT))) for path in every), reverse=True)


def one_step() -> tuple[set[str], set[str]]:
    """The modules that a step of the quickstart enters, and the containers that it makes."""
    command = [sys.executable, str(ROOT / ".ci" / "one_step.py")]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if process.returncode:
        sys.exit(process.stderr)
    found = json.loads(process.stdout.splitlines()[-1])
    return set(found["entered"]), set(found["made"])


def walk_faults(entered: set[str]) -> list[str]:
    """Modules that a step enters and no list above has, and those of the walk that are not there."""
    there = {name for package in PACKAGES for name in modules(package)}
    known = (*WALK, *" ".join(ASIDE.values()).split())
    strangers = {name for name in entered if not any(name == one or name.startswith(one + ".") for one in known)}
    return [f"neither on the walk nor aside: {name}" for name in sorted(strangers)] + [
        f"listed, but not there: {name}" for name in known if name not in there
    ]


def container_faults(made: set[str]) -> list[str]:
    """Containers that a step makes and no list above has, and those listed that are not there."""
    files = {name: path for package in PACKAGES for name, path in modules(package).items()}
    known = [*ROW_TO_LOSS, *" ".join(NOT_ON_THE_WAY.values()).split()]
    gone = [name for name in known if not _has_class(files.get(name.rpartition(".")[0]), name.rpartition(".")[2])]
    return [f"not listed: {name}" for name in sorted(made - set(known))] + [
        f"listed, but gone: {name}" for name in gone
    ]


def _has_class(path: Path | None, name: str) -> bool:
    return path is not None and name in {getattr(node, "name", "") for node in ast.parse(path.read_text()).body}


def tell(found: list[tuple[int, str]], most: int) -> tuple[str, ...]:
    return tuple(f"{count:>5}  {name}" for count, name in found[:most])


def measures() -> list[Measure]:
    """Every figure that has a limit."""
    files, sizes = file_lengths(), folder_sizes()
    long = [(count, name) for count, name in long_functions() if name not in LONG_FUNCTIONS]
    loops, out, (entered, made) = all_circles(), arrows_out(), one_step()
    strange, unknown = walk_faults(entered), container_faults(made)
    return [
        Measure("lines of the longest file", files[0][0], LONGEST_FILE, tell(files, 3)),
        Measure("modules of the fullest folder", sizes[0][0], MODULES_A_FOLDER, tell(sizes, 3)),
        Measure(f"functions of more than {LONGEST_FUNCTION} lines", len(long), 0, tell(long, 9)),
        Measure("circles, between modules or rooms", len(loops), 0, tuple(loops)),
        Measure("arrows out of a leaf package", len(out), 0, tuple(out)),
        Measure("files on the walk from a row to a gradient", len(WALK), FILES_TO_A_GRADIENT),
        Measure(f"modules a step enters, {len(entered)}, that no list has", len(strange), 0, tuple(strange)),
        Measure("containers from a row to the loss", len(ROW_TO_LOSS), CONTAINERS_TO_THE_LOSS),
        Measure(f"containers a step makes, {len(made)}, that no list has", len(unknown), 0, tuple(unknown)),
    ]


def drawing(package: str) -> str:
    """The floors of a package from the top down, one a line."""
    graph = rooms(imports(modules(package)), package)
    arrows = sum(map(len, graph.values()))
    drawn = [
        f"  {floor}  {' '.join(room.removeprefix(package + '.') for room in there)}"
        for floor, there in enumerate(floors(graph))
    ]
    return "\n".join([f"{package}: {len(graph)} rooms, {arrows} arrows, none up", *reversed(drawn)])


def main() -> int:
    found = measures()
    if not all_circles():
        print(*map(drawing, PACKAGES), sep="\n\n", end="\n\n")
    print(*found, sep="\n")
    return any(one.found > one.limit for one in found)


if __name__ == "__main__":
    sys.exit(main())
