"""What an allow-list means: which hosts and ports, and which addresses their names may stand for. No Django."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import idna

from sandboxes.errors import SandboxStartFailed
from sandboxes.protocol import NetworkMode, NetworkPolicy

_DEFAULT_PORTS = (80, 443)
_ENTRY = re.compile(r"(?P<host>\[[^\]]*\]|[^:]*)(?::(?P<port>[^:]*))?")
_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
_NUMERIC_LABEL = re.compile(r"[0-9]+|0x[0-9a-f]*")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Refused(Exception):
    """The network policy does not allow it; the message says why and is for whoever runs inside."""


@dataclass(frozen=True)
class Rule:
    """One entry of an allow-list. `host` is normalised, without the asterisk of a wildcard; `port` None means 80 and 443."""

    host: str
    port: int | None
    subdomains: bool

    def allows(self, host: str, port: int) -> bool:
        """Whether the normalised `host` and the port are meant."""
        if port not in (_DEFAULT_PORTS if self.port is None else (self.port,)):
            return False
        return host.endswith(f".{self.host}") if self.subdomains else host == self.host

    def check_address(self, address: Address) -> None:
        """Whether the rule's host may be at `address`: names are under the control of whoever owns the domain.

        Raises Refused for loopback and the like always, and for addresses inside the cluster and of this host unless the entry
        names this one host with its port, or is the address.
        """
        if never_allowed(address):
            raise Refused("its address is one that no sandbox may reach")
        named = (self.port is not None and not self.subdomains) or self.host == str(address)
        if not named and (not address.is_global or _is_own(address)):
            raise Refused("its address is private, which only an entry HOST:PORT allows")


def check_policy(policy: NetworkPolicy, *, full_permitted: bool) -> None:
    """For backends, before a start. Raises SandboxStartFailed for what this node does not permit, or nobody can keep."""
    if policy.mode is NetworkMode.FULL and not full_permitted:
        raise SandboxStartFailed("network mode 'full' is not permitted on this node: set PRORL_SANDBOX_FULL_NETWORK=true")
    try:
        validate_allow(policy.allow)
    except ValueError as error:
        raise SandboxStartFailed(f"allow-list: {error}") from error


def validate_allow(entries: Sequence[str]) -> None:
    """Raises ValueError with the first entry that means nothing or can never be allowed, and what to write instead."""
    for entry in entries:
        parse_rule(entry)


def parse_rule(entry: str) -> Rule:
    """Raises ValueError, see `validate_allow`."""
    if "/" in entry or "@" in entry:
        raise ValueError(f"{entry!r} is more than a host and a port: write for instance 'pypi.org' or 'pypi.org:8443'")
    try:
        host, port = _split(entry)
        subdomains = host.startswith("*.")
        host = normalise_host(host.removeprefix("*."))
    except ValueError as error:
        raise ValueError(f"{entry!r}: {error}") from None
    address = _address(host)
    if subdomains and (address is not None or "." not in host):
        raise ValueError(f"{entry!r}: '*.' needs a domain of at least two labels after it, for instance '*.example.org'")
    if host == "localhost" or host.endswith(".localhost") or (address is not None and never_allowed(address)):
        raise ValueError(f"{entry!r} can never be allowed: forward a port to reach a service of the node")
    return Rule(host, port, subdomains)


def normalise_host(host: str) -> str:
    """Lower case, without trailing dot, names as A-labels, IPv6 addresses without brackets. Raises ValueError."""
    if host.startswith("[") and host.endswith("]"):
        return str(ipaddress.IPv6Address(host[1:-1].partition("%")[0]))
    if ":" in host:
        raise ValueError("an IPv6 address is written in brackets")
    name = host.removesuffix(".").lower()
    if not name.isascii():
        try:
            name = idna.encode(name, uts46=True).decode()
        except idna.IDNAError as error:
            raise ValueError(f"no internationalised domain name: {error}") from None
    labels = name.split(".")
    if len(name) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise ValueError("not a host name")
    if _NUMERIC_LABEL.fullmatch(labels[-1]):
        return str(ipaddress.IPv4Address(name))  # of the many ways to write one, only the plain one
    return name


def never_allowed(address: Address) -> bool:
    """Whether no entry can allow it: the node's own services live there, or nothing a policy could name."""
    if isinstance(address, ipaddress.IPv6Address) and (address.ipv4_mapped or address.sixtofour or address.teredo):
        return True  # stands for an IPv4 address, which is to be named as one
    return address.is_loopback or address.is_link_local or address.is_multicast or address.is_reserved or address.is_unspecified


def _split(entry: str) -> tuple[str, int | None]:
    match = _ENTRY.fullmatch(entry)
    if match is None:
        raise ValueError("an IPv6 address is written in brackets")
    if match["port"] is None:
        return match["host"], None
    if not (match["port"].isascii() and match["port"].isdigit() and 0 < int(match["port"]) < 65536):
        raise ValueError("a port is a number from 1 to 65535")
    return match["host"], int(match["port"])


def _address(host: str) -> Address | None:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host)
    return None


def _is_own(address: Address) -> bool:
    """Whether an interface of this host has it: only then can a socket be bound to it."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((str(address), 0))
    except OSError as error:
        return error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
    return True
