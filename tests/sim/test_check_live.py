"""`narwhal-trio check`, with and without `--live`, on simulated engines: what is asked, what is found, what calibration measures."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import trio

from narwhal_trio.cli import build_parser, main as command
from narwhal_trio.cli.check_command import check_live
from narwhal_trio.config import ConfigError
from narwhal_trio.control.artifacts import read_artifacts
from narwhal_trio.control.live_check import rounds
from narwhal_trio.engine_sim import EngineConfig, MemoryFabric, SimEngine, TimeModel
from narwhal_trio.scheduling.calibration import parse_calibration
from narwhal_trio.testing import World, run_world
from narwhal_trio.types import EngineId
from tests.sim.fleet import MODEL, fleet_config

if TYPE_CHECKING:
    from pathlib import Path


def checked(
    *words: str,
    engines: tuple[int, int] = (2, 2),
    sim: dict[str, dict[str, Any]] | None = None,
    down: str = "",
    measured: dict[str, dict[str, Any]] | None = None,
    **sections: Any,
) -> int:
    """Exit code of `check --live` on a fleet of its own. sim: engine settings by iid."""
    config = fleet_config(*engines, **sections)
    args = build_parser("check").parse_args(["check", "--config", "-", "--live", *words])

    async def main(world: World) -> int:
        memory = MemoryFabric()
        async with trio.open_nursery() as nursery:
            fleet = []
            for item in config.engines:
                plain: dict[str, Any] = {"name": item.iid, "model": MODEL, "dialect": config.engine.backend}
                settings = plain | {"advertise_host": item.iid, "time": TimeModel(transfer_base=0.1)}
                engine = SimEngine(
                    EngineConfig(role=item.role.value, **(settings | (sim or {}).get(item.iid, {}))), memory
                )
                if item.iid != down:
                    fleet.append(engine)
                    await nursery.start(engine.serve, world.network.listen(item.iid, 8000))
            code = await check_live(args, config, world.network, measured=measured, seed=1)
            await trio.sleep(0.1)
            assert [(e.state().running, e.state().waiting) for e in fleet] == [(0, 0)] * len(fleet)
            assert world.network.open_connections() == []
            nursery.cancel_scope.cancel()
        return code

    return run_world(main, 1)


@pytest.mark.parametrize("backend", ["vllm", "sglang"])
def test_a_fleet_in_order(backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert checked(engine={"backend": backend}) == 0
    lines = capsys.readouterr().out.splitlines()
    answers = {tuple(line.split("  ")[0:1]) for line in lines}
    assert len(answers) == len(set(answers))
    assert sum("hand-off" in line and " ok " in line for line in lines) == 4
    for question in ("health", "model", "tokenize"):
        assert sum(question in line and " ok " in line for line in lines) == 4


@pytest.mark.parametrize(
    ("sim", "more", "complaints"),
    [
        ({}, {"down": "d1"}, ["d1", "FAILED", "Connection refused", "INCONCLUSIVE not asked"]),
        ({"p0": {"model": "other"}}, {}, ["FAILED it serves other", "INCONCLUSIVE not asked"]),
        ({"p1": {"connector": None}}, {}, ["p1 > d0", "FAILED p1: no hand-off"]),
        ({"d0": {"api_key": "secret"}}, {}, ["FAILED status 401"]),
        (
            {"p1": {"block_size": 32}},
            {"measured": {"d0": {"version": "0.1"}, "p0": {"version": "0.32.0"}, "p1": {"block_size": 16}}},
            ["FAILED version is 0.32.0, it was profiled with 0.1", "FAILED block_size is 32, it was profiled with 16"],
        ),
        ({}, {"engine_contract": {"engine_version": "0.1"}}, ["FAILED engine_contract.engine_version is 0.1"]),
        ({}, {"engines": (0, 1)}, ["the fleet has no prefill engine"]),
        ({}, {"engines": (1, 0)}, ["the fleet has no decode engine"]),
    ],
)
def test_what_is_not_in_order_is_named(
    sim: dict[str, Any], more: dict[str, Any], complaints: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert checked(sim=sim, **more) == 1
    printed = capsys.readouterr()
    for text in complaints:
        assert text in printed.out
    assert "answers are not what they should be" in printed.err


def test_calibration_measures_the_first_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "first-token.json"
    words = ("--calibrate", str(path), "--samples", "5", "--input-tokens", "64", "512")
    assert checked(*words, sim={"d1": {"time": TimeModel(transfer_base=0.7)}}) == 0
    calibration = parse_calibration(path.read_bytes())
    assert [(g.prefill, g.decode, g.input_tokens, g.samples) for g in calibration.groups] == [
        (p, d, n, 5) for p in ("p0", "p1") for d in ("d0", "d1") for n in (64, 512)
    ]
    for group in calibration.groups:
        transfer = 0.7 if group.decode == "d1" else 0.1
        assert transfer < group.p99_s < transfer + 0.1
        assert group.candidate_s == pytest.approx(max(group.max_s, 1.2 * group.p99_s) + 0.5)
    assert "exceeds the measured bound of 1.3" in capsys.readouterr().out
    # What the router makes of it at its start.
    names = {"first_token_calibration_path": str(path)}
    found = read_artifacts(fleet_config(2, 2, engine=names)).calibration
    assert found == calibration
    for config, complaint in (
        (fleet_config(2, 2, engine=names | {"first_token_timeout_s": 1.0}), "must exceed 1.3"),
        (fleet_config(2, 3, engine=names), "holds no measurement of d2"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            read_artifacts(config)


def test_a_first_token_that_takes_longer_than_it_may_fails_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "first-token.json"
    words = ("--calibrate", str(path), "--samples", "2")
    assert checked(*words, engines=(1, 1), engine={"first_token_timeout_s": 0.55}) == 1
    assert "engine.first_token_timeout_s = 0.55 must exceed the measured bound of 0.6" in capsys.readouterr().err
    assert path.exists()


@pytest.mark.parametrize(("p", "d"), [(1, 1), (2, 2), (3, 5), (5, 3), (4, 1), (0, 3), (3, 0)])
def test_rounds_hold_every_pair_once_and_no_engine_twice(p: int, d: int) -> None:
    prefills, decodes = [EngineId(f"p{n}") for n in range(p)], [EngineId(f"d{n}") for n in range(d)]
    found = list(rounds(prefills, decodes))
    assert sorted(pair for pairs in found for pair in pairs) == sorted((a, b) for a in prefills for b in decodes)
    for pairs in found:
        assert len({name for pair in pairs for name in pair}) == 2 * len(pairs)
    assert len(found) == (max(p, d) if p and d else 0)


def test_check_opens_the_files_that_the_configuration_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys, profiles, calibration = (tmp_path / name for name in ("keys", "profiles.json", "first-token.json"))
    keys.write_text("alice sha256:short\n")
    profiles.write_text(json.dumps({"schema": "narwhal.profiles", "schema_version": 1, "meta": {}, "profiles": []}))
    calibration.write_text('{"schema":"x"}')
    config = tmp_path / "router.toml"
    config.write_text(
        f'model = "m"\n[slo]\nttft_s = 2\ntpot_s = 0.1\n[auth]\nmode = "api_keys"\nkeys_file = "{keys}"\n'
        f'[profiles]\npath = "{profiles}"\n[engine]\nfirst_token_calibration_path = "{calibration}"\n'
        f'[server]\ntls_certfile = "{keys}"\ntls_keyfile = "{keys}"\n'
        '[[engines]]\niid = "p0"\nurl = "http://127.0.0.1:1"\nrole = "prefill"\n'
    )
    assert command(["check", "--config", str(config)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    for text in (
        f"{config}: auth.keys_file: {keys}: line 1: must be NAME sha256:HEX",
        f"{config}: profiles.path: {profiles}: holds no profile of p0",
        f"{config}: engine.first_token_calibration_path: {calibration}: Object missing required field",
        f"{config}: server.tls_certfile: the certificate and its key cannot be used",
    ):
        assert text in printed.err
    profiles.write_text('{"schema": "narwhal.profiles", "profiles": [{"iid": "p0"}]}')
    assert command(["check", "--config", str(config)]) == 2
    assert f"profiles.path: {profiles}: profiles[0].ttft_a: is missing" in capsys.readouterr().err


def test_a_contract_that_nobody_can_attest_is_said_to_be_no_more_than_a_version() -> None:
    contract = {"engine_version": "0.32.0", "kv_heads": 8}
    (note,) = [n for n in read_artifacts(fleet_config(1, 1, engine_contract=contract)).notes if "contract" in n]
    assert note.startswith("engine_contract: p0, d0 without attestation_url")
    assert not [n for n in read_artifacts(fleet_config(1, 1)).notes if "contract" in n]
