"""From raw files to shards: read, clean, split, make features, write.

Nothing here imports torch at its top: worker processes are to be light.
"""
