"""Golden files: what training and preparing produced when the files were recorded.

`python -m tests.golden.record` writes them anew. Do that only for an intended change of results,
and name the reason in the commit message.
"""
