"""Weights and optimizer on servers; trainers bring gradients and take weights."""

from echelon.strategy.parameter_server.strategy import ParameterServer

__all__ = ["ParameterServer"]
