"""Where the supervisor listens on behalf of the coordinator and the servers."""

from __future__ import annotations

import socket

from echelon import strategy
from echelon.core.config import Job
from echelon.core.errors import ConfigError

BACKLOG = 1024


def listening(section: str, host: str) -> socket.socket:
    """A socket at a free port of `host`, which is the address that this section gives."""
    opened = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        opened.bind((host, 0))
        opened.listen(BACKLOG)
    except (OSError, TypeError) as error:  # TypeError: no name at all
        opened.close()
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{section}.address = {host!r}: nothing can listen there ({reason}); give an IPv4 "
            f"address or a name of this machine",
            (section, "address"),
        ) from None
    except BaseException:
        opened.close()
        raise
    return opened


def check_addresses(job: Job) -> None:
    """Before there is a run that would be left behind: can anybody listen where the job says?"""
    listening("elastic", job.elastic.address).close()
    if strategy.has_servers(job):
        listening("parameter_server", job.parameter_server.address).close()
