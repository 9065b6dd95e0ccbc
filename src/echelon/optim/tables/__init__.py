"""Tables of rows by id, for embeddings without a fixed vocabulary: rows are made on first use."""

from echelon.optim.tables.table import RowGradients, Rows, merged

__all__ = ["RowGradients", "Rows", "merged"]
