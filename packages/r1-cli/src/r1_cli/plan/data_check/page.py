"""The report of a data check as one HTML page without scripts or network; row texts are escaped."""

import base64
import io
from collections.abc import Callable, Iterator
from html import escape
from typing import Any

from r1_cli.build.rows import OpenSource
from r1_cli.plan.data_check.findings import TITLES, Report
from r1_cli.runs.html import render_page
from r1_data.demonstrations import ConversationRenderer, Survey
from r1_data.pictures import to_pil
from r1_data.prefetch import start_rendering
from r1_data.render import Renderer
from r1_data.types import DataError
from r1_data.workers import WorkerDied, Workers

THUMBNAIL = 128  # pixels of the longer side
SAMPLES = 6  # rows shown of each source
TEXT = 600  # characters of a row's text

STYLE = """
td.n { text-align: right } .bar { background: var(--mark); height: 1em } .error { color: #b00 } .warning { color: #a60 }
"""

ShowRow = Callable[[OpenSource, int], str]  # a row as HTML; raises DataError, WorkerDied


def write_page(report: Report, show_row: ShowRow) -> str:
    """Return the page, with rows in issues and some rows of each source."""
    parts = ["<h1>r1 data check</h1>", *_sources(report), *_lengths(report), *_findings(report, show_row)]
    parts += _samples(report, show_row)
    return render_page("r1 data check", "\n".join(parts), STYLE)


def prompt_rows(renderer: Renderer, workers: Workers | None) -> ShowRow:
    """Return a function that shows a prompt: its text, answer and thumbnails."""

    def show_row(opened: OpenSource, index: int) -> str:
        prompt = start_rendering(opened.reader(*opened.rows[index]), renderer, workers).result()
        stills = [to_pil(video[0]) for video in prompt.videos]
        images = "".join(map(_thumbnail, [*prompt.images, *stills]))
        text, answer = escape(prompt.text[:TEXT]), escape(prompt.ground_truth[:TEXT])
        title = f"<p><b>{escape(prompt.id)}</b>, {len(prompt.token_ids):,} tokens</p>"
        return f"{title}{images}<pre>{text}</pre><pre>{answer}</pre>"

    return show_row


def conversation_rows(renderer: ConversationRenderer, workers: Workers | None) -> ShowRow:
    """Return a function that shows a conversation: its text, with what is trained marked, and thumbnails."""

    def show_row(opened: OpenSource, index: int) -> str:
        one = opened.conversation_reader(*opened.rows[index])
        surveys = renderer.survey(one)
        loaded = workers.submit("load", one.as_asked()) if workers is not None and one.media else None
        pixels = loaded.result() if loaded is not None else renderer.load(one)
        stills = [to_pil(video[0]) for video in pixels.videos]
        images = "".join(map(_thumbnail, [*pixels.images, *stills]))
        numbers = ", ".join(f"{part.tokens:,} tokens, {part.trained_tokens:,} trained" for part in surveys)
        texts = "".join(f"<pre>{mark_trained(part, escape, '<mark>', '</mark>')}</pre>" for part in surveys)
        return f"<p><b>{escape(one.id)}</b>, {numbers}</p>{images}{texts}"

    return show_row


def mark_trained(part: Survey, write: Callable[[str], str], begin: str, end: str, limit: int = 4 * TEXT) -> str:
    """Return the first `limit` characters of a rendered conversation, with `begin` and `end` around what is trained."""
    text, place = "", 0
    for start, stop in sorted(part.trained):
        if start >= limit:
            break
        text += write(part.text[place:start]) + begin + write(part.text[start : min(stop, limit)]) + end
        place = stop
    return text + write(part.text[place:limit])


def _sources(report: Report) -> Iterator[str]:
    headings = "source", "format", "rows", "usable", "left out", "media", "mean tokens", "longest"
    yield f"<h2>Sources</h2><table><tr>{''.join(f'<th>{heading}</th>' for heading in headings)}</tr>"
    for tally in report.sources:
        name = escape(tally.name) + (" (validation)" if tally.validation else "")
        cells = (
            len(tally.opened.rows),
            tally.usable,
            tally.left_out,
            tally.media,
            round(tally.mean_tokens),
            max(tally.tokens, default=0),
        )
        numbers = "".join(f'<td class="n">{number:,}</td>' for number in cells)
        yield f"<tr><td>{name}</td><td>{escape(tally.opened.detected.format or 'columns as set')}</td>{numbers}</tr>"
    yield "</table>"


def _lengths(report: Report) -> Iterator[str]:
    bins = report.histogram()
    if not bins:
        return
    most = max(rows for _, _, rows in bins)
    yield f"<h2>{report.lengths.capitalize()}</h2><table>"
    for low, high, rows in bins:
        bar = f'<div class="bar" style="width: {300 * rows / most:.0f}px"></div>'
        yield f'<tr><td class="n">{low:,} – {high - 1:,}</td><td>{bar}</td><td class="n">{rows:,}</td></tr>'
    yield "</table>"
    if line := report.step_line():
        yield f"<p>{line[0].upper()}{line[1:]}.</p>"


def _findings(report: Report, show_row: ShowRow) -> Iterator[str]:
    yield "<h2>Findings</h2>"
    for finding in report.ordered():
        title = escape(
            TITLES.get(finding.kind, finding.kind) + (f": {finding.consequence}" if finding.consequence else "")
        )
        yield f'<h3 class="{finding.level}">{finding.count:,} × {title}</h3>'
        for reason, row in finding.examples:
            yield f"<p>{escape(reason)}</p>"
            if row is not None:
                yield _row(report, row.source, row.index, show_row)
    if not report.findings:
        yield "<p>Nothing to complain about.</p>"


def _samples(report: Report, show_row: ShowRow) -> Iterator[str]:
    for index, tally in enumerate(report.sources):
        yield f"<h2>Rows of {escape(tally.name)}</h2>"
        for row in range(min(SAMPLES, len(tally.opened.rows))):
            yield _row(report, index, row, show_row)


def _row(report: Report, source: int, index: int, show_row: ShowRow) -> str:
    try:
        return show_row(report.sources[source].opened, index)
    except (DataError, WorkerDied) as error:
        return f"<pre>{escape(str(error)[:TEXT])}</pre>"


def _thumbnail(image: Any) -> str:
    small = image.convert("RGB")
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=80)
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<img alt="" width="{small.width}" height="{small.height}" src="data:image/jpeg;base64,{data}">'
