"""Cutting objects: exact bytes, and nothing let through that is not JSON or would harm an engine."""

from __future__ import annotations

import pytest

from narwhal_trio.protocol.rawjson import (
    MAX_CONTAINERS,
    MAX_DEPTH,
    MAX_DIGITS,
    DuplicateKeyError,
    JsonError,
    NotAnObjectError,
    join_object,
    split_array,
    split_object,
)


def test_values_keep_their_bytes_and_order() -> None:
    body = b' {\n"z" : [1 , 2.50e+1,"\\u00e9"]\t,"a":9007199254740993,\r"\\u006d":{"x" :null} , "":"" } \n'
    assert list(split_object(body).items()) == [
        ("z", b'[1 , 2.50e+1,"\\u00e9"]'),
        ("a", b"9007199254740993"),
        ("m", b'{"x" :null}'),
        ("", b'""'),
    ]
    assert split_object(b"{}") == split_object(b" { } ") == {}


def test_join_is_compact_and_keeps_values() -> None:
    fields = {"b": b"[1 , 2]", 'q"\n\u00e9': b"1e5"}
    assert join_object(fields) == '{"b":[1 , 2],"q\\"\\n\u00e9":1e5}'.encode()
    assert join_object({}) == b"{}"
    assert split_object(join_object(fields)) == fields


def test_split_array() -> None:
    assert split_array(b'[ "a" ,[1, 2],{}]') == [b'"a"', b"[1, 2]", b"{}"]
    assert split_array(b"[]") == []
    assert split_array(b'"a"') is None


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"  ",
        b"{",
        b'{"a"',
        b'{"a":',
        b'{"a":1',
        b'{"a":1,',
        b'{"a":1,}',
        b'{"a":[1,]}',
        b'{"a":{"b":1,}}',
        b"{,}",
        b'{"a" 1}',
        b'{"a":{"b" 1}}',
        b"{a:1}",
        b"{'a':1}",
        b'{"a":1/**/}',
        b'{"a":tru}',
        b'{"a":[nul]}',
        b'{"a":NaN}',
        b'{"a":[Infinity]}',
        b'{"a":{"b":-Infinity}}',
        b'{"a":01}',
        b'{"a":[-01]}',
        b'{"a":1.}',
        b'{"a":.5}',
        b'{"a":+1}',
        b'{"a":1e}',
        b'{"a":0x1}',
        b'{"a":"\n"}',
        b'{"a":["\x00"]}',
        b'{"a":"\\x41"}',
        b'{"a":["\\u12g4"]}',
        b'{"a":"',
        b'{"a":1}x',
        b'{"a":1}\x00',
        b'{"a":1}{"a":1}',
        b'{"a":\x0c1}',
        b'\xef\xbb\xbf{"a":1}',
        '{"a":1}'.encode("utf-16"),
        '{"a":1}'.encode("utf-16-le"),
        '{"a":1}'.encode("utf-32-be"),
        b'{"a":"\xff"}',
        b'{"a":["\xc0\xaf"]}',
        b'{"a":{"\xff":1}}',
        b'{"a":"\xed\xa0\x80"}',
        b'{"a":"\\ud800"}',
        b'{"a":["\\udc00 and more text behind it"]}',
        b'{"a":{"b":"\\ud800\\u0041 and more"}}',
        b'{"\\ud800":1}',
        b"[1",
        b'"\xff"',
        b"nope",
    ],
)
def test_refuses_what_is_no_json(body: bytes) -> None:
    with pytest.raises(JsonError):
        split_object(body)


@pytest.mark.parametrize("body", [b"[]", b'[{"a":1}]', b'"x"', b"1", b"null", b" true ", b"1e400"])
def test_tells_json_that_is_no_object(body: bytes) -> None:
    with pytest.raises(NotAnObjectError):
        split_object(body)


@pytest.mark.parametrize(
    ("body", "key"),
    [
        (b'{"a":1,"a":1}', "a"),
        (b'{"a":1,"a":12}', "a"),
        (b'{"a":12,"a":1}', "a"),
        (b'{"a":1,"b":2,"\\u0061":3}', "a"),
        (b'{"a":{"x":1,"b":2},"a":"wxyz"}', "a"),
        (b'{"a":"wxyz","b":0,"a":{"x":1,"b":2}}', "a"),
        (b'{"a":[1,2],"a":[1]}', "a"),
        (b'{"a":-1,"a":-1.5}', "a"),
        (b'{"a" : 1 , "b":[] ,"b" :[]}', "b"),
        (b'{"":1,"":2}', ""),
    ],
)
def test_finds_duplicate_keys(body: bytes, key: str) -> None:
    with pytest.raises(DuplicateKeyError) as caught:
        split_object(body)
    assert caught.value.key == key


def test_nested_duplicates_are_left_alone() -> None:
    assert split_object(b'{"a":{"b":1,"b":2}}') == {"a": b'{"b":1,"b":2}'}


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"b":', b"}")])
def test_nesting_has_an_exact_limit(opening: bytes, closing: bytes) -> None:
    def nested(levels: int) -> bytes:
        return b'{"first":[[]],"a":' + opening * levels + b"1" + closing * levels + b"}"

    split_object(nested(MAX_DEPTH - 1))
    for levels in (MAX_DEPTH, 2 * MAX_DEPTH, 5000, 200_000):
        with pytest.raises(JsonError):
            split_object(nested(levels))


def test_nesting_inside_an_item_of_a_wide_array() -> None:
    def wide(levels: int) -> bytes:
        return b'{"a":[' + b"{}," * 1000 + b"[" * levels + b"]" * levels + b"]}"

    split_object(wide(MAX_DEPTH - 2))
    with pytest.raises(JsonError, match="deeper"):
        split_object(wide(MAX_DEPTH - 1))


def test_brackets_in_strings_are_no_nesting() -> None:
    text = b'"\\\\' + b"[{" * 3000 + b'\\"' + b"[" * 3000 + b'"'
    assert split_object(b'{"a":' + text + b',"b":[' + text + b"]}")["a"] == text


def test_a_bomb_of_brackets_is_refused() -> None:
    flat = b'{"a":[' + b"[]," * (MAX_CONTAINERS - 2) + b"[]]}"
    split_object(flat)
    with pytest.raises(JsonError, match="arrays and objects"):
        split_object(b'{"a":[' + b"[]," * MAX_CONTAINERS + b"[]]}")


def test_integers_have_an_exact_limit_wherever_they_are() -> None:
    for before in (0, 1, 700, 4299, 4300, 9000):
        start = b'{"text":"' + b"x" * before + b'","a":['
        split_object(start + b"9" * MAX_DIGITS + b"]}")
        split_object(start + b"-" + b"9" * MAX_DIGITS + b"]}")
        with pytest.raises(JsonError, match="digits"):
            split_object(start + b"9" * (MAX_DIGITS + 1) + b"]}")


def test_digits_elsewhere_do_not_count() -> None:
    digits = b"3" * (3 * MAX_DIGITS)
    fields = split_object(b'{"pi":"' + digits + b'","third":0.' + digits + b',"tiny":1e-5,"huge":1e400}')
    assert fields["third"] == b"0." + digits
    assert fields["huge"] == b"1e400"
