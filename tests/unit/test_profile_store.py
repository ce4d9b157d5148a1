from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import attrs
import pytest
from hypothesis import given, settings, strategies as st

from narwhal_trio.config import ConfigError
from narwhal_trio.scheduling.profile import Profile
from narwhal_trio.scheduling.profile_store import (
    ProfilesError,
    ProfileStore,
    dump_profiles,
    fit_problems,
    parse_profiles,
)

if TYPE_CHECKING:
    from narwhal_trio.config.errors import Problem

ROW: dict[str, Any] = {
    "iid": "p0",
    "ttft_a": 1e-9,
    "ttft_b": 2e-5,
    "ttft_c": 0.01,
    "tpot_slope": 1e-8,
    "tpot_intercept": 0.008,
    "decode_min_requests": 1,
    "decode_max_requests": 48,
    "decode_min_kv_tokens": 512,
    "decode_max_kv_tokens": 400_000,
    "decode_fit_mape": 0.02,
    "decode_cv_mape": 0.05,
}
CACHED = {
    **dict.fromkeys(("cached_a", "cached_b", "cached_c", "cached_d", "cached_split"), 0.0),
    "cached_min_prefix_tokens": 2048,
    "cached_max_prefix_tokens": 8192,
    "cached_min_suffix_tokens": 700,
    "cached_max_suffix_tokens": 2600,
}


def document(*rows: object, **changes: object) -> bytes:
    top = {"schema": "narwhal.profiles", "schema_version": 1, "meta": {}, "profiles": list(rows)} | changes
    return json.dumps({key: value for key, value in top.items() if value is not ...}).encode()


def problems(data: bytes) -> list[str]:
    with pytest.raises(ProfilesError) as caught:
        parse_profiles(data)
    return caught.value.problems


def problems_of(**changes: object) -> list[str]:
    row = ROW | changes
    return problems(document({key: value for key, value in row.items() if value is not ...}))


def test_reads_what_the_reference_writes() -> None:
    row = ROW | CACHED | {"tpot_slope": 0, "kv_capacity_tokens": 500_000, "generation_digest": None}
    store = parse_profiles(document(row, ROW | {"iid": "p1"}, meta={"model": "m", "lengths": [256, 700]}))
    assert list(store.profiles) == ["p0", "p1"]
    assert store.meta == {"model": "m", "lengths": [256, 700]}
    profile = store.profiles["p0"]
    assert profile.kv_capacity_tokens == 500_000
    assert isinstance(profile.tpot_slope, float)
    assert profile.tpot_request_slope == 0.0
    assert profile.cached_prefill_seconds(4000, 1000) == 0.0
    assert store.profiles["p1"].cached_a is None


def test_a_byte_order_mark_is_no_problem_and_no_profiles_are_none() -> None:
    assert parse_profiles(b"\xef\xbb\xbf" + document()).profiles == {}


def test_writes_what_it_reads() -> None:
    store = parse_profiles(document(ROW | CACHED, ROW | {"iid": "Grönland"}, meta={"x": [1, {"y": None}]}))
    data = dump_profiles(store)
    assert parse_profiles(data) == store
    assert data.endswith(b"}\n")
    assert "Grönland".encode() in data


def test_refuses_to_write_what_it_would_not_read() -> None:
    good = parse_profiles(document(ROW)).profiles["p0"]
    bad = attrs.evolve(good, ttft_a=float("nan"))
    with pytest.raises(ProfilesError, match=r"profiles\[0\]\.ttft_a: must be finite"):
        dump_profiles(ProfileStore({"p0": bad}))


def test_errors_name_the_file_and_are_configuration_errors() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_profiles(document(ROW, profiles=...), "runs/profiles.json")
    assert caught.value.problems == ["runs/profiles.json: profiles: is missing"]


def test_all_problems_are_reported_together() -> None:
    data = document(
        ROW | {"ttft_a": -1, "speed": 3, "decode_max_requests": 0}, ROW | {"decode_fit_mape": "low"}, 7, extra=1
    )
    assert problems(data) == [
        "extra: is an unknown field",
        "profiles[0].speed: is an unknown field",
        "profiles[0].ttft_a: must be finite and not negative, got -1",
        "profiles[0].decode_max_requests: must be an integer of at least 1, got 0",
        'profiles[1].decode_fit_mape: must be a number, got "low"',
        'profiles[1].iid: repeats "p0" of profiles[0]',
        "profiles[2]: must be an object, got 7",
    ]


@pytest.mark.parametrize("name", list(ROW))
def test_required_fields(name: str) -> None:
    assert problems_of(**{name: ...}) == [f"profiles[0].{name}: is missing"]
    assert len(problems_of(**{name: None})) == 1


@pytest.mark.parametrize(
    "name", [name for name in attrs.fields_dict(Profile) if name not in {*ROW, "tpot_request_slope"}]
)
def test_optional_fields_may_be_null(name: str) -> None:
    assert len(parse_profiles(document(ROW | {name: None})).profiles) == 1


def test_a_slope_may_be_left_out_but_not_null() -> None:
    assert problems_of(tpot_request_slope=None) == ["profiles[0].tpot_request_slope: must be a number, got null"]


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 400])
def test_numbers_that_are_none(literal: str) -> None:
    data = document(ROW).replace(b"2e-05", literal.encode())
    (problem,) = problems(data)
    assert problem.startswith("profiles[0].ttft_b: must be finite and not negative, got ")


def test_numbers_that_are_none_in_meta() -> None:
    assert problems(document(ROW, meta={"a": [1.0, {"b c": float("nan")}]})) == [
        'meta.a[1]."b c": must be finite, got NaN'
    ]


@pytest.mark.parametrize("value", [True, 1.0, "4", 0, -3, [], 2.5])
def test_integers_are_integers(value: object) -> None:
    (problem,) = problems_of(decode_min_requests=value)
    assert problem.startswith("profiles[0].decode_min_requests: must be an integer of at least 1, got ")


@pytest.mark.parametrize("value", [True, "0.1", {}])
def test_floats_are_numbers(value: object) -> None:
    (problem,) = problems_of(ttft_c=value)
    assert problem.startswith("profiles[0].ttft_c: must be a number, got ")


@pytest.mark.parametrize("value", ["", 5, True])
def test_iid_is_a_name(value: object) -> None:
    (problem,) = problems_of(iid=value)
    assert problem.startswith("profiles[0].iid: must be a non-empty string, got ")


@pytest.mark.parametrize(
    ("low", "high"),
    [
        ("decode_min_requests", "decode_max_requests"),
        ("decode_min_kv_tokens", "decode_max_kv_tokens"),
        ("decode_max_kv_tokens", "kv_capacity_tokens"),
        ("prefill_min_tokens", "prefill_max_tokens"),
        ("decode_min_output_tokens", "decode_max_output_tokens"),
    ],
)
def test_ranges_are_ordered(low: str, high: str) -> None:
    changes: dict[str, object] = {"decode_min_kv_tokens": 1, low: 9, high: 8}
    assert problems_of(**changes) == [f"profiles[0].{low}: must be at most {high} (8), got 9"]
    parse_profiles(document(ROW | {"decode_min_kv_tokens": 1, low: 8, high: 8}))


@pytest.mark.parametrize("name", [*CACHED, "ttft_split", "ttft_block_tokens"])
def test_groups_are_complete_or_absent(name: str) -> None:
    split = {"ttft_split": 0.1, "ttft_block_tokens": 512}
    parse_profiles(document(ROW | CACHED | split))
    (problem,) = problems_of(**(CACHED | split | {name: ...}))
    assert problem.startswith(f"profiles[0].{name}: is needed: ")


def test_shared_device_fields_are_named_as_such() -> None:
    assert problems_of(colocated_group="g") == [
        "profiles[0].colocated_group: describes engines that share a device, which is not supported; leave it out"
    ]


def test_duplicate_keys() -> None:
    data = document(ROW).replace(b'"iid": "p0"', b'"iid": "p0", "iid": "p1"')
    assert problems(data) == ["profiles[0].iid: appears more than once"]
    twice = document(ROW)[:-1] + b', "meta": {}}'
    assert problems(twice) == ["meta: appears more than once"]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"schema": ...}, "schema: is missing"),
        ({"schema": "narwhal.fleet"}, 'schema: must be "narwhal.profiles", got "narwhal.fleet"'),
        ({"schema_version": 2}, "schema_version: must be 1, got 2"),
        ({"schema_version": True}, "schema_version: must be 1, got true"),
        ({"meta": []}, "meta: must be an object, got []"),
        ({"profiles": {}}, "profiles: must be a list of profiles, got {}"),
    ],
)
def test_top_level(changes: dict[str, object], problem: str) -> None:
    assert problems(document(ROW, **changes)) == [problem]


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "line 1, column 1: is not valid JSON"),
        (b'{"a":', "line 1, column 6: is not valid JSON"),
        (b"\xff\xfe", "is not UTF-8 text (byte 0)"),
        (b"[]", "must be an object with the keys schema"),
        (b"null", "must be an object with the keys schema"),
        (b"1" * 5000, "holds a value that cannot be read"),
        (b"[" * 100_000, "is nested too deeply"),
    ],
)
def test_files_that_are_none(data: bytes, problem: str) -> None:
    (found,) = problems(data)
    assert found.startswith(problem)


def test_deep_nesting_in_meta_is_no_matter() -> None:
    deep: object = 1.0
    for _ in range(200):
        deep = [deep]
    assert parse_profiles(document(ROW, meta={"a": deep})).meta == {"a": deep}


def test_poor_fits() -> None:
    store = parse_profiles(document(ROW, ROW | {"iid": "p1", "decode_cv_mape": 0.2}))
    assert fit_problems(store, max_fit_mape=0.02, max_cv_mape=0.2) == []
    (problem,) = fit_problems(store, max_fit_mape=0.02, max_cv_mape=0.13)
    assert str(problem) == (
        'profiles[1].decode_cv_mape: of engine "p1" must be at most 0.13 (profiles.max_decode_cv_mape), got 0.2'
    )


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from([*attrs.fields_dict(Profile), "other"]), json_values, max_size=4))
@settings(max_examples=150)
def test_any_row_is_a_profile_or_a_problem_that_names_it(changes: dict[str, object]) -> None:
    store: ProfileStore | None = None
    found: tuple[Problem, ...] = ()
    try:
        store = parse_profiles(document(ROW | changes))
    except ProfilesError as error:
        found = error.details
    if store is None:
        assert found
        assert all(problem.key.startswith("profiles[0].") for problem in found)
    else:
        assert parse_profiles(dump_profiles(store)) == store
