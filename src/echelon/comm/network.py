"""Which of this host's addresses is which."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

_SIOCGIFADDR = 0x8915
_LOOPBACK = "lo"


def is_loopback(address: str) -> bool:
    """Whether it is an address, and one that never leaves its host."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:  # a name
        return False


def interface_of(address: str) -> str | None:
    """The network interface that has this address; None if none is known to."""
    if is_loopback(address):
        return _LOOPBACK
    wanted = ipaddress.ip_address(address)
    if wanted.version == 6:
        return _of_six(wanted.packed.hex())
    return next((name for _, name in socket.if_nameindex() if _four(name) == address), None)


def _four(interface: str) -> str | None:
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking, _SIOCGIFADDR, request)
        except OSError:  # it has none
            return None
    return socket.inet_ntoa(answer[20:24])


def _of_six(digits: str) -> str | None:
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except FileNotFoundError:  # a kernel without it
        return None
    return next((line.split()[-1] for line in lines if line.startswith(digits)), None)
