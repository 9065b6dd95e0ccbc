"""HTML that is escaped by construction: plain text goes in as text, never as markup."""

from __future__ import annotations

from html import escape
from typing import TypeAlias

_VOID = frozenset({"meta", "br", "hr", "img", "link"})


class Html(str):
    """Markup that is already safe."""

    __slots__ = ()


Child: TypeAlias = "Html | str | None"


def el(name: str, /, *children: Child, **attributes: str | float | bool | None) -> Html:
    """An element. `class_` is `class`, `aria_label` is `aria-label`; None leaves one out."""
    head = name + "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _VOID:
        return Html(f"<{head}>")
    return Html(f"<{head}>{join(children)}</{name}>")


def join(children: tuple[Child, ...] | list[Html]) -> Html:
    """Children one after the other; what is not markup is escaped."""
    return Html("".join(_safe(child) for child in children if child is not None))


def _safe(child: str) -> str:
    return child if isinstance(child, Html) else escape(child)


def _attribute(key: str, value: str | float | bool | None) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    if name in ("viewbox", "preserveaspectratio"):  # SVG's names have capitals
        name = {"viewbox": "viewBox", "preserveaspectratio": "preserveAspectRatio"}[name]
    return f" {name}" if value is True else f' {name}="{escape(str(value))}"'
