"""Tables of rows by id, made on first sight: where embeddings without a vocabulary live."""

from echelon.optim.rows.merge import RowGradients, merged
from echelon.optim.rows.rows import Rows

__all__ = ["RowGradients", "Rows", "merged"]
