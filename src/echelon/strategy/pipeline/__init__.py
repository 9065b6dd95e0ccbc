"""Every member has a few layers of the model, and the batch comes by in pieces."""
