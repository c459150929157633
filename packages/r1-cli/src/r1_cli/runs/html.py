"""Self-contained HTML pages without script or network, for `r1 report` and `r1 data check`."""

from collections.abc import Sequence
from html import escape

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"  # whatever gets past, loads and runs nothing
STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--soft:#5c6570;--paper:#fff;--card:#f5f6f7;--line:#d5d9de;--mark:#0b5cad}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ec;--soft:#9aa4af;--paper:#14171a;--card:#1d2125;--line:#363c43;
--mark:#6cb2ff}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:1000px;margin:2rem auto;
padding:0 1rem}
h1,h2,h3{line-height:1.2}h2{margin-top:2.2rem;border-bottom:1px solid var(--line);padding-bottom:.3rem}
.lead{font-size:1.05rem;color:var(--soft)}
table{border-collapse:collapse;margin:.8rem 0;width:100%}
td,th{text-align:left;vertical-align:top;padding:.25rem .7rem .25rem 0;border-bottom:1px solid var(--line);
overflow-wrap:anywhere}
td:first-child{color:var(--soft);min-width:9rem}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,300px),1fr));gap:.8rem}
figure,article{margin:0;padding:.7rem;background:var(--card);border-radius:8px;min-width:0}
svg{width:100%;height:auto;display:block}polyline{fill:none;stroke:var(--mark);stroke-width:1.8}
circle{fill:var(--mark)}.bar{stroke:var(--mark);stroke-width:1.2}.axis{fill:none;stroke:var(--line)}
svg text{font-size:11px;fill:var(--soft)}
.share{display:flex;align-items:center;gap:.5rem}.share span{width:9rem;color:var(--soft)}
.share i{height:.8rem;background:var(--mark);border-radius:2px;min-width:1px}
pre{white-space:pre-wrap;overflow-wrap:anywhere;font-size:.85rem;max-height:16rem;overflow:auto;margin:.4rem 0}
.answer{border-left:3px solid var(--mark);padding-left:.6rem}
img{max-width:100%;max-height:14rem;border-radius:4px;margin-right:.4rem}
@media print{body{max-width:none;margin:0}figure,article{break-inside:avoid}}
"""


def render_page(title: str, body: str, style: str = "") -> str:
    """Return a page with the HTML `body`, whose texts are escaped; `style` is added to STYLE."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<style>{STYLE}{style}</style></head><body>{body}</body></html>\n"
    )


def table(rows: Sequence[Sequence[object]], head: Sequence[str] = ()) -> str:
    lines = ["<tr>" + "".join(f"<th>{escape(one)}</th>" for one in head) + "</tr>"] if head else []
    lines += ["<tr>" + "".join(f"<td>{escape(str(one))}</td>" for one in row) + "</tr>" for row in rows]
    return f"<table>{''.join(lines)}</table>" if rows else ""
