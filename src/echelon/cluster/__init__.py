"""The processes of a run and how they find, watch and outlive each other.

In reading order:

    start          choose the processes of a run; join a run
    supervisor     `launch`: start the processes of this machine, watch them, end them together
    workers        the member processes: fork, pipes, output
    services       coordinator and parameter servers: processes that are restarted when they end
    health         heartbeats, errors across processes, and which member caused a failure
    elastic_group  the group of members of an elastic run, formed again after each loss or join
    coordinator/   who takes part and what is done: the service that every elastic run has
    chaos/         `echelon chaos`: runs under injected faults
    environment    environment variables, fork safety and signals

Import `start` and `supervisor` in the function that needs them, not at the top of a command: they
import torch, which takes seconds.
"""
