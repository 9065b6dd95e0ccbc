"""Term counts, n-grams, spilled to disk by hash."""

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

# --- count ---
# How often every term of a block occurs, and in how many of its texts.

_SLICE = 1 << 20
"""Tokens whose places are in memory at one time."""
_CACHED = 1 << 17
"""Tokens that are sorted at one time."""


class Groups(NamedTuple):
    """The class of each text, as a number below `classes`."""

    of_text: Whole
    classes: int


class _Terms(NamedTuple):
    """Different terms of the same number of tokens."""

    hashes: Hashes
    parts: NDArray[np.uint64]
    """The hashes of their tokens [terms, n]; 0 behind the last one."""


def count_terms(tokens: Tokens, n: int, groups: Groups | None = None) -> Records:
    """Every term of 1 … n tokens (in each class), in the order of the hashes."""
    single = hashes(tokens.terms)
    found, row = [np.empty(0, record_type(n, grouped=groups is not None))], 0
    for part in slices(tokens, _SLICE):
        count = len(part.offsets) - 1
        found.extend(_counted(part, single, n, _some(groups, row, count)))
        row += count
    return merged(found)


def _some(groups: Groups | None, low: int, count: int) -> Groups | None:
    return groups and Groups(groups.of_text[low : low + count], groups.classes)


def _counted(tokens: Tokens, single: Hashes, n: int, groups: Groups | None) -> Iterator[Records]:
    """Records of this slice, order by order.

    A term is (the number of the term without its last token) × (number of tokens) + that token:
    so it is one whole number, and counting is sorting.
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


def _tally(keys: Whole, width: int) -> tuple[Whole, Whole]:
    """The different keys, smallest first, and how often each is there."""
    if width <= 4 * len(keys):
        counts = np.bincount(keys, minlength=width)
        found = np.flatnonzero(counts)
        return found, counts[found]
    ordered = np.sort(keys)
    firsts = np.flatnonzero(is_new(ordered))
    return ordered[firsts], np.diff(firsts, append=len(ordered))


def _once(keys: Whole, width: int, rows: NDArray[Any]) -> Whole:
    """The keys again, each once per text."""
    bits = max(1, (width - 1).bit_length())
    kept, start = [np.empty(0, np.int64)], 0
    while start < len(keys):
        first = int(rows[start])
        # Whole texts, as many as stay in the cache, and as their numbers have bits for.
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


# --- grams ---
# Terms of several tokens in a row: where they are in a block.


class Places(NamedTuple):
    """Where terms of some length are: which text, and which token is their last one."""

    rows: NDArray[np.int32]
    last: Whole

    def longer(self) -> tuple[Whole, Places]:
        """Which of these go on for one more token of the same text, and where those are."""
        on = np.flatnonzero(self.rows[1:] == self.rows[:-1])
        return on, Places(self.rows[on], self.last[on] + 1)


def places(tokens: Tokens) -> Places:
    """Of the tokens themselves."""
    return Places(tokens.rows(), np.arange(len(tokens.codes)))


def slices(tokens: Tokens, most: int) -> Iterator[Tokens]:
    """Whole texts of about `most` tokens at a time, with the numbers of the block's terms."""
    offsets, count = tokens.offsets, len(tokens.offsets) - 1
    low = 0
    while low < count:
        high = int(np.searchsorted(offsets, offsets[low] + most, "right")) - 1
        high = max(low + 1, min(high, count))
        start, stop = int(offsets[low]), int(offsets[high])
        yield Tokens(tokens.codes[start:stop], offsets[low : high + 1] - start, tokens.terms)
        low = high


def hashed(tokens: Tokens, terms: Hashes, n: int) -> Iterator[tuple[Hashes, NDArray[np.int32]]]:
    """Per number of tokens 1 … n: the hash of every term in its place, and the places' texts."""
    at, single = places(tokens), terms[tokens.codes]
    here = single
    for order in range(1, n + 1):
        if order > 1:
            on, at = at.longer()
            here = joined(here[on], single[at.last])
        yield here, at.rows


# --- records ---
# Counts of terms as records of a fixed size, merged by the terms' hashes.

Records = NDArray[Any]
"""Fields: `hash`; `group`, a class, if classes are told apart; `count`, all occurrences; `texts`,
those that have the term; `tokens`, the hashes of its tokens, if it can have several."""


def record_type(n: int, *, grouped: bool) -> np.dtype[Any]:
    fields: list[Any] = [("hash", "<u8"), ("count", "<u8"), ("texts", "<u8")]
    if grouped:
        fields.append(("group", "<u4"))
    if n > 1:
        fields.append(("tokens", "<u8", (n,)))
    return np.dtype(fields)


def merged(parts: Sequence[Records]) -> Records:
    """One record for each term (and group), in the order of the hashes."""
    whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
    if not len(whole):
        return whole
    order = np.argsort(whole["hash"])
    new = is_new(whole["hash"][order])
    if "group" in (whole.dtype.names or ()):
        group = whole["group"][order].astype(np.int64)
        # Nearly in order already: what a stable sort is quick at.
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
    """Where a sorted array has something that was not there before."""
    new = np.ones(len(ordered), bool)
    new[1:] = ordered[1:] != ordered[:-1]
    return new


# --- spill ---
# More counts than fit into memory: kept on disk, parted by hash, merged part by part.

_PARTS = 256
_MEMORY = 32 << 20
"""Bytes of records that are not on disk."""


class Spill:
    """Records of all blocks; as long as there are few different terms no file is written."""

    def __init__(self, scratch: Path, kind: np.dtype[Any]) -> None:
        self._scratch = scratch
        self._held: list[Records] = [np.empty(0, kind)]
        self._kind = kind
        self._size = 0
        self._on_disk = False
        for number in range(_PARTS):  # a run that was killed may have left some
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
        """All terms, each once (and once per group), those of near hashes together."""
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


class Words:
    """The words that hashes stand for, block after block in one file."""

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
        """The words of these hashes, an Arrow array in the same order."""
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


# --- numbers ---
# Terms of a block → their numbers in a vocabulary, and how often each text has them.

_NUMBERS_CACHED, _NUMBERS_SLICE = 1 << 17, 1 << 20
"""Tokens at one time: as many as are sorted quickly, or as are worth a table of the vocabulary."""


class Counts(NamedTuple):
    """Row i of a CSR matrix is `indices[offsets[i]:offsets[i + 1]]`, in ascending order."""

    indices: NDArray[np.int32]
    values: NDArray[np.float64]
    offsets: Whole

    def rows(self) -> Whole:
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))


def numbers_of(terms: Any, vocabulary: Any) -> NDArray[np.int32]:
    """The places of the terms in the vocabulary, −1 for others."""
    found = pc.index_in(terms, vocabulary).fill_null(-1)
    numbers: NDArray[np.int32] = np.asarray(found, np.int32)
    return numbers


def count_known(tokens: Tokens, learnt: Learnt, n: int) -> Counts:
    """Terms of 1 … n tokens, counted per text by their numbers in the vocabulary."""
    width = len(learnt["hashes"])
    return gathered(_places(tokens, learnt, n), width)


def gathered(places: Iterator[tuple[Any, Any, int]], width: int) -> Counts:
    """(numbers, rows, count of rows) of some texts after the others → how often each is there."""
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
    """Row and number in one word, as short as it can be: short ones are sorted faster."""
    kind = np.uint32 if count << _bits(width) <= 1 << 32 else np.uint64
    keys = rows.astype(kind) << kind(_bits(width))
    keys |= numbers.astype(kind)
    return keys


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
