"""Which sockets of a process other hosts can reach."""

import ipaddress
from contextlib import suppress

import psutil


def sockets(process: psutil.Process) -> dict[tuple[str, int], str]:
    """What the process listens on, or receives datagrams at: address and port, and the process's command."""
    with suppress(psutil.Error):
        command = " ".join(process.cmdline())[-160:]
        return {
            (entry.laddr.ip, entry.laddr.port): command
            for entry in process.net_connections("inet")
            # A connected datagram socket hears its peer alone; libraries ask with one which address leads out.
            if entry.status == psutil.CONN_LISTEN or (entry.status == psutil.CONN_NONE and not entry.raddr)
        }
    return {}


def open_doors(sockets: dict[tuple[str, int], str]) -> dict[tuple[str, int], str]:
    """Those that are bound to more than the loopback."""

    def is_loopback(address: str) -> bool:
        number = ipaddress.ip_address(address)
        return (getattr(number, "ipv4_mapped", None) or number).is_loopback

    return {place: command for place, command in sockets.items() if not is_loopback(place[0])}
