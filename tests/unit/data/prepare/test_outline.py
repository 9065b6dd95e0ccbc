"""A recipe against its columns: segments of cleaning steps, and columns of categories."""

from __future__ import annotations

import pyarrow as pa

from echelon.data.prepare import recipe_from
from echelon.data.prepare.outline import Outline, segments


def test_steps_that_must_see_all_records_end_a_segment() -> None:
    kinds = [
        {"kind": "text", "column": "t"},
        {"kind": "missing", "column": "a", "how": "mean"},
        {"kind": "duplicates", "columns": ["t"]},
    ]
    base = {"read": "x", "keep": ["t"], "write": {"folder": "o"}}
    found = segments(recipe_from({**base, "clean": kinds}).steps())
    assert [(s.start, s.stop, s.looks, s.compares, s.last) for s in found] == [
        (0, 1, 1, None, False),
        (1, 2, None, 2, True),
    ]
    (only,) = segments([])
    assert (only.start, only.stop, only.last) == (0, 0, True)


def test_texts_that_serve_only_as_categories_are_dictionary_encoded() -> None:
    names = ["town", "street", "kept", "label", "told", "age"]
    kinds = [pa.large_utf8()] * 5 + [pa.int64()]
    recipe = recipe_from(
        {
            "read": "raw.csv",
            "split": {"by": "stratified", "column": "label", "train": 0.9, "test": 0.1},
            "features": [
                {"kind": "one_hot", "from": ["town", "street", "kept", "label", "age"], "to": "x"},
                {"kind": "target", "from": "town", "to": "t", "label": "told", "of": "class"},
                {"kind": "hashed", "from": "street", "to": "h", "buckets": 10},
            ],
            "keep": ["kept"],
            "write": {"folder": "out"},
        }
    )
    schema = pa.schema(list(zip(names, kinds, strict=True)))
    outline = Outline(recipe, schema, recipe.steps(), recipe.made())
    assert outline.categories == {"town"}
