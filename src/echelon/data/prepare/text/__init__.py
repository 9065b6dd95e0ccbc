"""Features made of text.

tokenise.py cuts texts into tokens; counts.py counts terms (runs of tokens) per block and over all
blocks; vocabulary.py chooses the terms to keep; encode.py turns texts into ids or sparse rows;
embeddings.py trains or applies word and sentence vectors; bpe.py is byte pair encoding.
"""
