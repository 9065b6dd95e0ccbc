"""The parameter server: who holds the weights, applies updates and decides which are made."""
