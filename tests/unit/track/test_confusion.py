"""The confusion matrix, small and large."""

from __future__ import annotations

import math
import re

from echelon.track.report.page import Outcome, confusion, mistakes, precisions, recalls

THREE = Outcome(("cat", "dog", "ox"), ((8, 2, 0), (1, 9, 0), (0, 0, 0)))


def test_recall_and_precision_are_those_of_rows_and_columns() -> None:
    assert recalls(THREE)[:2] == [0.8, 0.9]
    assert math.isnan(recalls(THREE)[2])
    assert precisions(THREE)[:2] == [8 / 9, 9 / 11]
    assert math.isnan(precisions(THREE)[2])


def test_mistakes_come_most_frequent_first() -> None:
    assert mistakes(THREE) == [(0, 1, 2), (1, 0, 1)]


def test_the_matrix_shows_every_count_once() -> None:
    text = confusion(THREE)
    cells = re.findall(r'class="(hit|miss)[^"]*"[^>]*>(\d+)<', text)
    assert cells == [("hit", "8"), ("miss", "2"), ("miss", "1"), ("hit", "9")]
    assert text.count('class="none"') == 5
    assert 'title="cat → dog: 2 of 10 (20.0%)"' in text
    assert "85%" in text, "17 of 20"


def test_a_perfect_model_makes_no_mistakes() -> None:
    assert "None." in confusion(Outcome(("a", "b"), ((3, 0), (0, 4))))


def test_too_many_classes_become_lists() -> None:
    size = 60
    rows = tuple(
        tuple((10 if i == j else 3 if j == (i + 1) % size else 0) for j in range(size))
        for i in range(size)
    )
    rows = ((1, 9, *[0] * 58), *rows[1:])
    text = confusion(Outcome(tuple(map(str, range(size))), rows))
    assert "<table" not in text
    assert "Hardest of 60 classes" in text
    assert text.index("10%") < text.index("77%")


def test_thirty_classes_are_still_a_matrix() -> None:
    rows = tuple(tuple(5 if i == j else 0 for j in range(30)) for i in range(30))
    text = confusion(Outcome(tuple(f"class {i}" for i in range(30)), rows))
    assert text.count("<tr>") == 31
    assert "dense tilted" in text
