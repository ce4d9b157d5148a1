"""Files: formats, syntax, duplicates, comments, schema versions, environment, credentials, exposure."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

import pytest

from narwhal_trio.config import ConfigError, RouterConfig, load_config, parse_config, read_credentials
from narwhal_trio.types import Role

if TYPE_CHECKING:
    from pathlib import Path

TOML = """
model = "m"
slo = { ttft_s = 2, tpot_s = 0.1 }
engines = [{ iid = "p", url = "http://h:1", role = "prefill" }, { iid = "d", url = "http://h:2" }]
"""
BASE: dict[str, Any] = {
    "model": "m",
    "slo": {"ttft_s": 2, "tpot_s": 0.1},
    "engines": [{"iid": "p", "url": "http://h:1", "role": "prefill"}, {"iid": "d", "url": "http://h:2"}],
}


def write(tmp_path: Path, name: str, text: str | bytes) -> Path:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    return path


def load(path: Path, environ: dict[str, str] | None = None, **options: Any) -> RouterConfig:
    return load_config(path, environ=environ or {}, **options)


def fail(path: Path, environ: dict[str, str] | None = None, **options: Any) -> list[str]:
    """The problems without the leading `FILE: `, which each of them must have."""
    with pytest.raises(ConfigError) as caught:
        load(path, environ, **options)
    assert all(line.startswith(f"{path}: ") for line in caught.value.problems)
    assert caught.value.source == str(path)
    return [line.removeprefix(f"{path}: ") for line in caught.value.problems]


def fail_raw(raw: dict[str, Any], environ: dict[str, str] | None = None, **options: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_config(raw, environ=environ or {}, **options)
    return caught.value.problems


def test_toml_and_json_with_the_same_keys_are_equal(tmp_path: Path) -> None:
    config = load(write(tmp_path, "a.toml", TOML))
    assert config == load(write(tmp_path, "a.json", json.dumps(BASE)))
    assert config == load(write(tmp_path, "bom.json", b"\xef\xbb\xbf" + json.dumps(BASE).encode()))
    assert config == load(write(tmp_path, "bom.toml", b"\xef\xbb\xbf" + TOML.replace("\n", "\r\n").encode()))
    assert config.model == "m"
    assert [engine.role for engine in config.engines] == [Role.PREFILL, Role.DECODE]
    assert config.slo.ttft_s == 2.0
    assert config.serving.max_attempts == 2
    assert config.notes == ()


def test_a_file_without_a_telling_name_is_told_by_its_first_character(tmp_path: Path) -> None:
    assert load(write(tmp_path, "config", "\n " + json.dumps(BASE))) == load(write(tmp_path, "router.conf", TOML))
    assert load(write(tmp_path, "FLEET.JSON", json.dumps(BASE))).model == "m"


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("a.toml", "model = \n", "line 1, column 9: is not valid TOML: Invalid value"),
        ("a.toml", 'model = "m"\nmodel = "n"\n', "line 2, column 12: is not valid TOML: Cannot overwrite a value"),
        ("a.toml", "[slo]\n[slo]\n", "line 2, column 5: is not valid TOML: Cannot declare ('slo',) twice"),
        ("a.toml", "slo = {", "is not valid TOML: "),
        ("a.toml", "{}", "line 1, column 1: is not valid TOML: Invalid statement"),
        ("a.json", '{"model": "m",\n}', ": is not valid JSON: "),
        ("a.json", "", "line 1, column 1: is not valid JSON: Expecting value"),
        ("a.json", "[]", "must be an object with the configuration's sections"),
        ("a.json", "3", "must be an object with the configuration's sections"),
        ("a.json", b'{"model": "\xff"}', "is not UTF-8 text (byte 11)"),
        ("a.toml", b"\xff", "is not UTF-8 text (byte 0)"),
        ("a.json", "[" * 100_000, "is nested too deeply"),
        ("a.toml", "a = " + "[" * 100_000, "is nested too deeply"),
        ("a.json", '{"a": ' + "1" * 5000 + "}", "holds a value that cannot be read: "),
        ("a.toml", "a = " + "1" * 5000, "holds a value that cannot be read: "),
    ],
)
def test_a_file_that_cannot_be_parsed(tmp_path: Path, name: str, text: str | bytes, problem: str) -> None:
    (found,) = fail(write(tmp_path, name, text))
    assert problem in found


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    assert fail(tmp_path / "none.toml") == ["cannot be read: No such file or directory"]
    assert fail(tmp_path) == ["cannot be read: Is a directory"]
    with pytest.raises(ConfigError, match="cannot be read: embedded null byte"):
        load_config("a\0b", environ={})


def test_numbers_that_are_none_are_named(tmp_path: Path) -> None:
    text = '{"model": "m", "slo": {"ttft_s": NaN, "tpot_s": -Infinity}, "engines": []}'
    assert fail(write(tmp_path, "a.json", text)) == [
        "slo.ttft_s: must be a finite number, got nan",
        "slo.tpot_s: must be a finite number, got -inf",
        "engines: must have at least one engine",
    ]
    assert fail(write(tmp_path, "a.toml", TOML + "[serving]\nretry_base_s = inf\nretry_cap_s = nan")) == [
        "serving.retry_base_s: must be a finite number, got inf",
        "serving.retry_cap_s: must be a finite number, got nan",
    ]
    assert fail(write(tmp_path, "b.json", text.replace("NaN", "1e999").replace("-Infinity", "1"))) == [
        "slo.ttft_s: must be a finite number, got inf",
        "engines: must have at least one engine",
    ]


def test_duplicate_json_keys_are_named_with_their_path(tmp_path: Path) -> None:
    text = """{"model": "m", "slo": {"ttft_s": 1, "ttft_s": 2, "tpot_s": 1, "ttft_s": 3}, "_note": 1, "_note": 2,
      "engines": [{"iid": "a", "url": "http://a"}, {"iid": "b", "url": "http://b", "iid": "c", "pin": 3}],
      "serving": {"max_attempts": 1}, "serving": {"max_attempts": 4}}"""
    assert fail(write(tmp_path, "a.json", text)) == [
        "serving: appears more than once",
        "slo.ttft_s: appears more than once",
        "engines[1].iid: appears more than once",
        "engines[1].pin: must be true or false, got an integer",
        "serving.max_attempts: must be 1 to 3, got 4",
    ]


def test_underscore_keys_are_comments_in_json_only(tmp_path: Path) -> None:
    raw = {**BASE, "_c": 1, "slo": {**BASE["slo"], "_c": None}, "controller": {"_c": [], "thresholds": {"_c": {}}}}
    raw["engines"] = [{**BASE["engines"][0], "_c": 0}, BASE["engines"][1]]
    assert load(write(tmp_path, "a.json", json.dumps(raw))) == load(write(tmp_path, "a.toml", TOML))
    assert fail(write(tmp_path, "b.toml", TOML + "_c = 1\n")) == ["_c: unknown key"]


def test_null_sections_mean_their_defaults(tmp_path: Path) -> None:
    sections = ("serving", "engine", "controller", "recovery", "profiles", "server", "auth", "journal", "ha")
    raw = {**BASE, **dict.fromkeys(sections), "hardware": None, "engine_contract": None}
    assert load(write(tmp_path, "a.json", json.dumps(raw))) == parse_config(BASE, environ={})
    raw = {**BASE, "controller": {"thresholds": None, "reactive": None}, "recovery": {"health": None}}
    raw["engines"] = [{**engine, "shared_device": None} for engine in BASE["engines"]]
    assert load(write(tmp_path, "b.json", json.dumps(raw))) == parse_config(BASE, environ={})
    assert fail(write(tmp_path, "c.json", json.dumps({**BASE, "slo": None, "engines": None, "model": None}))) == [
        "model: must be a string, got null",
        "engines: must be a list, got null",
        "slo: must be a table, got null",
    ]


@pytest.mark.parametrize("version", [1, 2])
def test_the_references_schema_versions_load(tmp_path: Path, version: int) -> None:
    raw = {"schema": "narwhal.fleet", "schema_version": version, **BASE}
    raw["serving"] = {
        "max_attempts": 1,
        "max_connections": 512,
        "prefill_concurrency": 4,
        "decode_concurrency": 8,
        "handoff_timeout_s": 20,
        "queue_capacity": 8,
        "queue_timeout_s": 2,
    }
    raw["engine"] = {"decode_read_timeout_s": 60}
    config = load(write(tmp_path, "fleet.json", json.dumps(raw)))
    assert config.serving.prefill_concurrency == 4
    assert config.handoff_bound_s == 20.0
    assert config.notes == ()


def test_a_version_1_file_is_told_where_its_defaults_were_others(tmp_path: Path) -> None:
    raw = {"schema": "narwhal.fleet", "schema_version": 1, **BASE, "serving": {"max_attempts": 2}}
    path = write(tmp_path, "fleet.json", json.dumps(raw))
    config = load(path)
    assert config.serving.max_connections == 768
    assert config.notes == (
        f"{path}: serving.max_connections: defaults to 768 here; under schema version 1 the default was 512",
        f"{path}: engine.decode_read_timeout_s: defaults to 10 here; under schema version 1 the default was 60",
    )


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("schema", "narwhal.profiles", 'schema: must be "narwhal.fleet", got "narwhal.profiles"'),
        ("schema", None, 'schema: must be "narwhal.fleet", got null'),
        ("schema_version", 3, "schema_version: must be 1 or 2, got 3"),
        ("schema_version", True, "schema_version: must be 1 or 2, got true"),
        ("schema_version", "2", 'schema_version: must be 1 or 2, got "2"'),
    ],
)
def test_another_schema_is_refused(key: str, value: object, problem: str) -> None:
    assert fail_raw({**BASE, key: value}) == [problem]


def test_old_names_in_a_contract() -> None:
    contract = {"vllm_version": "0.9", "nixl_version": "0.3", "nixl_connector_version": 2, "connector": "NixlConnector"}
    config = parse_config({**BASE, "engine_contract": contract}, environ={})
    assert config.engine_contract is not None
    assert config.engine_contract.engine_version == "0.9"
    assert config.engine_contract.transfer_version == "0.3"
    assert config.engine_contract.connector_version == 2
    assert fail_raw({**BASE, "engine_contract": {**contract, "engine_version": "1"}}) == [
        "engine_contract.vllm_version: is the old name of engine_version, which is given too"
    ]


def references(url: str = "http://h:1", **ha: object) -> dict[str, Any]:
    raw = copy.deepcopy(BASE)
    raw["engines"][0]["url"] = url
    return {**raw, "ha": {"backend": "etcd", "endpoints": ["http://e"], **ha}}


def test_environment_references() -> None:
    raw = references("${P_URL}", endpoints=["http://e0", "${E1}"], standby_of="${_primary}", router_id="${ID}")
    raw["engines"][1]["attestation_url"] = "${ATT}"
    environ = {
        "P_URL": "https://p:8000/base/",
        "E1": "http://e1/",
        "_primary": "http://a:1/",
        "ID": "r-1:80",
        "ATT": "http://x/a",
    }
    config = parse_config(raw, environ=environ)
    assert config.engines[0].url == "https://p:8000/base"
    assert config.engines[1].attestation_url == "http://x/a"
    assert config.ha.endpoints == ("http://e0", "http://e1")
    assert config.ha.standby_of == "http://a:1"
    assert config.router_id == "r-1:80"


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("${NONE}", "environment variable NONE is unset or empty"),
        ("${BLANK}", "environment variable BLANK is unset or empty"),
        ("${NESTED}", "environment variable NESTED contains another reference"),
        ("http://${HOST}:1", "an environment reference must be the whole value, ${NAME}"),
        ("${A-B}", "an environment reference must be the whole value, ${NAME}"),
        ("${", "an environment reference must be the whole value, ${NAME}"),
        ("${BAD}", "must be a URL with the scheme http or https or unix, got 'redis://h'"),
    ],
)
def test_a_reference_that_leads_nowhere(value: str, problem: str) -> None:
    environ = {"BLANK": " ", "NESTED": "${HOST}", "HOST": "h", "BAD": "redis://h"}
    assert fail_raw(references(value), environ) == [f"engines[0].url: {problem}"]


def test_references_in_lists_are_named_with_their_index() -> None:
    assert fail_raw(references(endpoints=["http://a", "${X}"], standby_of="x${Y}")) == [
        "ha.endpoints[1]: environment variable X is unset or empty",
        "ha.standby_of: an environment reference must be the whole value, ${NAME}",
    ]


def test_references_work_nowhere_else() -> None:
    assert fail_raw({**BASE, "model": "${M}", "journal": {"path": "runs/${M}"}}, {"M": "m"}) == [
        "model: must not contain ${: in a file, a whole-string ${NAME} works for engine URLs and ha addresses only",
        "journal.path: must not contain ${: in a file, a whole-string ${NAME} works for engine URLs and ha addresses only",
    ]


def test_credentials_come_from_the_environment() -> None:
    raw = {**BASE, "engine": {"engine_api_key_env": "ENGINE"}, "auth": {"admin_key_env": "ADMIN"}}
    environ = {"ENGINE": "sk-1", "ADMIN": "adm"}
    config = parse_config(raw, environ=environ)
    credentials = read_credentials(config, environ)
    assert credentials.engine_api_key == "sk-1"
    assert credentials.admin_key == "adm"
    assert "sk-1" not in repr(credentials) + repr(config)
    assert read_credentials(parse_config(BASE, environ={}), {}).engine_api_key == ""
    with pytest.raises(ConfigError, match=r"engine\.engine_api_key_env: environment variable ENGINE is unset or empty"):
        read_credentials(config, {})


def test_credentials_that_cannot_be_used_are_named_but_not_shown() -> None:
    raw = {**BASE, "engine": {"engine_api_key_env": "ENGINE"}, "auth": {"admin_key_env": "ADMIN"}}
    assert fail_raw(raw, {"ADMIN": " "}) == [
        "engine.engine_api_key_env: environment variable ENGINE is unset or empty",
        "auth.admin_key_env: environment variable ADMIN is unset or empty",
    ]
    for value in ("se cret", "secret\n", "s\u00e9cret", "a\r\nx-admin: 1"):
        found = fail_raw(raw, {"ENGINE": value, "ADMIN": "good"})
        assert found == [
            "engine.engine_api_key_env: environment variable ENGINE must hold visible ASCII only, without spaces or line breaks"
        ]


def test_credentials_are_looked_up_beside_other_problems() -> None:
    assert fail_raw({"engine": {"engine_api_key_env": "E", "tokenize": 1}, "auth": {"admin_key_env": "b-c"}}) == [
        "model: missing required key (name of the model that the fleet serves)",
        "engines: missing required key (the engines, at least one)",
        "slo: missing required section (latency targets)",
        "engine.tokenize: must be true or false, got an integer",
        'auth.admin_key_env: must be "" or the name of an environment variable, got "b-c"',
        "engine.engine_api_key_env: environment variable E is unset or empty",
    ]


OPEN = (
    '{} can be reached from other machines while auth.mode is "none"; '
    "set auth.mode, listen on 127.0.0.1, or start with --allow-unauthenticated"
)


def bind(*addresses: str, **auth: object) -> dict[str, Any]:
    return {**BASE, "server": {"bind": list(addresses)}, "auth": auth}


@pytest.mark.parametrize("address", ["0.0.0.0:80", "[::]:80", "10.0.0.1:80", "router.internal:80", "[2001:db8::1]:0"])
def test_an_open_listener_needs_authentication(address: str) -> None:
    assert fail_raw(bind("127.0.0.1:1", address)) == [f"server.bind[1]: {OPEN.format(json.dumps(address))}"]
    assert parse_config(bind(address), environ={}, allow_unauthenticated=True).server.bind == (address,)
    assert parse_config(bind(address, mode="api_keys", keys_file="k"), environ={}).server.bind == (address,)


@pytest.mark.parametrize("address", ["127.9.9.9:1", "[::1]:1", "localhost:1", "unix:/run/r", "[::ffff:127.0.0.1]:1"])
def test_a_local_listener_needs_none(address: str) -> None:
    assert parse_config(bind(address), environ={}).binds[0].loopback


def test_exposure_is_reported_beside_other_problems_but_not_beside_a_wrong_mode() -> None:
    assert fail_raw({**bind("0.0.0.0:1"), "model": ""}) == [
        "model: must not be empty",
        f"server.bind[0]: {OPEN.format(json.dumps('0.0.0.0:1'))}",
    ]
    assert [line.partition(":")[0] for line in fail_raw(bind("x", "0.0.0.0:1"))] == ["server.bind[0]", "server.bind[1]"]
    assert len(fail_raw(bind("0.0.0.0:1", mode="key"))) == 1


def test_addresses_of_the_command_line_replace_those_of_the_file() -> None:
    config = parse_config(bind("0.0.0.0:1"), environ={}, bind_override=["127.0.0.1:0", "[::1]:0"])
    assert [str(address) for address in config.binds] == ["127.0.0.1:0", "[::1]:0"]
    assert parse_config(BASE, environ={}, bind_override=["unix:x"]).server.bind == ("unix:x",)
    assert parse_config(bind("127.0.0.1:7"), environ={}, bind_override=[]).server.bind == ("127.0.0.1:7",)
    assert fail_raw(BASE, bind_override=["0.0.0.0:1", "8000"]) == [
        "--bind: '8000' has no port, write HOST:PORT, [v6]:PORT or unix:PATH",
        f"--bind: {OPEN.format(json.dumps('0.0.0.0:1'))}",
    ]
    assert fail_raw(BASE, bind_override=["0.0.0.0:1"]) == [f"--bind: {OPEN.format(json.dumps('0.0.0.0:1'))}"]
    assert fail_raw({**BASE, "server": 3}, bind_override=["0.0.0.0:1"]) == ["server: must be a table, got an integer"]


def test_problems_of_the_command_line_name_no_file(tmp_path: Path) -> None:
    path = write(tmp_path, "a.toml", TOML + "[serving]\nmax_attempts = 0")
    with pytest.raises(ConfigError) as caught:
        load(path, bind_override=["8000"])
    assert caught.value.problems == [
        f"{path}: serving.max_attempts: must be 1 to 3, got 0",
        "--bind: '8000' has no port, write HOST:PORT, [v6]:PORT or unix:PATH",
    ]


def test_keys_with_odd_names_are_quoted() -> None:
    assert fail_raw({**BASE, "a\nb": 1, "": 2, "serving": {"x.y": 3}, "z" * 100: 4}) == [
        '"a\\nb": unknown key',
        '"": unknown key',
        f'"{"z" * 40}"...: unknown key',
        'serving."x.y": unknown key',
    ]


def test_the_tables_that_are_given_stay_as_they_are() -> None:
    raw = references("${P}")
    before = copy.deepcopy(raw)
    parse_config(raw, environ={"P": "http://p"}, bind_override=["127.0.0.1:0"])
    assert raw == before


def test_settings_without_effect_are_remarked() -> None:
    trusting = {"mode": "trusted_header", "trusted_proxies": ["10.0.0.0/8", "::/0"]}
    assert parse_config({**BASE, "auth": trusting}, environ={}).notes == (
        "auth.trusted_proxies[1]: ::/0 believes a client name from anybody",
    )
    raw = {
        **BASE,
        "auth": {"keys_file": "k", "trusted_proxies": ["10.0.0.0/8"]},
        "ha": {"lease_path": "l", "endpoints": ["http://e"]},
    }
    config = parse_config(raw, environ={})
    assert config.notes == (
        'auth.keys_file: has no effect while auth.mode is "none"',
        'auth.trusted_proxies: has no effect while auth.mode is "none"',
        'ha.lease_path: has no effect while ha.backend is "none"',
        'ha.endpoints: has no effect while ha.backend is "none"',
    )


def test_all_problems_of_a_file_come_out_together(tmp_path: Path) -> None:
    text = """
modle = "x"
[slo]
ttft_s = true
[[engines]]
iid = "a b"
url = "ftp://x"
[[engines]]
url = "${NOPE}"
role = "both"
[serving]
max_attemps = 3
queue_capacity = 3
prefill_timeout_s = 1e400
[server]
bind = ["0.0.0.0:80", "x"]
[auth]
admin_key_env = "ADMIN"
[controller.thresholds]
shrink = 2
"""
    path = write(tmp_path, "bad.toml", text)
    keys = [line.partition(": ")[0] for line in fail(path)]
    assert sorted(keys) == [
        "auth.admin_key_env",
        "controller.thresholds.shrink",
        "engines[0].iid",
        "engines[0].url",
        "engines[1].iid",
        "engines[1].role",
        "engines[1].url",
        "model",
        "modle",
        "server.bind[0]",
        "server.bind[1]",
        "serving.max_attemps",
        "serving.prefill_timeout_s",
        "serving.queue_timeout_s",
        "slo.tpot_s",
        "slo.ttft_s",
    ]
