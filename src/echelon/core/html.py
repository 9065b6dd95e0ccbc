"""The parts of a self-contained HTML page: escaped elements, the document, axes for charts.

Run reports and data profiles are built of these parts. Plain text is escaped by construction: only
`Html` is inserted as markup. A page loads nothing from elsewhere, and a policy in its head forbids
it to.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TypeAlias

from echelon.core.format import short

# The document


def document(title: str, body: Html, *, style: str, script: str = "") -> str:
    """Return a complete page: the common style sheet, then the page's own `style`.

    The page may load nothing, show only images that it contains, and run only `script`.
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
    """Return a part of a page under a heading."""
    head = el("h2", title, el("small", note) if note else None)
    return el("section", head, *inside, class_=kind or None)


def tile(name: str, value: str, kind: str | None = None) -> Html:
    """Return a box with one number and its name, for the top of a page."""
    return el("div", el("b", value), el("span", name), class_=kind)


_STYLE = Path(__file__).with_name("page.css")


def _policy(script: str) -> str:
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    if not script:
        return policy
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"{policy}; script-src 'sha256-{digest}'"


# Elements


class Html(str):
    """A text that is markup already and is not escaped again."""

    __slots__ = ()


Child: TypeAlias = "Html | str | None"


def el(name: str, /, *children: Child, **attributes: str | float | bool | None) -> Html:
    """Return an element. Attribute names: `class_` is `class`, `aria_label` is `aria-label`.

    An attribute that is None or False is left out; True stands for one without a value.
    """
    head = name + "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _VOID:
        return Html(f"<{head}>")
    return Html(f"<{head}>{join(children)}</{name}>")


def join(children: tuple[Child, ...] | list[Html]) -> Html:
    """Concatenate children, escaping all that are not `Html`."""
    return Html("".join(_safe(child) for child in children if child is not None))


def _safe(child: str) -> str:
    return child if isinstance(child, Html) else escape(child)


_VOID = frozenset({"meta", "br", "hr", "img", "link"})


def _attribute(key: str, value: str | float | bool | None) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    if name in ("viewbox", "preserveaspectratio"):  # SVG's names have capitals
        name = {"viewbox": "viewBox", "preserveaspectratio": "preserveAspectRatio"}[name]
    return f" {name}" if value is True else f' {name}="{escape(str(value))}"'


# Axes


@dataclass(frozen=True, slots=True)
class Scale:
    """An axis from `low` to `high`."""

    low: float
    high: float
    log: bool = False
    whole: bool = False
    """Whether ticks have to be integers."""

    def place(self, value: float) -> float:
        """Return the position of a value: 0 at the low end, 1 at the high end."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, count: int = 5) -> list[tuple[float, str]]:
        """Return (place, label) of about `count` round values within the axis."""
        values = self._log_values() if self.log else self._values(count)
        digits = [_digits([v]) for v in values] if self.log else [_digits(values)] * len(values)
        small = max(map(abs, values), default=0.0) < 0.01
        return [
            (self.place(value), _label(value, d, small=small))
            for value, d in zip(values, digits, strict=True)
        ]

    def _values(self, count: int) -> list[float]:
        step = _nice((self.high - self.low) / count)
        step = max(1.0, step) if self.whole else step
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [i * step for i in range(first, last + 1)]

    def _log_values(self) -> list[float]:
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        wide = math.log10(self.high / self.low) > 3
        stride = max(1, (last - first) // 5)
        powers = range(first, last + 1, stride if wide else 1)
        values = [m * 10.0**p for p in powers for m in ((1,) if wide else (1, 2, 5))]
        return [value for value in values if self.low <= value <= self.high]


def value_scale(
    values: Sequence[float],
    *,
    may_be_log: bool = False,
    from_zero: bool = False,
    top: float | None = None,
) -> Scale:
    """Return an axis for these finite values with a margin; `top` is a natural upper limit.

    The axis is logarithmic if `may_be_log` and the values differ by a large factor.
    """
    low, high = min(values), max(values)
    if may_be_log and low > _TINY and high / low >= _LOG_FROM:
        return Scale(low / 1.15, high * 1.15, log=True)
    if from_zero and low >= 0 and high > _TINY:
        return Scale(0.0, high * 1.08)
    if math.isclose(low, high, rel_tol=1e-9, abs_tol=_TINY):
        air = max(abs(low), abs(high)) * 0.1
        air = air if air > _TINY else 0.5
        return Scale(low - air, high + air)
    air = (high - low) * 0.06
    floor = 0.0 if 0 <= low < 0.3 * high else low - air
    ceiling = high + air
    if top is not None and high <= top:
        ceiling = min(ceiling, top)
    return Scale(floor, ceiling)


def step_scale(last: int) -> Scale:
    """Return the axis of steps that all charts of a run share, so that steps line up."""
    return Scale(0, max(last, 1), whole=True)


_LOG_FROM = 50.0
"""Ratio of highest to lowest value from which a logarithmic axis is easier to read."""
_TINY = 1e-30
"""Differences below this are rounding noise and are not divided by."""


def _nice(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)


def _digits(values: Sequence[float]) -> int:
    """Return the number of decimals that the labels need to be exact."""
    return next(
        (d for d in range(6) if all(abs(v - round(v, d)) <= abs(v) * 1e-9 for v in values)), 6
    )


def _label(value: float, digits: int, *, small: bool) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 10_000:
        return short(value)
    if small:
        mantissa, _, power = f"{value:.2e}".partition("e")
        return f"{float(mantissa):g}e{int(power)}"
    return f"{value:,.{digits}f}"
