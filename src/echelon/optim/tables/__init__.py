"""Tables of rows by id, made on first sight: where embeddings without a vocabulary live."""

from echelon.optim.tables.table import RowGradients, Rows, merged

__all__ = ["RowGradients", "Rows", "merged"]
