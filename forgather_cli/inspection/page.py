"""Samples as one HTML page, which takes nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from forgather_cli.inspection.samples import ShownSample
from forgather_cli.inspection.terminal import counts_of, heading_of, visible

_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1a1a1a; --faint: #6b6b6b; --line: #ddd;
  --target: #bfe8c5; --target-line: #2f8a45; --special: #a0348f; --hover: #ffd76a; --hover-ink: #1a1a1a; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #16181b; --ink: #e6e6e6; --faint: #9a9fa6; --line: #33373d;
    --target: #1f4d2b; --target-line: #5fc57a; --special: #e48bd6; --hover: #8a6d12; --hover-ink: #fff; }
}
body { background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 60rem; padding: 0 1rem; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.05rem; margin-top: 2.5rem; border-top: 1px solid var(--line);
  padding-top: 1rem; } h3 { font-size: .85rem; color: var(--faint); font-weight: 500; overflow-wrap: anywhere; }
p { color: var(--faint); }
pre { font: 14px/1.7 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; }
pre span { border-radius: 2px; cursor: default; }
.target { background: var(--target); border-bottom: 2px solid var(--target-line); }
.special { color: var(--special); font-weight: 600; }
.differs { text-decoration: underline; }
pre span:hover { background: var(--hover); color: var(--hover-ink); outline: 1px solid var(--ink); }
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"  # a browser would ask nobody for anything


def page_of(samples: Sequence[ShownSample], split: str, length: int | None) -> str:
    """``length``: samples in the split, where that is known."""
    of = "" if length is None else f" of {length:,}"
    body = "".join(
        f'<section id="sample-{each.index}"><h2>sample {each.index:,}{of}</h2>\n<p>{escape(counts_of(each))}</p>\n'
        f"{''.join(_documents(each))}</section>\n"
        for each in samples
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width">\n<meta name="color-scheme" content="light dark">\n'
        f"<title>samples of {escape(split)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>What the model sees: samples of {escape(split)}</h1>\n"
        '<p><span class="target">Targets</span> are what the loss counts; <span class="special">these</span> are '
        "begin and end tokens and the like. Hover over a token for its id.</p>\n"
        f"{body}</body>\n</html>\n"
    )


def _documents(sample: ShownSample) -> Iterable[str]:
    if sample.encoder is not None:
        yield "<h3>encoder</h3>\n<pre>"
        for at, (number, piece) in enumerate(zip(sample.encoder.ids, sample.encoder.pieces, strict=True)):
            yield _token(piece, f"id {number}, position {at}", "")
        yield "</pre>\n"
    marks = {"target": sample.targets, "special": sample.special, "differs": sample.differs}
    for number, part in enumerate(sample.parts):
        yield f"<h3>{escape(visible(heading_of(part, number, sample)))}</h3>\n<pre>"
        for at, document in enumerate(sample.documents):
            if document == number:
                kind = " ".join(name for name, those in marks.items() if those and those[at])
                told = f"id {sample.ids[at]}, position {at}, {'target' if sample.targets[at] else 'no target'}"
                yield _token(sample.pieces[at], told, kind)
        yield "</pre>\n"
        if part.behind:
            where = "no sample: it was cut" if part.is_cut else "other samples"
            yield f"<p>{part.behind:,} more tokens of it are in {where}</p>\n"
    if sample.num_padding:
        yield f"<p>padding: {sample.num_padding:,} tokens</p>\n"


def _token(piece: str, told: str, kind: str) -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<span{named} title="{told}">{escape(visible(piece))}</span>'
