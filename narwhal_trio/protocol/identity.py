"""Who is asking: client names from API keys or from a trusted ingress. Pure; the keys file's text is the caller's to read."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from typing import TYPE_CHECKING, Final

import attrs

from narwhal_trio.outcomes import Condition, Refusal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["Authenticator", "KeyRing", "KeysError", "parse_keys"]

_LINE: Final = re.compile(
    r"(?P<name>[A-Za-z0-9._@-]{1,64})\s+sha256:(?P<digest>[0-9A-Fa-f]{64})(?:\s+weight=(?P<weight>[0-9]{1,4}(?:\.[0-9]{1,3})?))?"
)
_NAME: Final = re.compile(rb"[!-~]{1,128}")
_BEARER: Final = re.compile(rb"[Bb][Ee][Aa][Rr][Ee][Rr] +(?P<key>[!-~]+)")

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class KeysError(ValueError):
    """The keys file is unusable; `problems` holds one line per fault."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = list(problems)


@attrs.frozen
class KeyRing:
    """clients: digest of each key to its client's name. weights: clients whose share of a fair queue isn't 1."""

    clients: dict[bytes, str] = attrs.field(factory=dict)
    weights: dict[str, float] = attrs.field(factory=dict)


def parse_keys(text: str) -> KeyRing:
    """Keys from lines `NAME sha256:HEX [weight=N]`; blank lines and what follows a `#` are comments.

    A client may have several keys; a key belongs to one client. Raises `KeysError` with all problems.
    """
    keys: dict[bytes, str] = {}
    weights: dict[str, float] = {}
    problems: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        match = _LINE.fullmatch(entry)
        if match is None:
            problems.append(
                f"line {number}: must be NAME sha256:HEX with 64 hexadecimal digits, and weight=N if at all"
            )
            continue
        if match["weight"] is not None:
            weights[match["name"]] = float(match["weight"])
            if not weights[match["name"]]:
                problems.append(f"line {number}: weight must be above 0")
        digest = bytes.fromhex(match["digest"])
        if keys.setdefault(digest, match["name"]) != match["name"]:
            problems.append(f"line {number}: this key belongs to {keys[digest]} already")
    if not keys and not problems:
        problems.append("holds no key")
    if problems:
        raise KeysError(problems)
    return KeyRing(keys, weights)


@attrs.frozen
class Authenticator:
    """Decides who a client is by `auth.mode`.

    keys: for `api_keys`, as `parse_keys` makes them. trusted_header (lower case) and proxies: for `trusted_header`.
    """

    mode: str = "none"
    keys: Mapping[bytes, str] = attrs.field(factory=dict)
    trusted_header: bytes = b"x-authenticated-client"
    proxies: tuple[Network, ...] = ()

    @classmethod
    def of(cls, mode: str, keys: Mapping[bytes, str], trusted_header: str, proxies: Iterable[str]) -> Authenticator:
        """Raises `ValueError` for a proxy that is no CIDR."""
        networks = tuple(ipaddress.ip_network(proxy) for proxy in proxies)
        return cls(mode, keys, trusted_header.lower().encode(), networks)

    def identify(self, headers: Iterable[tuple[bytes, bytes]], peer: str) -> str:
        """The client's name, "" where nobody asks for one. Raises `Refusal` (401) for a missing or wrong credential."""
        if self.mode == "none":
            return ""
        if self.mode == "trusted_header":
            return self._from_ingress(headers, peer)
        return self._from_key(headers)

    def _from_key(self, headers: Iterable[tuple[bytes, bytes]]) -> str:
        presented: set[bytes] = set()
        for name, value in headers:
            if name == b"authorization":
                match = _BEARER.fullmatch(value)
                presented.add(match["key"] if match else b"")
            elif name == b"x-api-key":
                presented.add(value)
        if not presented:
            raise _unauthenticated("an API key is required: send it as `authorization: Bearer KEY`")
        if len(presented) > 1:
            raise _unauthenticated("several different credentials were sent; send one")
        digest = hashlib.sha256(presented.pop()).digest()
        # What is looked up is a digest that the client cannot steer, so the time of the lookup tells nothing about any key.
        for known, client in self.keys.items() if len(self.keys) <= 64 else self._candidates(digest):
            if hmac.compare_digest(known, digest):
                return client
        raise _unauthenticated("the API key is not valid")

    def _candidates(self, digest: bytes) -> list[tuple[bytes, str]]:
        client = self.keys.get(digest)
        return [] if client is None else [(digest, client)]

    def _from_ingress(self, headers: Iterable[tuple[bytes, bytes]], peer: str) -> str:
        if not self._trusts(peer):
            raise _unauthenticated(
                "clients are named by the site's ingress; this peer is not one of auth.trusted_proxies"
            )
        names = [value for name, value in headers if name == self.trusted_header]
        if len(names) != 1 or _NAME.fullmatch(names[0]) is None:
            raise _unauthenticated(f"the ingress must send exactly one {self.trusted_header.decode()} header")
        return names[0].decode("ascii")

    def _trusts(self, peer: str) -> bool:
        try:
            address = ipaddress.ip_address(peer)
        except ValueError:
            return False
        address = getattr(address, "ipv4_mapped", None) or address
        return any(address.version == network.version and address in network for network in self.proxies)


def _unauthenticated(message: str) -> Refusal:
    return Refusal(Condition.UNAUTHENTICATED, message)
