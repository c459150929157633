"""Print the measures of the packages' sources and of one training step, and fail if one is over its limit.

    uv run python .ci/measure.py           # the table, and what stands behind each measure that has details
    uv run python .ci/measure.py --all     # and the packages of every distribution by import level

Nothing is exempt by name. The limits leave about a tenth of room above what was measured when they were set, so that a
change is designed rather than squeezed in. A limit is raised or lowered in a commit that says why.
"""

import ast
import io
import json
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("r1_core", "r1_rollout", "r1_rewards", "r1_data", "r1_cli")
LEAVES = PACKAGES[:-1]
SHORT_FILE = 30  # lines of code, without blank lines, comments and docstrings
LONG_FUNCTION = 50  # lines; longer functions are printed
NAMELESS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "<lambda>")  # how Python ends their names
LEARNER_METHOD = "set_micro_batch_limits"  # of the policy and of the critic; how many places a method takes
TOKEN_FIELD = "full_kl"  # a number per token that goes from the policy to the loss; how many places a field takes
TRANSPORT = "Transport"  # the protocol of r1_rollout.transports for what carries weights to an engine
# Measured on 2026-11-24, with about a tenth of room (docstrings: a twentieth). What has to stay at its figure
# has the figure.
LIMITS: dict[str, float] = {
    "% of files under 30 lines of code, without __init__.py": 11,
    "lines of the longest file": 430,
    "modules of the fullest folder": 29,
    "lines of the longest function": 60,
    "import cycles, between modules or packages": 0,
    "imports of another package by a leaf": 0,
    "packages of r1_cli": 12,
    "import levels of r1_cli": 10,
    "modules that a training step enters": 97,
    "functions that a training step enters": 840,
    "protocols": 44,
    "class names used twice": 3,
    "`Any` per 1,000 lines": 10,
    "`getattr` and `hasattr` per 1,000 lines": 1.7,
    "words in docstrings per 1,000 lines": 1_050,
    "classes that implement Transport": 5,
    "classes that define a learner method (set_micro_batch_limits)": 2,
    "declarations of a per-token field (full_kl)": 6,
}

Graph = dict[str, set[str]]


@dataclass(frozen=True)
class Measure:
    """A figure, with the lines that explain it."""

    name: str
    found: float
    details: tuple[str, ...] = ()

    @property
    def limit(self) -> float | None:
        return LIMITS.get(self.name)

    @property
    def too_much(self) -> bool:
        return self.limit is not None and self.found > self.limit

    def __str__(self) -> str:
        found = f"{self.found:,.1f}" if isinstance(self.found, float) else f"{self.found:,}"
        limit = "" if self.limit is None else f"at most {self.limit:<7,} {'TOO MUCH' if self.too_much else 'ok'}"
        return "\n".join([f"{self.name:<58} {found:>7}  {limit}".rstrip(), *(f"    {line}" for line in self.details)])


@cache
def modules(package: str) -> dict[str, Path]:
    """The files of a package by dotted name; `__init__.py` has the name of its folder."""
    source = ROOT / "packages" / package.replace("_", "-") / "src"
    named = {path.relative_to(source).with_suffix("").parts: path for path in sorted((source / package).rglob("*.py"))}
    return {".".join(parts[:-1] if parts[-1] == "__init__" else parts): path for parts, path in named.items()}


def all_modules() -> dict[str, Path]:
    return {name: path for package in PACKAGES for name, path in modules(package).items()}


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


# Imports


def module_imports(modules: dict[str, Path]) -> Graph:
    """Which of these modules each imports, anywhere: at the top, in functions, for types only, by `import_module`.

    `import_module` counts if its argument is a literal. A name that is put together while the program runs, such as a
    verifier's, cannot be read here.
    """
    graph: Graph = {}
    for module, path in modules.items():
        folder = module if path.name == "__init__.py" else module.rpartition(".")[0]
        named: set[str] = set()
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                parent = folder.split(".")[: folder.count(".") + 2 - node.level] if node.level else []
                base = ".".join([*parent, *([node.module] if node.module else [])])
                named |= {full if (full := f"{base}.{alias.name}") in modules else base for alias in node.names}
            elif isinstance(node, ast.Call) and (name := _imported_by(node)):
                dots = len(name) - len(name.lstrip("."))
                parent = folder.split(".")[: folder.count(".") + 2 - dots] if dots else []
                named.add(".".join([*parent, name[dots:]]))
        graph[module] = {name for name in named if name in modules and name != module}
    return graph


def _imported_by(call: ast.Call) -> str:
    """Return the literal that `import_module` is called with, or an empty text."""
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    literal = call.args[0].value if call.args and isinstance(call.args[0], ast.Constant) else ""
    return literal if name in ("import_module", "__import__") and isinstance(literal, str) else ""


def package_imports(graph: Graph, folder: str) -> Graph:
    """The same imports between the children of one folder: its modules, and its subfolders each taken as a whole."""
    depth = folder.count(".") + 2

    def child(module: str) -> str | None:
        inside = module == folder or module.startswith(folder + ".")
        return ".".join(module.split(".")[:depth]) if inside else None

    imports: Graph = defaultdict(set)
    for module, others in graph.items():
        if importer := child(module):
            imports[importer] |= {name for other in others if (name := child(other)) and name != importer}
    return dict(imports)


def cycles(graph: Graph) -> list[list[str]]:
    """Import cycles, each once, as a path that ends where it starts: `[a, b, a]`."""
    found, seen = [], set()
    for start in sorted(graph):
        parent = {start: ""}
        queue = [start]
        while queue and start not in seen:
            module = queue.pop(0)
            for other in sorted(graph.get(module, ())):
                if other == start:
                    path = [module]
                    while path[0] != start:
                        path.insert(0, parent[path[0]])
                    found.append([*path, start])
                    seen |= set(path)
                    queue.clear()
                    break
                if other not in parent and other not in seen:
                    parent[other] = module
                    queue.append(other)
    return found


def levels(graph: Graph) -> list[list[str]]:
    """Modules by import level: those on level 0 import no other, each other one stands above all that it imports.

    The graph must have no cycles.
    """
    level: dict[str, int] = {}

    def find(module: str) -> int:
        if module not in level:
            level[module] = 1 + max((find(other) for other in graph.get(module, ())), default=-1)
        return level[module]

    found: list[list[str]] = [[] for _ in range(1 + max(map(find, graph), default=-1))]
    for module, number in sorted(level.items()):
        found[number].append(module)
    return found


def all_cycles() -> list[str]:
    """Import cycles between modules, and between the children of any folder of any package."""
    found = []
    for package in PACKAGES:
        files = modules(package)
        graph = module_imports(files)
        folders = [name for name, path in files.items() if path.name == "__init__.py"]
        graphs = [graph, *(package_imports(graph, folder) for folder in folders)]
        found += [" → ".join(path) for each in graphs for path in cycles(each)]
    return sorted(set(found))


def leaf_imports() -> list[str]:
    """Imports of another package of r1 by a leaf package: only r1_cli may import others."""
    graph = module_imports(all_modules())
    return [
        f"{module} → {other}"
        for leaf in LEAVES
        for module in modules(leaf)
        for other in sorted(graph[module])
        if other not in modules(leaf)
    ]


# Sizes


def lines_of_code(path: Path) -> int:
    """Lines with code: no blank lines, comments or docstrings."""
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type not in layout:
            lines |= {*range(token.start[0], token.end[0] + 1)}
    for node in documented(parse(path)):
        if ast.get_docstring(node, clean=False) is not None:
            lines -= {*range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)}
    return len(lines)


def documented(tree: ast.Module) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def file_lengths() -> list[tuple[int, str]]:
    paths = all_modules().values()
    return sorted(((len(path.read_text().splitlines()), str(path.relative_to(ROOT))) for path in paths), reverse=True)


def short_files() -> list[tuple[int, str]]:
    sizes = ((lines_of_code(path), name) for name, path in all_modules().items())
    return sorted(pair for pair in sizes if pair[0] < SHORT_FILE)


def function_lengths() -> list[tuple[int, str]]:
    """Lines of every function, its nested functions included, the longest first."""
    return sorted(
        (
            ((node.end_lineno or node.lineno) - node.lineno + 1, f"{module}.{node.name}")
            for module, path in all_modules().items()
            for node in ast.walk(parse(path))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ),
        reverse=True,
    )


def folder_sizes() -> list[tuple[int, str]]:
    """Modules in each folder, without its `__init__`, the fullest first."""
    counts: dict[str, int] = defaultdict(int)
    for module, path in all_modules().items():
        if path.name != "__init__.py":
            counts[module.rpartition(".")[0]] += 1
    return sorted(((count, name) for name, count in counts.items()), reverse=True)


# Names and types


def docstring_words() -> int:
    return sum(
        len((ast.get_docstring(node) or "").split())
        for path in all_modules().values()
        for node in documented(parse(path))
    )


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    for module, path in all_modules().items():
        yield from ((module, node) for node in ast.walk(parse(path)) if isinstance(node, ast.ClassDef))


def bases(node: ast.ClassDef) -> set[str]:
    named = (base.value if isinstance(base, ast.Subscript) else base for base in node.bases)
    return {base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "") for base in named}


def protocols() -> list[str]:
    return [f"{module}.{node.name}" for module, node in classes() if "Protocol" in bases(node)]


def repeated_class_names() -> list[str]:
    places: dict[str, list[str]] = defaultdict(list)
    for module, node in classes():
        places[node.name].append(module)
    return [f"{name}: {', '.join(found)}" for name, found in sorted(places.items()) if len(found) > 1]


def count_nodes(*names: str, called: bool) -> int:
    """How often one of these names is called, or is read as a type."""
    every = (node for path in all_modules().values() for node in ast.walk(parse(path)))
    if called:
        return sum(isinstance(node, ast.Call) and getattr(node.func, "id", "") in names for node in every)
    return sum(isinstance(node, ast.Name) and node.id in names for node in every)


# How many places an idea takes


def implementations(protocol: str) -> list[str]:
    """Classes that have all methods of this protocol, with the same parameters."""
    (wanted,) = (methods(node) for _, node in classes() if node.name == protocol and "Protocol" in bases(node))
    return [
        f"{module}.{node.name}"
        for module, node in classes()
        if wanted.items() <= methods(node).items() and "Protocol" not in bases(node)
    ]


def methods(node: ast.ClassDef) -> dict[str, tuple[str, ...]]:
    """The names of a class's methods, with those of their parameters."""
    functions = (child for child in node.body if isinstance(child, ast.FunctionDef))
    return {function.name: tuple(argument.arg for argument in function.args.args) for function in functions}


def definitions(method: str) -> list[str]:
    """Where classes of the learner, its protocol and its remote counterparts define this method."""
    return [
        f"{module}.{node.name}"
        for module, node in classes()
        if module.startswith(("r1_core.learner", "r1_cli.cluster", "r1_cli.train"))
        if method in methods(node)
    ]


def declarations(field: str) -> list[str]:
    """Where this name is a field of a class or an entry of a table that stands in a module or class."""
    found = []
    for module, path in all_modules().items():
        tree = parse(path)
        for scope in (tree, *(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))):
            for node in scope.body:
                if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == field:
                    found.append(f"{module}, line {node.lineno}")
                if isinstance(node, ast.Assign | ast.AnnAssign) and node.value:
                    entries = (entry for entry in ast.walk(node.value) if isinstance(entry, ast.Constant))
                    found += [f"{module}, line {entry.lineno}" for entry in entries if entry.value == field]
    return found


def one_step() -> dict[str, list[str]]:
    """What a step of the quickstart uses: names of modules, functions and dataclasses."""
    process = subprocess.run([sys.executable, str(ROOT / ".ci/one_step.py")], cwd=ROOT, capture_output=True, text=True)
    if process.returncode:
        sys.exit(process.stdout + process.stderr)
    found: dict[str, list[str]] = json.loads(process.stdout.splitlines()[-1])
    return found


def per_package(names: list[str]) -> tuple[str, ...]:
    counts = [(sum(name.startswith(package + ".") for name in names), package) for package in PACKAGES]
    return (", ".join(f"{package} {count}" for count, package in counts),)


def table(found: list[tuple[int, str]], rows: int) -> tuple[str, ...]:
    return tuple(f"{count:>5}  {name}" for count, name in found[:rows])


def measures() -> list[Measure]:
    files, functions, folders, short = file_lengths(), function_lengths(), folder_sizes(), short_files()
    lines = sum(length for length, _ in files)
    named = [name for name, path in all_modules().items() if path.name != "__init__.py"]
    short_modules = {name for _, name in short} & {*named}
    long = [pair for pair in functions if pair[0] > LONG_FUNCTION]
    found_cycles, found_imports, repeated = all_cycles(), leaf_imports(), repeated_class_names()
    cli = package_imports(module_imports(modules("r1_cli")), "r1_cli")
    cli_packages = [name for name in cli if name != "r1_cli" and modules("r1_cli")[name].name == "__init__.py"]
    # Across a cycle there are no levels; the measure of cycles fails then.
    cli_levels = 0 if cycles(cli) else len(levels({name: cli[name] for name in cli if name != "r1_cli"}))
    step, transports = one_step(), implementations(TRANSPORT)
    nameless = [name for name in step["functions"] if name.endswith(NAMELESS)]
    places, field_places = definitions(LEARNER_METHOD), declarations(TOKEN_FIELD)
    return [
        Measure("files", len(files)),
        Measure("lines", lines),
        Measure("lines a file, on average", lines / len(files)),
        Measure(f"% of files under {SHORT_FILE} lines of code", 100 * len(short) / len(files)),
        Measure(
            f"% of files under {SHORT_FILE} lines of code, without __init__.py", 100 * len(short_modules) / len(named)
        ),
        Measure("lines of the longest file", files[0][0], table(files, 3)),
        Measure("modules of the fullest folder", folders[0][0], table(folders, 3)),
        Measure("lines of the longest function", functions[0][0]),
        Measure(f"functions of more than {LONG_FUNCTION} lines", len(long), table(long, len(long))),
        Measure("import cycles, between modules or packages", len(found_cycles), tuple(found_cycles)),
        Measure("imports of another package by a leaf", len(found_imports), tuple(found_imports)),
        Measure("packages of r1_cli", len(cli_packages)),
        Measure("import levels of r1_cli", cli_levels),
        Measure("modules that a training step enters", len(step["modules"]), per_package(step["modules"])),
        Measure(
            "functions that a training step enters",
            len(step["functions"]),
            (*per_package(step["functions"]), f"{len(nameless)} comprehensions, generator expressions and lambdas"),
        ),
        Measure("dataclasses that a training step makes", len(step["dataclasses"])),
        Measure("protocols", len(protocols())),
        Measure("class names used twice", len(repeated), tuple(repeated)),
        Measure("`Any` per 1,000 lines", 1000 * count_nodes("Any", called=False) / lines),
        Measure(
            "`getattr` and `hasattr` per 1,000 lines", 1000 * count_nodes("getattr", "hasattr", called=True) / lines
        ),
        Measure("words in docstrings per 1,000 lines", 1000 * docstring_words() / lines),
        Measure(f"classes that implement {TRANSPORT}", len(transports), tuple(transports)),
        Measure(f"classes that define a learner method ({LEARNER_METHOD})", len(places), tuple(places)),
        Measure(f"declarations of a per-token field ({TOKEN_FIELD})", len(field_places), tuple(field_places)),
    ]


def drawing(package: str) -> str:
    """The children of a package by import level, the highest level first."""
    graph = package_imports(module_imports(modules(package)), package)
    rows = [
        f"  {number}  {' '.join(name.removeprefix(package + '.') for name in names)}"
        for number, names in enumerate(levels(graph))
    ]
    return "\n".join([f"{package}: {len(graph)} children, {sum(map(len, graph.values()))} imports", *reversed(rows)])


def main() -> int:
    if "--all" in sys.argv[1:] and not all_cycles():
        print(*map(drawing, PACKAGES), sep="\n\n", end="\n\n")
    found = measures()
    print(*found, sep="\n")
    if unknown := LIMITS.keys() - {measure.name for measure in found}:
        sys.exit(f"LIMITS names no measure: {', '.join(sorted(unknown))}")
    return any(measure.too_much for measure in found)


if __name__ == "__main__":
    sys.exit(main())
