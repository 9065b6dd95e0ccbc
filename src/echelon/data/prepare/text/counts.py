"""Count terms: how often each occurs, and in how many texts.

A term is a run of 1 … n tokens. `count_terms` counts one block; `Spill` adds up all blocks, on disk
if they do not fit into memory; `Words` keeps the strings behind hashes; `count_known` counts the
terms of a fitted vocabulary per text. Terms are identified by 64-bit hashes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from echelon.data.hashing import Hashes, hashes, joined
from echelon.data.prepare.text.tokenise import Tokens, Whole
from echelon.data.prepare.workdir import Learnt

# Count the terms of one block


Records = NDArray[Any]
"""Counts of terms as fixed-size records. Fields: `hash`; `group` (the class, if counted by class);
`count` (occurrences); `texts` (texts with the term); `tokens` (hashes of its tokens, if n > 1)."""


class Groups(NamedTuple):
    """The class of each text, as a number below `classes`."""

    of_text: Whole
    classes: int


def count_terms(tokens: Tokens, n: int, groups: Groups | None = None) -> Records:
    """Count every term of 1 … n tokens (per class, if given); return records ordered by hash."""
    single = hashes(tokens.terms)
    found, row = [np.empty(0, record_type(n, grouped=groups is not None))], 0
    for part in slices(tokens, _SLICE):
        count = len(part.offsets) - 1
        found.extend(_counted(part, single, n, _some(groups, row, count)))
        row += count
    return merged(found)


_SLICE = 1 << 20
"""Tokens whose places are in memory at a time."""


def _some(groups: Groups | None, low: int, count: int) -> Groups | None:
    return groups and Groups(groups.of_text[low : low + count], groups.classes)


class _Terms(NamedTuple):
    """Distinct terms with the same number of tokens."""

    hashes: Hashes
    parts: NDArray[np.uint64]
    """The hashes of their tokens, [terms, n], padded with 0."""


def _counted(tokens: Tokens, single: Hashes, n: int, groups: Groups | None) -> Iterator[Records]:
    """Yield the records of a slice, first those of single tokens, then of two, and so on.

    A term is encoded as one integer, (number of the term without its last token) × (number of
    tokens) + last token, so that counting is sorting.
    """
    codes, count = tokens.codes.astype(np.int64), len(single)
    at, keys, shorter = places(tokens), codes, _alone(single, n)
    yield _records(keys, count, at.rows, groups, lambda found: _take(shorter, found))
    for order in range(2, n + 1):
        on, at = at.longer()
        base = shorter

        def terms(found: Whole, base: _Terms = base, order: int = order) -> _Terms:
            return _longer(base, found // count, single[found % count], order)

        keys = keys[on] * count + codes[at.last]
        yield _records(keys, len(base.hashes) * count, at.rows, groups, terms)
        if order < n:
            coded = pa.array(keys).dictionary_encode()
            keys = coded.indices.to_numpy().astype(np.int64)
            shorter = terms(coded.dictionary.to_numpy())


def _alone(single: Hashes, n: int) -> _Terms:
    parts = np.zeros((len(single), n), np.uint64)
    parts[:, 0] = single
    return _Terms(single, parts)


def _take(terms: _Terms, chosen: Whole) -> _Terms:
    return _Terms(terms.hashes[chosen], terms.parts[chosen])


def _longer(shorter: _Terms, chosen: Whole, last: Hashes, order: int) -> _Terms:
    terms = _take(shorter, chosen)
    terms.parts[:, order - 1] = last
    return _Terms(joined(terms.hashes, last), terms.parts)


def _records(
    keys: Whole, width: int, rows: NDArray[Any], groups: Groups | None, terms: Any
) -> Records:
    if groups is not None:
        keys, width = keys * groups.classes + groups.of_text[rows], width * groups.classes
    found, counts = _tally(keys, width)
    _, texts = _tally(_once(keys, width, rows), width)
    which = terms(found if groups is None else found // groups.classes)
    n = which.parts.shape[1]
    out = np.empty(len(found), record_type(n, grouped=groups is not None))
    out["hash"], out["count"], out["texts"] = which.hashes, counts, texts
    if groups is not None:
        out["group"] = found % groups.classes
    if n > 1:
        out["tokens"] = which.parts
    return out


def record_type(n: int, *, grouped: bool) -> np.dtype[Any]:
    fields: list[Any] = [("hash", "<u8"), ("count", "<u8"), ("texts", "<u8")]
    if grouped:
        fields.append(("group", "<u4"))
    if n > 1:
        fields.append(("tokens", "<u8", (n,)))
    return np.dtype(fields)


def _tally(keys: Whole, width: int) -> tuple[Whole, Whole]:
    """Return the distinct keys in ascending order, and the count of each."""
    if width <= 4 * len(keys):
        counts = np.bincount(keys, minlength=width)
        found = np.flatnonzero(counts)
        return found, counts[found]
    ordered = np.sort(keys)
    firsts = np.flatnonzero(is_new(ordered))
    return ordered[firsts], np.diff(firsts, append=len(ordered))


def _once(keys: Whole, width: int, rows: NDArray[Any]) -> Whole:
    """Return the keys with each occurring once per text."""
    bits = max(1, (width - 1).bit_length())
    kept, start = [np.empty(0, np.int64)], 0
    while start < len(keys):
        first = int(rows[start])
        # Take complete texts: as many as fit into the cache and as their numbers have bits for.
        last = int(rows[min(start + _CACHED, len(keys)) - 1])
        last = min(max(first, last - 1), first + (1 << 62 - bits) - 1)
        stop = int(np.searchsorted(rows, rows.dtype.type(last), "right"))
        small = (last - first + 1) << bits <= 1 << 32
        both: Any = keys[start:stop].astype(np.uint32 if small else np.uint64)
        both |= (rows[start:stop] - first).astype(both.dtype) << both.dtype.type(bits)
        both.sort()
        kept.append((both[is_new(both)] & both.dtype.type((1 << bits) - 1)).astype(np.int64))
        start = stop
    return np.concatenate(kept)


_CACHED = 1 << 17
"""Tokens sorted at a time: as many as fit into the cache."""


def merged(parts: Sequence[Records]) -> Records:
    """Add up records so that each term (and group) has one; return them ordered by hash."""
    whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
    if not len(whole):
        return whole
    order = np.argsort(whole["hash"])
    new = is_new(whole["hash"][order])
    if "group" in (whole.dtype.names or ()):
        group = whole["group"][order].astype(np.int64)
        # The records are nearly in order already, which a stable sort exploits.
        finer = np.cumsum(new) * (int(group.max()) + 1) + group
        within = np.argsort(finer, kind="stable")
        order, new = order[within], is_new(finer[within])
    firsts = np.flatnonzero(new)
    out = whole[order[firsts]]
    if len(firsts) < len(whole):
        for field in ("count", "texts"):
            out[field] = np.add.reduceat(whole[field][order], firsts)
    return out


def is_new(ordered: NDArray[Any]) -> NDArray[np.bool_]:
    """Mark the first occurrence of each value of a sorted array."""
    new = np.ones(len(ordered), bool)
    new[1:] = ordered[1:] != ordered[:-1]
    return new


# Places of terms in a block


class Places(NamedTuple):
    """Where terms of some length are: their text, and the index of their last token."""

    rows: NDArray[np.int32]
    last: Whole

    def longer(self) -> tuple[Whole, Places]:
        """Extend places by one token of the same text; return which could be, and the results."""
        on = np.flatnonzero(self.rows[1:] == self.rows[:-1])
        return on, Places(self.rows[on], self.last[on] + 1)


def places(tokens: Tokens) -> Places:
    """Return the places of the single tokens."""
    return Places(tokens.rows(), np.arange(len(tokens.codes)))


def slices(tokens: Tokens, most: int) -> Iterator[Tokens]:
    """Yield complete texts of about `most` tokens at a time."""
    offsets, count = tokens.offsets, len(tokens.offsets) - 1
    low = 0
    while low < count:
        high = int(np.searchsorted(offsets, offsets[low] + most, "right")) - 1
        high = max(low + 1, min(high, count))
        start, stop = int(offsets[low]), int(offsets[high])
        yield Tokens(tokens.codes[start:stop], offsets[low : high + 1] - start, tokens.terms)
        low = high


def hashed(tokens: Tokens, terms: Hashes, n: int) -> Iterator[tuple[Hashes, NDArray[np.int32]]]:
    """For lengths 1 … n, yield the hash of the term at every place, and the text of the place."""
    at, single = places(tokens), terms[tokens.codes]
    here = single
    for order in range(1, n + 1):
        if order > 1:
            on, at = at.longer()
            here = joined(here[on], single[at.last])
        yield here, at.rows


# Add up the counts of all blocks


class Spill:
    """Records of all blocks: in memory while they fit, then on disk, partitioned by hash."""

    def __init__(self, scratch: Path, kind: np.dtype[Any]) -> None:
        self._scratch = scratch
        self._held: list[Records] = [np.empty(0, kind)]
        self._kind = kind
        self._size = 0
        self._on_disk = False
        for number in range(_PARTS):  # a killed run may have left files
            self._path(number).unlink(missing_ok=True)

    def add(self, records: Records) -> None:
        self._held.append(records)
        self._size += records.nbytes
        if self._size <= _MEMORY:
            return
        self._held = [merged(self._held)]
        self._size = self._held[0].nbytes
        if self._size > _MEMORY // 2:
            self._write()

    def parts(self) -> Iterator[Records]:
        """Yield the merged records of all blocks, one hash range at a time."""
        if not self._on_disk:
            yield merged(self._held)
            return
        self._held = [merged(self._held)]
        self._write()
        for number in range(_PARTS):
            path = self._path(number)
            if path.exists():
                yield merged([np.fromfile(path, self._kind)])
                path.unlink()

    def _write(self) -> None:
        records = self._held[0]
        starts = np.arange(_PARTS, dtype=np.uint64) << np.uint64(56)
        cuts = [*np.searchsorted(records["hash"], starts).tolist(), len(records)]
        for number in range(_PARTS):
            some = records[cuts[number] : cuts[number + 1]]
            if len(some):
                with self._path(number).open("ab") as file:
                    some.tofile(file)
        self._held, self._size, self._on_disk = [records[:0]], 0, True

    def _path(self, number: int) -> Path:
        return self._scratch / f"terms-{number:03}"


_PARTS = 256


_MEMORY = 32 << 20
"""Bytes of records that are kept in memory."""


class Words:
    """The strings behind hashes, appended block by block to one file."""

    def __init__(self, scratch: Path) -> None:
        self._path = scratch / "words.arrow"
        self._schema = pa.schema({"hash": pa.uint64(), "word": pa.large_utf8()})
        self._file = pa.OSFile(str(self._path), "wb")
        self._stream = pa.ipc.new_stream(self._file, self._schema)

    def add(self, words: Any) -> None:
        columns = [pa.array(hashes(words)), words]
        self._stream.write_batch(pa.record_batch(columns, schema=self._schema))

    def close(self) -> None:
        if not self._file.closed:
            self._stream.close()
            self._file.close()

    def of(self, wanted: Hashes) -> Any:
        """Return the strings of these hashes as an Arrow array in the same order."""
        self.close()
        needed, places = np.unique(wanted, return_inverse=True)
        missing = np.ones(len(needed), bool)
        numbers, found = [np.empty(0, np.int64)], [pa.array([], pa.large_utf8())]
        with pa.OSFile(str(self._path)) as file, pa.ipc.open_stream(file) as stream:
            for batch in stream:
                here = batch.column(0).to_numpy()
                at = np.searchsorted(needed, here)
                at[at == len(needed)] = 0
                new = np.flatnonzero((needed[at] == here) & missing[at]) if len(needed) else at[:0]
                missing[at[new]] = False
                numbers.append(at[new])
                found.append(batch.column(1).take(pa.array(new)))
        assert not missing.any(), "every term's words were counted"
        order = np.empty(len(needed), np.int64)
        order[np.concatenate(numbers)] = np.arange(len(needed))
        return pa.concat_arrays(found).take(pa.array(order[places]))


# Count the terms of a fitted vocabulary


class Counts(NamedTuple):
    """Row i of a CSR matrix is `indices[offsets[i]:offsets[i + 1]]`, in ascending order."""

    indices: NDArray[np.int32]
    values: NDArray[np.float64]
    offsets: Whole

    def rows(self) -> Whole:
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))


def numbers_of(terms: Any, vocabulary: Any) -> NDArray[np.int32]:
    """Return the index of each term in the vocabulary, −1 for others."""
    found = pc.index_in(terms, vocabulary).fill_null(-1)
    numbers: NDArray[np.int32] = np.asarray(found, np.int32)
    return numbers


def count_known(tokens: Tokens, learnt: Learnt, n: int) -> Counts:
    """Count the vocabulary's terms of 1 … n tokens in each text."""
    width = len(learnt["hashes"])
    return gathered(_places(tokens, learnt, n), width)


_NUMBERS_CACHED, _NUMBERS_SLICE = 1 << 17, 1 << 20
"""Tokens at a time: as many as sort in the cache (n = 1), or as pay for a lookup (n > 1)."""


def _places(tokens: Tokens, learnt: Learnt, n: int) -> Iterator[tuple[Any, Any, int]]:
    if n == 1:
        table = numbers_of(tokens.terms, learnt["terms"])
        for part in slices(tokens, _NUMBERS_CACHED):
            numbers = table[part.codes]
            known = np.flatnonzero(numbers >= 0)
            yield numbers[known], part.rows()[known], len(part.offsets) - 1
        return
    vocabulary, single = pa.array(learnt["hashes"]), hashes(tokens.terms)
    for part in slices(tokens, _NUMBERS_SLICE):
        levels = list(hashed(part, single, n))
        numbers = numbers_of(pa.chunked_array([level for level, _ in levels]), vocabulary)
        known = np.flatnonzero(numbers >= 0)
        rows = np.concatenate([rows for _, rows in levels])
        yield numbers[known], rows[known], len(part.offsets) - 1


def gathered(places: Iterator[tuple[Any, Any, int]], width: int) -> Counts:
    """Count (column, row) pairs of consecutive groups of texts as one CSR matrix."""
    indices, values, lengths = [_NONE32], [np.empty(0)], [np.zeros(1, np.int64)]
    for numbers, rows, count in places:
        keys = _packed(numbers, rows, count, width)
        keys.sort()
        firsts = np.flatnonzero(is_new(keys))
        bits = keys.dtype.type(_bits(width))
        found = keys[firsts]
        indices.append((found & ((keys.dtype.type(1) << bits) - keys.dtype.type(1))).astype("i4"))
        values.append(np.diff(firsts, append=len(keys)).astype(np.float64))
        lengths.append(np.bincount((found >> bits).astype(np.int64), minlength=count))
    offsets = np.cumsum(np.concatenate(lengths))
    return Counts(np.concatenate(indices), np.concatenate(values), offsets)


_NONE32 = np.empty(0, np.int32)


def _bits(width: int) -> int:
    return max(1, (width - 1).bit_length())


def _packed(numbers: Any, rows: Any, count: int, width: int) -> Any:
    """Pack row and column into one integer, 32 bits if possible: those sort faster."""
    kind = np.uint32 if count << _bits(width) <= 1 << 32 else np.uint64
    keys = rows.astype(kind) << kind(_bits(width))
    keys |= numbers.astype(kind)
    return keys
