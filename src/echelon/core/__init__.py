"""Types, protocols, errors and config models. Imports no sibling, and no torch at import time."""
