"""The parameter-server strategy: the trainers' side. The servers are in `echelon.server`."""

from echelon.strategy.parameter_server.strategy import ParameterServer

__all__ = ["ParameterServer"]
