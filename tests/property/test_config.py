"""Whatever a file holds, loading answers with a configuration or with a `ConfigError`; whatever loads, prints and loads again."""

from __future__ import annotations

import json
import math
from typing import Any

from hypothesis import HealthCheck, given, reject, settings, strategies as st

from narwhal_trio.config import (
    ConfigError,
    KeyDoc,
    RouterConfig,
    describe,
    effective,
    load_config,
    parse_bind,
    parse_config,
)
from narwhal_trio.config.address import normal_url, url_problem
from narwhal_trio.wire.address import parse_address

ROWS = {row.key: row for row in describe()}
TEXT = st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"], exclude_characters="$"), max_size=12)
HOST = st.from_regex(r"[a-z][a-z0-9]{0,8}(\.[a-z]{2,5})?", fullmatch=True)
URL = st.builds(
    "{}://{}{}{}".format, st.sampled_from(["http", "https"]), HOST, st.sampled_from(["", ":80", ":8000"]), st.just("")
)
ENGINE_URL = URL | st.builds("{}/{}".format, URL, HOST) | st.builds("unix:/run/{}".format, HOST)
SPECIAL: dict[str, st.SearchStrategy[Any]] = {
    "model": TEXT.filter(str.strip),
    "engines[].url": ENGINE_URL,
    "engines[].attestation_url": URL | st.just(""),
    "engines[].iid": st.from_regex(r"[A-Za-z0-9._-]{1,64}", fullmatch=True),
    "engines[].bootstrap_host": HOST,
    "server.bind": st.lists(
        st.builds("{}:{}".format, HOST | st.just("0.0.0.0"), st.integers(0, 65535))
        | st.builds("[::1]:{}".format, st.integers(0, 65535))
        | st.builds("unix:/run/{}".format, HOST),
        min_size=1,
        max_size=3,
    ),
    "engines[].kv_events": st.sampled_from(["", "tcp://10.0.0.1:5557", "ipc:///run/kv"]),
    "engines[].kv_events_replay": st.just(""),
    "controller.min_prefill": st.just(1),
    "controller.min_decode": st.just(1),
    "ha.lease_ttl_s": st.floats(10, 100),
    "ha.renew_s": st.floats(0.5, 1.5),
    "ha.safety_margin_s": st.floats(0.5, 1.5),
    "server.cors_origins": st.lists(URL, max_size=2),
    "auth.trusted_proxies": st.lists(st.sampled_from(["10.0.0.0/8", "::1/128", "1.2.3.4"]), max_size=2),
    "auth.trusted_header": st.sampled_from(["x-client", "remote-user"]),
    "auth.admin_key_env": st.sampled_from(["", "KEY"]),
    "engine.engine_api_key_env": st.sampled_from(["", "KEY"]),
    "ha.endpoints": st.lists(URL, max_size=2),
    "ha.standby_of": URL | st.just(""),
    "ha.router_id": st.from_regex(r"[A-Za-z0-9._:-]{0,20}", fullmatch=True),
    "engine.connector": st.just(""),
    "engine.dialect": st.just(""),
    "hardware.accelerator": TEXT.filter(str.strip),
    "engine_contract.engine_version": TEXT.filter(str.strip),
    "engine_contract.image_digest": st.just("") | st.from_regex(r"sha256:[0-9a-f]{64}", fullmatch=True),
    "engine_contract.enforce_handshake_compat": st.none(),
    "recovery.engine_restart_policy": st.just("individual"),
}


def value_of(row: KeyDoc) -> st.SearchStrategy[Any]:
    """Values of the right type that often meet the rule."""
    if row.key in SPECIAL:
        return SPECIAL[row.key]
    if row.type.startswith('"'):
        return st.sampled_from([choice.strip('"') for choice in row.type.split(" or ")])
    if row.type == "boolean or null":
        return st.none() | st.booleans()
    numbers = {"in (0, 1]": (0.01, 1.0), "in [0, 1]": (0.0, 1.0), "in [0, 1)": (0.05, 0.99), "> 1": (1.01, 9.0)}
    if row.type == "number":
        low, high = numbers.get(row.rule, (1.0, 1e6))
        if row.rule == "whole seconds >= 0":
            return st.integers(0, 1000).map(float)
        return st.floats(low, high)
    if row.type == "integer":
        return st.integers(1, 3) if row.rule == "1 to 3" else st.integers(1, 65535)
    return {"boolean": st.booleans(), "string": TEXT}[row.type]


VALUES = {key: value_of(row) for key, row in ROWS.items()}
ENGINE_ROWS = [row for key, row in ROWS.items() if key.startswith("engines[].") and key.count(".") == 1]
ENGINES = st.lists(
    st.fixed_dictionaries(
        {row.key.partition(".")[2]: VALUES[row.key] for row in ENGINE_ROWS if row.required},
        optional={row.key.partition(".")[2]: VALUES[row.key] for row in ENGINE_ROWS if not row.required},
    ),
    min_size=2,
    max_size=3,
    unique_by=lambda engine: engine["iid"],
)
OTHERS = [row for row in ROWS.values() if "." in row.key and not row.key.startswith(("engines[]", "slo"))]


@st.composite
def tables(draw: st.DrawFn) -> dict[str, Any]:
    """Tables with a few keys set, most of them to something sensible."""
    raw: dict[str, Any] = {
        "model": draw(VALUES["model"]),
        "slo": {"ttft_s": draw(VALUES["slo.ttft_s"]), "tpot_s": 0.1},
        "engines": draw(ENGINES),
    }
    for row in draw(st.lists(st.sampled_from(OTHERS), max_size=6, unique_by=lambda row: row.key)):
        *path, name = row.key.split(".")
        table = raw
        for section in path:
            table = table.setdefault(section, {})
        table[name] = draw(VALUES[row.key])
    for section in ("hardware", "engine_contract"):
        for row in ROWS.values():
            if row.required and row.key.startswith(f"{section}.") and section in raw:
                raw[section].setdefault(row.key.partition(".")[2], 1 if row.type == "integer" else "x")
    return raw


def load(raw: dict[str, Any]) -> RouterConfig:
    return parse_config(raw, environ={"KEY": "k"}, allow_unauthenticated=True)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(tables())
def test_what_loads_prints_as_json_and_loads_again(raw: dict[str, Any]) -> None:
    try:
        config = load(raw)
    except ConfigError:
        reject()  # rules between keys; Hypothesis complains if that is too often
    printed = effective(config)
    text = json.dumps(printed, allow_nan=False)
    assert json.loads(text) == printed
    again = json.loads(text)
    derived = again.pop("derived")
    reloaded = load(again)
    assert reloaded == config
    assert effective(reloaded)["derived"] == derived


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(
        ["${X}", "${KEY}", "http://", "http://u:p@h", "[::1]:0", "unix:", "0.0.0.0:0", math.nan, 2**70, -1, 0]
    ),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5) | st.sampled_from(list("_a")), inner, max_size=3)
    ),
    max_leaves=5,
)


def is_usable(raw: Any, *, comments: bool = True) -> None:
    """Load; a `ConfigError` must have clean problems, and anything else escapes to the test."""
    try:
        config = parse_config(raw, environ={"KEY": "k"}, comments=comments)
    except ConfigError as error:
        problems = error.problems
    else:
        json.dumps(effective(config), allow_nan=False)
        return
    assert problems
    assert all(line.isprintable() for line in problems)


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(sorted(ROWS)), JUNK, st.data())
def test_junk_in_any_key_is_a_configuration_error_or_harmless(key: str, junk: Any, data: st.DataObject) -> None:
    raw: dict[str, Any] = {
        "model": "m",
        "slo": {"ttft_s": 1, "tpot_s": 1},
        "engines": [{"iid": "p", "url": "http://p"}, {"iid": "d", "url": "http://d"}],
        "hardware": {"accelerator": "x", "accelerators_per_engine": 1, "tensor_parallel": 1},
        "engine_contract": {"engine_version": "1"},
    }
    path = key.replace("[]", "").split(".")
    path = path[: data.draw(st.integers(1, len(path)))]  # sections may be junk too
    table: Any = raw
    for section in path[:-1]:
        table = table["engines"][0] if section == "engines" else table.setdefault(section, {})
    table[path[-1]] = junk
    is_usable(raw)


@settings(deadline=None, max_examples=100)
@given(
    st.dictionaries(
        st.sampled_from(["schema", "schema_version", "model", "engines", "slo", "serving", "ha"]) | st.text(), JUNK
    )
)
def test_junk_tables_are_a_configuration_error(raw: dict[str, Any]) -> None:
    is_usable(raw)
    is_usable(raw, comments=False)


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.binary(max_size=60) | st.text(max_size=60).map(str.encode), suffix=st.sampled_from([".toml", ".json", ""])
)
def test_junk_files_are_a_configuration_error(tmp_path_factory: Any, data: bytes, suffix: str) -> None:
    path = tmp_path_factory.getbasetemp() / f"junk{suffix}"
    path.write_bytes(data)
    try:
        load_config(path, environ={})
    except ConfigError as error:
        problems = error.problems
    else:
        return  # not reached with these sizes, and no fault if it were
    assert problems
    assert all(line.startswith(f"{path}: ") for line in problems)


@settings(deadline=None)
@given(st.text(max_size=20) | st.from_regex(r"(unix:|\[?[0-9a-f:.%]+\]?|[a-z.-]+):[0-9]{0,6}", fullmatch=True))
def test_an_address_that_parses_prints_as_one_that_parses_to_the_same(text: str) -> None:
    try:
        bind = parse_bind(text)
    except ValueError:
        return
    assert parse_bind(str(bind)) == bind


@settings(deadline=None, max_examples=200)
@given(
    st.from_regex(r"(https?|unix|HTTP)(:|:/|://|:///)[A-Za-z0-9._%:@\[\]/?#-]{0,20}", fullmatch=True)
    | ENGINE_URL.map(lambda url: url + "/")
    | st.text(max_size=15)
)
def test_an_engine_url_that_passes_can_be_dialled(url: str) -> None:
    if url_problem(url, schemes=("http", "https", "unix")) is None:
        normal = normal_url(url)
        assert url_problem(normal, schemes=("http", "https", "unix")) is None
        assert parse_address(normal) == parse_address(url)
