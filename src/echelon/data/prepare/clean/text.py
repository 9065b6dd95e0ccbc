"""Text as it should be: no mark-up, one form of every character, single spaces."""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from echelon.data.prepare.learnt import Learnt
from echelon.data.prepare.step import Cleaned, ColumnStep, is_text, replaced

_HIDDEN = r"(?is)<!--.*?-->|<script\b.*?</script\s*>|<style\b.*?</style\s*>"
_TAG = r"</?[a-zA-Z][^<>]*>"
_BLANKS = r"[\s\p{Z}\p{Cc}]+"
# Any blank that is not a single plain space: most texts have none, and are left as they are.
_ODD_BLANK = r"[^\P{Z} ]|\p{Cc}|[\s\p{Z}]{2}"


class Text(ColumnStep):
    """Normalise a column of text; every setting is one thing done, in the order they stand here."""

    kind: Literal["text"] = "text"
    html: bool = False
    """Take out tags, comments and scripts, and put the characters that `&amp;` and its kin mean."""
    unicode: Literal["NFC", "NFD", "NFKC", "NFKD"] | None = "NFC"
    """Which of several ways to write a character is used; the K forms also merge variants."""
    width: bool = False
    """Full-width letters, digits and marks, as Chinese text has them, become plain ones."""
    lower: bool = False
    space: bool = True
    """Runs of blanks, line ends and control characters become one space, none at the ends."""

    types: ClassVar[str] = "text"

    def fits(self, kind: pa.DataType) -> bool:
        return is_text(kind)

    def clean(self, block: pa.RecordBatch, learnt: Learnt) -> Cleaned:
        changed = 0
        for name in self.columns:
            before = block.column(name)
            after = self.normalised(before)
            changed += pc.sum(pc.not_equal(before, after)).as_py() or 0
            block = replaced(block, name, after)
        return Cleaned(block, counts={"changed": changed})

    def normalised(self, text: Any) -> Any:
        if self.html:
            text = plain(text)
        if self.unicode:
            form = self.unicode
            other = pc.invert(pc.string_is_ascii(text))  # plain characters have one form alone
            text = _changed(text, other, lambda some: pc.utf8_normalize(some, form))
        if self.width:
            text = narrowed(text)
        if self.lower:
            text = pc.utf8_lower(text)
        if self.space:
            odd = pc.match_substring_regex(text, _ODD_BLANK)
            text = _changed(text, odd, lambda some: pc.replace_substring_regex(some, _BLANKS, " "))
            text = pc.utf8_trim_whitespace(text)
        return text


def _changed(text: Any, where: Any, change: Callable[[Any], Any]) -> Any:
    """The column with these rows changed, the others as they are."""
    if not pc.any(where).as_py():
        return text
    return pc.replace_with_mask(text, where.fill_null(False), change(text.filter(where)))


def plain(text: Any) -> Any:
    """Without mark-up; a tag parts words, so a space stands for it."""
    text = _changed(text, pc.match_substring(text, "<"), _untagged)
    return _changed(text, pc.match_substring(text, "&"), _unescaped)


def _untagged(text: Any) -> Any:
    return pc.replace_substring_regex(pc.replace_substring_regex(text, _HIDDEN, " "), _TAG, " ")


def _unescaped(text: Any) -> Any:
    return pa.array([html.unescape(one) for one in text.to_pylist()], text.type)


def narrowed(text: Any) -> Any:
    """Full-width forms, U+FF01 … U+FF5E and U+3000, as the ASCII characters they are wide forms of.

    All of a block at once: in UTF-8 each is three bytes, of which one stays.
    """
    if pc.all(pc.string_is_ascii(text)).as_py():
        return text
    text = text.cast(pa.large_utf8())
    _, places, buffer = text.buffers()
    offsets = np.frombuffer(places, np.int64, len(text) + 1, 8 * text.offset)
    if buffer is None or offsets[-1] == offsets[0]:
        return text
    values = np.frombuffer(buffer, np.uint8)[offsets[0] : offsets[-1]].copy()
    offsets = offsets - offsets[0]
    at = np.flatnonzero((values[:-2] == 0xEF) | (values[:-2] == 0xE3))
    first, second, third = (values[at + n] for n in range(3))
    low = (first == 0xEF) & (second == 0xBC) & (third >= 0x81)
    high = (first == 0xEF) & (second == 0xBD) & (third <= 0x9E)
    blank = (first == 0xE3) & (second == 0x80) & (third == 0x80)
    chosen = low | high | blank
    wide = at[chosen]
    if not len(wide):
        return text
    values[wide] = np.where(low, third - 0x60, np.where(high, third - 0x20, 0x20))[chosen]
    kept = np.ones(len(values), np.bool_)
    kept[wide + 1] = kept[wide + 2] = False
    offsets = offsets - 2 * np.searchsorted(wide, offsets)
    arrays = [text.is_valid() if text.null_count else None, offsets, values[kept]]
    return _rebuilt(len(text), *arrays)


def _rebuilt(rows: int, present: Any, offsets: Any, values: Any) -> Any:
    whole = pa.Array.from_buffers(
        pa.large_utf8(), rows, [None, pa.py_buffer(offsets), pa.py_buffer(values)]
    )
    return whole if present is None else pc.if_else(present, whole, pa.scalar(None, whole.type))
