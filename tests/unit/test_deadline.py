"""Deadlines asked for in headers: one grammar, no guessing."""

from __future__ import annotations

import math

import pytest

from narwhal_trio.outcomes import Condition, Refusal
from narwhal_trio.protocol.deadline import Deadline, check_timeout, parse_deadline

OWN = b"x-request-timeout"
GRPC = b"grpc-timeout"
SDK = b"x-stainless-read-timeout"


def parse(*headers: tuple[bytes, bytes], cap: float = 600.0, on: bool = True, sdk: bool = False) -> Deadline:
    return parse_deadline([(b"host", b"x"), *headers], cap_s=cap, client_deadlines=on, honour_sdk_timeout=sdk)


def refused(*headers: tuple[bytes, bytes]) -> Refusal:
    with pytest.raises(Refusal) as caught:
        parse(*headers)
    assert caught.value.condition is Condition.INVALID_DEADLINE
    assert caught.value.param is not None
    assert caught.value.param in caught.value.message
    return caught.value


def test_no_header_means_the_cap() -> None:
    assert parse() == Deadline(600.0, None, None)


@pytest.mark.parametrize(
    ("value", "seconds"), [(b"5", 5.0), (b"2.5", 2.5), (b"0.001", 0.001), (b"007", 7.0), (b"600", 600.0), (b"1.", None)]
)
def test_plain_decimals(value: bytes, seconds: float | None) -> None:
    if seconds is None:
        refused((OWN, value))
    else:
        assert parse((OWN, value)) == Deadline(seconds, seconds, "x-request-timeout")


@pytest.mark.parametrize("value", [b"0", b"0.0", b"00", b"0." + b"0" * 400 + b"1"])
def test_zero_is_expired_on_arrival(value: bytes) -> None:
    assert parse((OWN, value)).budget_s == 0.0


def test_more_than_the_cap_is_clamped() -> None:
    assert parse((OWN, b"600.5")) == Deadline(600.0, 600.5, "x-request-timeout")
    endless = parse((OWN, b"9" * 400))
    assert endless.budget_s == 600.0
    assert endless.asked_s is not None
    assert math.isfinite(endless.asked_s)


@pytest.mark.parametrize(
    "value",
    [
        *(
            b"",
            b" ",
            b"abc",
            b"-1",
            b"-0",
            b"+1",
            b"1e3",
            b"1E3",
            b"inf",
            b"Infinity",
            b"nan",
            b"NaN",
            b" 5 ",
            b"5 ",
            b"5s",
        ),
        *(
            b"5,",
            b"5,5",
            b"5;q=1",
            b"0x5",
            b"1_000",
            b"1.2.3",
            b".",
            b".5",
            b"--1",
            b"5\x00",
            b"\xd9\xa5",
            b"\xb2",
            b'"5"',
        ),
    ],
)
def test_anything_else_is_refused(value: bytes) -> None:
    assert refused((OWN, value)).param == "x-request-timeout"


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (b"1H", 600.0),
        (b"2M", 120.0),
        (b"7S", 7.0),
        (b"250m", 0.25),
        (b"500u", 5e-4),
        (b"99999999n", 0.099999999),
        (b"0S", 0.0),
    ],
)
def test_grpc_form(value: bytes, seconds: float) -> None:
    deadline = parse((GRPC, value))
    assert deadline.budget_s == pytest.approx(seconds)
    assert deadline.source == "grpc-timeout"


@pytest.mark.parametrize(
    "value", [b"", b"S", b"5", b"5s", b"5h", b"1.5S", b"-1S", b"123456789S", b"5 S", b" 5S", b"5SS", b"\xd9\xa5S"]
)
def test_grpc_form_refused(value: bytes) -> None:
    assert refused((GRPC, value)).param == "grpc-timeout"


def test_both_forms_or_one_twice_are_refused() -> None:
    assert refused((OWN, b"5"), (GRPC, b"5S")).param == "x-request-timeout"
    assert refused((OWN, b"5"), (OWN, b"5")).param == "x-request-timeout"
    assert refused((GRPC, b"5S"), (GRPC, b"5S")).param == "grpc-timeout"


def test_sdk_timeout_counts_only_when_honoured_and_usable() -> None:
    assert parse((SDK, b"30")) == Deadline(600.0)
    assert parse((SDK, b"30"), sdk=True) == Deadline(30.0, 30.0, "x-stainless-read-timeout")
    assert parse((SDK, b"30"), (OWN, b"5"), sdk=True).budget_s == 5.0
    assert parse((SDK, b"30"), (GRPC, b"5S"), sdk=True).budget_s == 5.0
    for useless in (b"NOT_GIVEN", b"None", b"", b"0", b"-1", b"nan", b"inf", b"1e3"):
        assert parse((SDK, useless), sdk=True) == Deadline(600.0)
    assert parse((SDK, b"30"), (SDK, b"40"), sdk=True) == Deadline(600.0)


def test_switched_off_no_header_is_read() -> None:
    assert parse((OWN, b"nonsense"), (GRPC, b"5S"), (SDK, b"1"), on=False, sdk=True) == Deadline(600.0)


def test_timeout_fields_follow_the_same_rule() -> None:
    assert check_timeout(None, cap_s=60.0, param="timeout_s") == Deadline(60.0)
    assert check_timeout(2.5, cap_s=60.0, param="timeout_s") == Deadline(2.5, 2.5, "timeout_s")
    assert check_timeout(0, cap_s=60.0, param="timeout_s").budget_s == 0.0
    assert check_timeout(10**400, cap_s=60.0, param="timeout_s").budget_s == 60.0
    bad_values: list[object] = [True, "5", -1, -(10**400), -0.5, math.nan, math.inf, -math.inf, [], {}]
    for bad in bad_values:
        with pytest.raises(Refusal) as caught:
            check_timeout(bad, cap_s=60.0, param="timeout_s")
        assert caught.value.param == "timeout_s"
