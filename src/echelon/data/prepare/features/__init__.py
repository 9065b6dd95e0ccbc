"""Every kind of feature, imported when a recipe asks for it."""

from __future__ import annotations

from collections.abc import Mapping

from echelon.data.prepare.feature import Feature
from echelon.data.prepare.kinds import chosen

_HERE = "echelon.data.prepare.features"
_TEXT = "echelon.data.prepare.text"
FEATURES: Mapping[str, str] = {
    "classes": f"{_HERE}.classes:Classes",
    "standardise": f"{_HERE}.standardise:Standardise",
    "min_max": f"{_HERE}.min_max:MinMax",
    "bins": f"{_HERE}.bins:Bins",
    "one_hot": f"{_HERE}.one_hot:OneHot",
    "hashed": f"{_HERE}.hashed:Hashed",
    "target": f"{_HERE}.target:Target",
    "cross": f"{_HERE}.cross:Cross",
    "join": f"{_HERE}.join:Join",
    "sparse": f"{_HERE}.sparse:SparseRows",
    "pca": f"{_HERE}.pca:PCA",
    "svd": f"{_HERE}.svd:SVD",
    "select": f"{_HERE}.select:Select",
    "image": f"{_HERE}.image:Image",
    "tokens": f"{_TEXT}.ids:TokenIds",
    "one_hot_text": f"{_TEXT}.bag:OneHotText",
    "bag": f"{_TEXT}.bag:Bag",
    "tfidf": f"{_TEXT}.bag:Tfidf",
    "hashed_text": f"{_TEXT}.hashed_text:HashedText",
    "word2vec": f"{_TEXT}.word2vec:Word2Vec",
    "sentences": f"{_TEXT}.sentences:Sentences",
}
"""Kind → `module:Class`."""


def feature_kind(kind: str) -> type[Feature]:
    """The class of a kind of feature."""
    found: type[Feature] = chosen("kind of feature", kind, FEATURES)
    return found
