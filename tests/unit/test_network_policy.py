"""What allow-lists mean."""

from __future__ import annotations

import ipaddress

import pytest

from sandboxes.errors import SandboxStartFailed
from sandboxes.network.policy import Refused, check_policy, normalise_host, parse_rule, validate_allow
from sandboxes.protocol import NetworkMode, NetworkPolicy


@pytest.mark.parametrize(
    ("entry", "host", "port"),
    [
        ("pypi.org", "pypi.org", 443),
        ("pypi.org", "pypi.org", 80),
        ("PyPI.org.", "pypi.ORG", 443),
        ("pypi.org", "pypi.org.", 443),
        ("pypi.org:8443", "pypi.org", 8443),
        ("*.example.org", "a.example.org", 443),
        ("*.example.org", "b.a.example.org", 80),
        ("*.example.org:8443", "a.example.org", 8443),
        ("bücher.example", "xn--bcher-kva.example", 443),
        ("xn--bcher-kva.example", "BÜCHER.example", 443),
        ("straße.example", "xn--strae-oqa.example", 443),
        ("package_mirror:3141", "package_mirror", 3141),
        ("93.184.216.34", "93.184.216.34", 443),
        ("10.0.0.5:8080", "10.0.0.5", 8080),
        ("[2606:2800:220:1::1]", "[2606:2800:0220:0001:0:0:0:1]", 443),
        ("[2606:2800:220:1::1]:8443", "[2606:2800:220:1::1]", 8443),
    ],
)
def test_what_an_entry_allows(entry: str, host: str, port: int) -> None:
    assert parse_rule(entry).allows(normalise_host(host), port)


@pytest.mark.parametrize(
    ("entry", "host", "port"),
    [
        ("pypi.org", "pypi.org", 22),
        ("pypi.org:8443", "pypi.org", 443),
        ("pypi.org", "files.pypi.org", 443),
        ("pypi.org", "notpypi.org", 443),
        ("pypi.org", "pypi.org.evil.example", 443),
        ("*.example.org", "example.org", 443),
        ("*.example.org", "badexample.org", 443),
        ("93.184.216.34", "93.184.216.35", 443),
        ("pypi.org", "93.184.216.34", 443),
        ("strasse.example", "straße.example", 443),
    ],
)
def test_what_an_entry_does_not_allow(entry: str, host: str, port: int) -> None:
    assert not parse_rule(entry).allows(normalise_host(host), port)


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ("", "not a host name"),
        ("*", "not a host name"),
        ("https://pypi.org", "more than a host and a port"),
        ("pypi.org/simple", "more than a host and a port"),
        ("user@pypi.org", "more than a host and a port"),
        ("pypi.org:", "port is a number"),
        ("pypi.org:0", "port is a number"),
        ("pypi.org:65536", "port is a number"),
        ("pypi.org:http", "port is a number"),
        ("pypi.org:443:443", "brackets"),
        ("2606:2800::1", "brackets"),
        ("[2606:2800::zz]", "2606:2800::zz"),
        ("*.org", "two labels"),
        ("*.10.0.0.1", "two labels"),
        ("a.*.example.org", "not a host name"),
        ("pypi..org", "not a host name"),
        ("-pypi.org", "not a host name"),
        ("pypi org", "not a host name"),
        ("a" * 64 + ".org", "not a host name"),
        ("127.1", "octets"),
        ("0x7f000001", "octets"),
        ("2130706433", "octets"),
        ("010.0.0.1", "zero"),
        ("localhost", "never"),
        ("localhost.:8000", "never"),
        ("db.localhost", "never"),
        ("127.0.0.1:5432", "never"),
        ("127.0.0.53", "never"),
        ("0.0.0.0", "never"),  # noqa: S104 - not to bind to
        ("[::1]:5432", "never"),
        ("[::]", "never"),
        ("[::ffff:127.0.0.1]", "never"),
        ("[fe80::1%eth0]", "never"),
        ("169.254.169.254", "never"),
        ("224.0.0.1", "never"),
    ],
)
def test_entries_that_mean_nothing_are_refused_with_what_is_wrong(entry: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as raised:
        validate_allow(["pypi.org", entry])
    assert repr(entry) in str(raised.value)


@pytest.mark.parametrize(
    ("entry", "address"),
    [
        ("example.org", "93.184.216.34"),
        ("example.org", "2606:2800:220:1::1"),
        ("mirror:3141", "10.0.0.7"),
        ("mirror:3141", "fd12::7"),
        ("mirror:3141", "100.64.0.1"),
        ("10.0.0.5", "10.0.0.5"),
    ],
)
def test_addresses_that_a_name_may_stand_for(entry: str, address: str) -> None:
    parse_rule(entry).check_address(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    ("entry", "address"),
    [
        ("example.org", "127.0.0.1"),
        ("example.org", "10.0.0.7"),
        ("example.org", "192.168.1.1"),
        ("example.org", "100.64.0.1"),
        ("example.org", "fd12::7"),
        ("example.org", "::ffff:10.0.0.7"),
        ("example.org", "169.254.169.254"),
        ("example.org", "0.0.0.0"),  # noqa: S104 - not to bind to
        ("example.org", "255.255.255.255"),
        ("example.org", "2002:7f00:1::"),
        ("example.org", "64:ff9b::7f00:1"),
        ("*.example.org:5432", "10.0.0.7"),  # whoever owns the domain chooses names and addresses
        ("mirror:3141", "127.0.0.1"),
        ("mirror:3141", "::1"),
        ("mirror:3141", "::ffff:127.0.0.1"),
        ("mirror:3141", "169.254.169.254"),
        ("mirror:3141", "fe80::1"),
    ],
)
def test_addresses_that_a_name_may_not_stand_for(entry: str, address: str) -> None:
    with pytest.raises(Refused, match="its address is"):
        parse_rule(entry).check_address(ipaddress.ip_address(address))


def test_full_network_needs_the_nodes_permission() -> None:
    full = NetworkPolicy(NetworkMode.FULL)
    check_policy(full, full_permitted=True)
    with pytest.raises(SandboxStartFailed, match="PRORL_SANDBOX_FULL_NETWORK"):
        check_policy(full, full_permitted=False)
    check_policy(NetworkPolicy(NetworkMode.ALLOW_LIST, ("pypi.org",)), full_permitted=False)
    with pytest.raises(SandboxStartFailed, match=r"'pypi\.org/'"):
        check_policy(NetworkPolicy(NetworkMode.ALLOW_LIST, ("pypi.org/",)), full_permitted=False)
