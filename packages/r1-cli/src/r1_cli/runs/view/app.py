"""The routes of `r1 view`: the page and its JSON data. Needs `r1-cli[view]`."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar, get_args

from r1_cli.runs.reader import MEDIA_KINDS, Phase, RunReader
from r1_cli.runs.view.curves import Curves
from r1_cli.runs.view.guard import Guard
from r1_cli.runs.view.overview import Overview, differences, process_table, status
from r1_cli.runs.view.samples import FILTERS, SORTS, Samples, Wanted

STATIC = Path(__file__).parent / "static"
METRICS = Path(__file__).parent / "metrics.json"  # the tables of docs/metrics.md
PHASES: tuple[Phase, ...] = get_args(Phase)
MOST_ROWS = 500  # in a response
MEDIA = re.compile(r"[0-9a-f]{32}\.(png|webp)")
KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".woff2": "font/woff2", **MEDIA_KINDS}

Query = Mapping[str, str]  # the parameters of a request
Choice = TypeVar("Choice", bound=str)


class ViewedRun:
    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = RunReader(folder), name
        self.curves, self.overview = Curves(folder), Overview(self.folder)
        self.samples = {phase: Samples(self.folder, phase) for phase in PHASES}

    def status(self) -> dict[str, str]:
        recent = [row.get("timing_s/step") or 0.0 for row in self.curves.read()["rows"][-20:]]
        return status(self.folder, recent)


class AskError(ValueError):
    pass


def names_of(folders: Sequence[Path]) -> list[str]:
    """Return a distinct name for each run: its folder's, with parent folders where needed."""
    parts = [folder.resolve().parts for folder in folders]
    for depth in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(set(parts)):
            return names
    return [str(folder) for folder in folders]


def build_app(folders: Sequence[Path], token: str | None, hosts: frozenset[str] | None) -> Guard:
    """Return the ASGI application; see `Guard` for `token` and `hosts`."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import FileResponse, Response
    from starlette.routing import Route

    runs = [ViewedRun(folder, name) for folder, name in zip(folders, names_of(folders), strict=True)]
    files = {"/" + str(path.relative_to(STATIC)): path for path in STATIC.rglob("*") if path.suffix in KINDS}
    files["/"] = STATIC / "index.html"

    def page(request: Request) -> Response:
        path = files[request.url.path]
        return FileResponse(path, media_type=KINDS[path.suffix], headers={"cache-control": "no-cache"})

    def media(request: Request) -> Response:
        name = request.path_params["name"]
        try:
            folder = _run(runs, request.path_params["run"]).folder
        except AskError as error:
            return Response(str(error), 404, media_type="text/plain")
        if not MEDIA.fullmatch(name) or not (path := folder.media_path(name)).is_file() or path.is_symlink():
            return Response("there is no such picture", 404, media_type="text/plain")
        headers = {"cache-control": "private, max-age=86400, immutable"}
        return FileResponse(path, media_type=KINDS[path.suffix], headers=headers)

    def as_json(answer: Callable[[list[ViewedRun], Query], object]) -> Callable[[Request], Response]:
        def endpoint(request: Request) -> Response:
            try:
                found, status = answer(runs, request.query_params), 200
            except AskError as error:
                found, status = {"error": str(error)}, 400
            body = json.dumps(_plain(found), allow_nan=False)
            return Response(body, status, {"cache-control": "no-store"}, "application/json")

        return endpoint

    answers = {
        "runs": _runs, "overview": _overview, "differences": _differences, "metrics": _metrics, "curves": _curves,
        "processes": _processes,
        "groups": _groups, "group": _group, "same": _same,
    }  # fmt: skip
    routes = [Route(f"/api/{name}", as_json(answer)) for name, answer in answers.items()]
    routes += [Route(path, page) for path in files]
    routes.append(Route("/media/{run}/{name}", media))
    return Guard(Starlette(routes=routes), token, hosts)


def _runs(runs: list[ViewedRun], query: Query) -> object:
    return [
        {
            "name": run.name, "folder": str(run.folder.path), **run.status(),
            **{phase: run.samples[phase].steps() for phase in PHASES},
        }
        for run in runs
    ]  # fmt: skip


def _overview(runs: list[ViewedRun], query: Query) -> object:
    return _run(runs, query.get("run")).overview.read()


def _processes(runs: list[ViewedRun], query: Query) -> object:
    return process_table(_run(runs, query.get("run")).folder)


def _differences(runs: list[ViewedRun], query: Query) -> object:
    return differences([RunReader(run.folder.path) for run in runs])


def _metrics(runs: list[ViewedRun], query: Query) -> object:
    return json.loads(METRICS.read_text(encoding="utf-8"))


def _curves(runs: list[ViewedRun], query: Query) -> object:
    return _run(runs, query.get("run")).curves.read(_number(query, "after", 0), _number(query, "times", 0))


def _groups(runs: list[ViewedRun], query: Query) -> object:
    filters = tuple(name for name in query.get("filters", "").split(",") if name)
    if unknown := sorted({*filters} - {*FILTERS}):
        raise AskError(f"filters has {unknown[0]!r}; there are {', '.join(FILTERS)}")
    wanted = Wanted(
        step=_number(query, "step", 0) if query.get("step") else None,
        source=query.get("source") or None,
        search=query.get("search", ""),
        filters=filters,
        low=_real(query, "low"),
        high=_real(query, "high"),
        sort=_choice(query, "sort", SORTS),
        down=query.get("down") == "1",
    )
    begin, count = max(_number(query, "begin", 0), 0), min(max(_number(query, "count", 100), 0), MOST_ROWS)
    return _of(runs, query).page(begin, count, wanted)


def _group(runs: list[ViewedRun], query: Query) -> object:
    place = _number(query, "place", 0) if query.get("place") else None
    return _of(runs, query).group(_number(query, "step", 0), _number(query, "group", 0), place)


def _same(runs: list[ViewedRun], query: Query) -> object:
    phase = _choice(query, "phase", PHASES)
    found = [(number, run.samples[phase].same(query.get("prompt_id", ""))) for number, run in enumerate(runs)]
    return [{"run": number, **one} for number, those in found for one in those]


def _of(runs: list[ViewedRun], query: Query) -> Samples:
    return _run(runs, query.get("run")).samples[_choice(query, "phase", PHASES)]


def _run(runs: list[ViewedRun], number: str | None) -> ViewedRun:
    if number is None or not re.fullmatch(r"[0-9]{1,4}", number) or int(number) >= len(runs):
        raise AskError(f"run is {number!r}; runs are 0 to {len(runs) - 1}")
    return runs[int(number)]


def _number(query: Query, name: str, default: int) -> int:
    text = query.get(name, str(default))
    if not re.fullmatch(r"-?[0-9]{1,9}", text):
        raise AskError(f"{name} is {text!r}, not a whole number")
    return int(text)


def _real(query: Query, name: str) -> float | None:
    if not (text := query.get(name, "")):
        return None
    if not re.fullmatch(r"-?[0-9]{0,9}(\.[0-9]{1,9})?(e-?[0-9]{1,2})?", text) or not re.search("[0-9]", text):
        raise AskError(f"{name} is {text!r}, not a number")
    return float(text)


def _choice(query: Query, name: str, choices: tuple[Choice, ...]) -> Choice:
    if (found := query.get(name, choices[0])) not in choices:
        raise AskError(f"{name} is {found!r}; there are {', '.join(choices)}")
    return found


def _plain(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list) else value
