"""Hosts of ranks: who shares one, and by which address one reaches another."""

import socket
from contextlib import suppress
from dataclasses import dataclass

import msgspec
import psutil
import torch

from moeserve.parallel import Group

_RECORD_BYTES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Names of the host a rank runs on, by which two ranks tell whether they share it."""

    name: str
    ipv4: list[str]


def exchange(value: object, group: Group, device: torch.device) -> list[bytes]:
    """JSON of every member's value, in rank order."""
    record = msgspec.json.encode(value)
    assert len(record) <= _RECORD_BYTES, f"a record of {len(record)} bytes is too long to exchange"
    mine = torch.zeros(_RECORD_BYTES, dtype=torch.uint8)
    mine[: len(record)] = torch.frombuffer(bytearray(record), dtype=torch.uint8)
    return [row.numpy().tobytes().rstrip(b"\0") for row in group.all_gather(mine.to(device)).cpu()]


def this_host() -> Host:
    addresses = [a.address for nic in psutil.net_if_addrs().values() for a in nic if a.family == socket.AF_INET]
    return Host(name=socket.gethostname()[:256], ipv4=sorted(a for a in addresses if not a.startswith("127."))[:32])


def address_towards(peer: Host, *, this: Host) -> str:
    """This host's address on the way to `peer`: loopback where it is the same host."""
    foreign = [address for address in peer.ipv4 if address not in this.ipv4]
    if peer == this or not foreign:
        return "127.0.0.1"
    for address in foreign:
        # Nothing is sent: the kernel only looks up the route.
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return str(probe.getsockname()[0])
    raise OSError(f"host {this.name} has no route to host {peer.name} ({', '.join(foreign)})")
