"""The base that all other packages build on: errors, types, interfaces and the configuration.

Start with types.py and interfaces.py. Nothing here imports another package of Echelon, and
importing it does not import torch.
"""
