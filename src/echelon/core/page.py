"""An HTML document that needs nothing else: no script from elsewhere, no network."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from echelon.core.html import Html, el

_STYLE = Path(__file__).with_name("page.css")


def document(title: str, body: Html, *, style: str, script: str = "") -> str:
    """A page with the look of all of them and a style of its own.

    It may load nothing, show no images but those within it, and run no script but `script`.
    """
    common = _STYLE.read_text(encoding="utf-8")
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=_policy(script)),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("title", f"{title} · Echelon"),
        el("style", Html(common + style)),
    )
    return "<!doctype html>\n" + el("html", head, body, lang="en")


def section(title: str, *inside: Html | None, note: str | None = None, kind: str = "") -> Html:
    """A part of a page under a heading."""
    head = el("h2", title, el("small", note) if note else None)
    return el("section", head, *inside, class_=kind or None)


def tile(name: str, value: str, kind: str | None = None) -> Html:
    """One of the figures to see first."""
    return el("div", el("b", value), el("span", name), class_=kind)


def _policy(script: str) -> str:
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    if not script:
        return policy
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"{policy}; script-src 'sha256-{digest}'"
