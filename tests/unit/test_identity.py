from __future__ import annotations

import hashlib

import pytest

from narwhal_trio.outcomes import Condition, Refusal
from narwhal_trio.protocol.identity import Authenticator, KeysError, parse_keys


def _line(name: str, key: str) -> str:
    return f"{name} sha256:{hashlib.sha256(key.encode()).hexdigest()}"


KEYS = parse_keys(
    f"# clients\n{_line('alice', 'ka')}\n\n{_line('bob', 'kb')}  # spare\n{_line('bob', 'kb2')} weight=2.5\n"
).clients


def _refused(auth: Authenticator, headers: list[tuple[bytes, bytes]], peer: str = "127.0.0.1") -> str:
    with pytest.raises(Refusal) as caught:
        auth.identify(headers, peer)
    assert caught.value.condition is Condition.UNAUTHENTICATED
    return caught.value.message


def test_without_a_mode_nobody_is_asked() -> None:
    assert Authenticator().identify([(b"authorization", b"Bearer whatever")], "203.0.113.1") == ""


@pytest.mark.parametrize(
    "header",
    [
        (b"authorization", b"Bearer kb"),
        (b"authorization", b"bearer   kb"),
        (b"x-api-key", b"kb"),
        (b"x-api-key", b"kb2"),
    ],
)
def test_a_key_names_its_client(header: tuple[bytes, bytes]) -> None:
    assert Authenticator("api_keys", KEYS).identify([header], "") == "bob"


@pytest.mark.parametrize(
    ("headers", "says"),
    [
        ([], "required"),
        ([(b"authorization", b"Bearer kx")], "not valid"),
        ([(b"authorization", b"Basic kb")], "not valid"),
        ([(b"authorization", b"Bearer ")], "not valid"),
        ([(b"authorization", b"Bearer ka"), (b"x-api-key", b"kb")], "several"),
        ([(b"x-authenticated-client", b"alice")], "required"),
    ],
)
def test_anything_else_is_401(headers: list[tuple[bytes, bytes]], says: str) -> None:
    assert says in _refused(Authenticator("api_keys", KEYS), headers)


def test_many_keys_are_found_like_few() -> None:
    keys = parse_keys("\n".join(_line(f"c{n}", f"key{n}") for n in range(500))).clients
    auth = Authenticator("api_keys", keys)
    assert auth.identify([(b"x-api-key", b"key499")], "") == "c499"
    _refused(auth, [(b"x-api-key", b"key500")])


def test_all_problems_of_a_keys_file_at_once() -> None:
    with pytest.raises(KeysError) as caught:
        parse_keys(f"alice\n{_line('bob', 'k')}\n{_line('eve', 'k')}\nx md5:00\n")
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["line 1", "line 3", "line 4"]
    with pytest.raises(KeysError, match="no key"):
        parse_keys("# nothing\n")


def test_an_ingress_is_believed_from_its_own_addresses_only() -> None:
    auth = Authenticator.of("trusted_header", {}, "X-Client", ["10.0.0.0/8", "fd00::/8"])
    named = [(b"x-client", b"team-a")]
    assert auth.identify(named, "10.1.2.3") == "team-a"
    assert auth.identify(named, "::ffff:10.1.2.3") == "team-a"
    assert auth.identify(named, "fd00::1") == "team-a"
    for peer in ("11.0.0.1", "", "not an address"):
        assert "ingress" in _refused(auth, named, peer)
    assert "exactly one" in _refused(auth, [], "10.1.2.3")
    assert "exactly one" in _refused(auth, [*named, *named], "10.1.2.3")
    assert "exactly one" in _refused(auth, [(b"x-client", b"two words")], "10.1.2.3")


def test_weights_are_read_and_checked() -> None:
    assert parse_keys(f"{_line('bob', 'k')} weight=2.5\n{_line('eve', 'x')}").weights == {"bob": 2.5}
    with pytest.raises(KeysError, match="above 0"):
        parse_keys(f"{_line('bob', 'k')} weight=0")
