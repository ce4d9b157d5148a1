"""Content codings of request bodies: right bytes, right verdicts, bounded memory."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib

import pytest

from narwhal_trio.protocol.coding import BadCoding, BodyDecoder, TooLarge, UnknownCoding

TEXT = b'{"prompt":"' + b"abc " * 5000 + b'"}'


def raw_deflate(data: bytes) -> bytes:
    deflater = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return deflater.compress(data) + deflater.flush()


def decode(coding: str | None, data: bytes, *, limit: int = 1 << 20, step: int = 1 << 20) -> bytes:
    decoder = BodyDecoder(coding, limit)
    out = b"".join(decoder.feed(data[start : start + step]) for start in range(0, len(data), step))
    decoder.finish()
    return out


@pytest.mark.parametrize("step", [1, 7, 1000, 1 << 20])
@pytest.mark.parametrize(
    ("coding", "data"),
    [
        (None, TEXT),
        ("identity", TEXT),
        ("gzip", gzip.compress(TEXT, mtime=0)),
        ("X-GZIP", gzip.compress(TEXT, mtime=0)),
        (" GZip ", gzip.compress(TEXT, mtime=0)),
        ("gzip", gzip.compress(TEXT[:100], mtime=0) + gzip.compress(b"", mtime=0) + gzip.compress(TEXT[100:], mtime=0)),
        ("gzip", gzip.compress(TEXT, mtime=0) + bytes(512)),
        ("deflate", zlib.compress(TEXT)),
        ("deflate", zlib.compress(TEXT, 0)),
        ("deflate", raw_deflate(TEXT)),
    ],
)
def test_decodes_in_pieces_of_any_size(coding: str | None, data: bytes, step: int) -> None:
    assert decode(coding, data, step=step) == TEXT


def test_an_empty_body_is_empty() -> None:
    for coding in (None, "gzip", "deflate"):
        assert decode(coding, b"") == b""
        assert (
            decode(coding, gzip.compress(b"", mtime=0) if coding == "gzip" else raw_deflate(b"") if coding else b"")
            == b""
        )


@pytest.mark.parametrize(
    "coding", ["br", "zstd", "compress", "gzip, gzip", "gzip,identity", "", "*", "gzip;q=1", "x" * 5000]
)
def test_unknown_codings(coding: str) -> None:
    if not coding:
        assert decode(coding, b"x") == b"x"
        return
    with pytest.raises(UnknownCoding) as caught:
        BodyDecoder(coding, 100)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    ("coding", "data"),
    [
        ("gzip", TEXT),
        ("gzip", gzip.compress(TEXT, mtime=0)[:-1]),
        ("gzip", gzip.compress(TEXT, mtime=0)[:5]),
        ("gzip", gzip.compress(TEXT, mtime=0)[:-6] + b"\0\0" + gzip.compress(TEXT, mtime=0)[-4:]),
        ("gzip", gzip.compress(TEXT, mtime=0) + b"tail"),
        ("gzip", gzip.compress(TEXT, mtime=0) + gzip.compress(TEXT, mtime=0)[:9]),
        ("gzip", b"\x1f"),
        ("gzip", bytes(10)),
        ("deflate", zlib.compress(TEXT)[:-1]),
        ("deflate", zlib.compress(TEXT) + b"tail"),
        ("deflate", raw_deflate(TEXT)[:-1]),
        ("deflate", b"\x78"),
        ("deflate", b"\xff\xff\xff"),
        ("deflate", gzip.compress(TEXT, mtime=0)),
    ],
)
@pytest.mark.parametrize("step", [1, 1 << 20])
def test_damaged_bodies(coding: str, data: bytes, step: int) -> None:
    with pytest.raises(BadCoding):
        decode(coding, data, step=step)


@pytest.mark.parametrize(("coding", "pack"), [(None, bytes), ("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_the_limit_counts_decoded_bytes_exactly(coding: str | None, pack: type[bytes]) -> None:
    assert decode(coding, pack(b"x" * 1000), limit=1000) == b"x" * 1000
    for step in (1, 1 << 20):
        with pytest.raises(TooLarge):
            decode(coding, pack(b"x" * 1001), limit=1000, step=step)


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_a_bomb_costs_bounded_memory(coding: str) -> None:
    zeros = 200 << 20
    packer = zlib.compressobj(wbits=31 if coding == "gzip" else 15)
    bomb = b"".join([packer.compress(bytes(1 << 20)) for _ in range(zeros >> 20)]) + packer.flush()
    limit = 1 << 20
    tracemalloc.start()
    try:
        with pytest.raises(TooLarge):
            decode(coding, bomb, limit=limit)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * limit


def test_empty_members_without_end_are_cut_off() -> None:
    with pytest.raises((BadCoding, TooLarge)):
        decode("gzip", gzip.compress(b"", mtime=0) * 200_000, limit=1 << 20)
    decoder = BodyDecoder("gzip", 1000)
    decoder.feed(gzip.compress(b"x"))
    with pytest.raises(TooLarge):
        decoder.feed(bytes(1 << 20))
