"""`narwhal-trio profile`, the whole command, against simulated engines whose speed is known: what it writes must be that speed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio

from narwhal_trio.cli import build_parser
from narwhal_trio.cli.profile_command import measure
from narwhal_trio.engine_sim import EngineConfig, MemoryFabric, SimEngine, TimeModel
from narwhal_trio.scheduling.profile_store import parse_profiles
from narwhal_trio.testing import SimClient, World, run_world
from narwhal_trio.wire.stream import parse_address
from tests.sim.fleet import MODEL, fleet_config

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping
    from pathlib import Path

    from narwhal_trio.scheduling.profile import Profile

TIME = TimeModel(
    prefill_a=3e-8,
    prefill_b=5e-5,
    prefill_c=6e-3,
    decode_intercept=7e-3,
    decode_kv_slope=4e-7,
    decode_request_slope=3e-4,
)
SHORT = (
    "--prefill-lens 64,128,256,512,1024 --decode-input-lens 64,512,1024 --decode-concurrency 1,3,8 --decode-tokens 24"
)


def arguments(out: Path, *words: str) -> argparse.Namespace:
    return build_parser("profile").parse_args(["profile", "--config", "-", "--out", str(out), *words])


def profiled(
    out: Path,
    *words: str,
    engines: tuple[int, int] = (1, 1),
    time: Mapping[str, TimeModel] | None = None,
    sim: Mapping[str, object] | None = None,
    down: str = "",
    seed: int = 1,
    **sections: Any,
) -> int:
    """Exit code of the command on a fleet of its own; no engine may have anything left to do afterwards."""
    config = fleet_config(*engines, **sections)
    args = arguments(out, *words)

    async def main(world: World) -> int:
        memory = MemoryFabric()
        async with trio.open_nursery() as nursery:
            fleet = []
            for item in config.engines:
                engine = SimEngine(
                    EngineConfig(
                        name=item.iid,
                        model=MODEL,
                        role=item.role.value,
                        time=(time or {}).get(item.iid, TIME),
                        advertise_host=item.iid,
                        advertise_port=5600,
                        dialect=config.engine.backend,
                        **(sim or {}),  # type: ignore[arg-type]
                    ),
                    memory,
                )
                if item.iid == down:
                    continue
                fleet.append(engine)
                await nursery.start(engine.serve, world.network.listen(item.iid, 8000))
            code = await measure(args, config, world.network, seed=seed)
            await trio.sleep(0.1)
            assert [(e.state().running, e.state().waiting, e.state().in_flight) for e in fleet] == [(0, 0, [])] * len(
                fleet
            )
            assert world.network.open_connections() == []
            nursery.cancel_scope.cancel()
        return code

    return run_world(main, seed)


def is_speed(profile: Profile, time: TimeModel, rel: float = 0.02) -> None:
    for tokens in (64, 300, 1024, 1500):
        assert profile.prefill_seconds(tokens) == pytest.approx(time.prefill_s(tokens), rel=rel)
    for requests, kv_tokens in ((1, 100), (3, 2000), (8, 9000)):
        assert profile.token_interval(kv_tokens, requests) == pytest.approx(time.step_s(kv_tokens, requests), rel=rel)


def test_the_fit_finds_the_engines_speed_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, slow = tmp_path / "profiles.json", TIME.scaled(3)
    assert profiled(out, *SHORT.split(), engines=(2, 2), time={"p1": slow, "d0": slow}) == 0
    store = parse_profiles(out.read_bytes(), "")
    assert list(store.profiles) == ["p0", "p1", "d0", "d1"]
    for iid, profile in store.profiles.items():
        is_speed(profile, slow if iid in ("p1", "d0") else TIME)
        assert profile.decode_fit_mape < 0.002
        assert profile.decode_cv_mape < 0.002
        assert (profile.prefill_min_tokens, profile.prefill_max_tokens) == (64, 1024)
        assert (profile.decode_min_requests, profile.decode_max_requests) == (1, 8)
        assert profile.kv_capacity_tokens == 8192 * 16
    p0 = store.profiles["p0"]
    assert p0.ttft_a == pytest.approx(TIME.prefill_a, rel=0.005)
    assert p0.ttft_b == pytest.approx(TIME.prefill_b, rel=0.005)
    assert p0.tpot_slope == pytest.approx(TIME.decode_kv_slope, rel=0.005)
    assert p0.tpot_request_slope == pytest.approx(TIME.decode_request_slope, rel=0.02)
    assert p0.tpot_intercept == pytest.approx(TIME.decode_intercept, rel=0.005)
    printed = capsys.readouterr().out
    assert printed.count("prefill") == 4
    assert printed.count("decode") == 4


def test_quick_adapts_to_a_short_context_and_measures_warm_prompts(tmp_path: Path) -> None:
    out = tmp_path / "profiles.json"
    assert (
        profiled(
            out, "--quick", "--warm", "--prefill-repeats", "1", "--decode-repeats", "1", sim={"max_model_len": 1000}
        )
        == 0
    )
    store = parse_profiles(out.read_bytes(), "")
    for profile in store.profiles.values():
        assert profile.prefill_max_tokens is not None
        assert 900 < profile.prefill_max_tokens < 1000
        assert profile.prefill_seconds(700) == pytest.approx(TIME.prefill_s(700), rel=0.005)
        low, high = profile.cached_min_prefix_tokens, profile.cached_max_suffix_tokens
        assert low is not None
        assert high is not None
        measured = profile.cached_prefill_seconds(low, high)
        assert measured == pytest.approx(TIME.prefill_s(low + high, low), rel=0.005)
    assert store.meta["model"] == MODEL
    assert store.meta["measurements"]["d0"]["version"] == "0.32.0"
    assert len(store.meta["measurements"]["p0"]["warm"]) == 9


def test_engines_that_meet_in_rooms_lend_each_other_the_other_half(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "profiles.json"
    assert profiled(out, *SHORT.split(), engine={"backend": "sglang"}, engines=(2, 1)) == 0
    store = parse_profiles(out.read_bytes(), "")
    assert list(store.profiles) == ["p0", "p1", "d0"]
    for profile in store.profiles.values():
        assert profile.token_interval(2000, 3) == pytest.approx(TIME.step_s(2000, 3), rel=0.02)
    assert "p0: does no decode" in capsys.readouterr().out


def test_one_engine_measured_anew_leaves_the_others_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "profiles.json"
    assert profiled(out, *SHORT.split(), "--only", "d0") == 0
    assert "p0 has no profile yet" in capsys.readouterr().out
    # A vLLM prefill engine is measured alone.
    assert (
        profiled(out, *SHORT.split(), "--only", "p0", down="d0", time={"p0": TIME.scaled(2), "d0": TIME.scaled(5)}) == 0
    )
    store = parse_profiles(out.read_bytes(), "")
    is_speed(store.profiles["p0"], TIME.scaled(2))
    is_speed(store.profiles["d0"], TIME)
    for iid in ("p0", "d0"):
        assert store.meta["measurements"][iid]["settings"] == {
            "version": "0.32.0",
            "weights": MODEL,
            "max_model_len": 32768,
            "block_size": 16,
        }


def test_a_fit_that_is_refused_leaves_the_old_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "profiles.json"
    out.write_text("old")
    words = ["--overwrite", "--prefill-lens", "64,128,256", "--decode-concurrency", "1,2", "--decode-input-lens", "64"]
    assert profiled(out, *words, "--plots", str(tmp_path / "plots")) == 1
    printed = capsys.readouterr()
    assert "REJECTED: 3 prompt lengths were measured, at least 4 are needed" in printed.out
    assert "REJECTED: 2 decode batches were measured, at least 4 are needed" in printed.out
    assert "nothing was written" in printed.err
    assert out.read_text() == "old"
    names = sorted(path.name for path in (tmp_path / "plots").iterdir())
    assert names == [f"profile-{iid}-{fit}.png" for iid in ("d0", "p0") for fit in ("decode", "prefill")]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (tmp_path / "plots").iterdir())


@pytest.mark.parametrize(
    ("words", "sim", "sections", "complaint"),
    [
        ("--time-limit 3", {}, {}, "the time limit of 3 s ended it at"),
        (
            "--prefill-lens 64,128,256,5000",
            {"max_model_len": 2048},
            {},
            "5000 tokens of prompt and 1 of output (prefill_lengths) do not fit into the engines' context of 2048",
        ),
        ("", {"api_key": "secret"}, {}, "answered 401"),
        ("", {"connector": None}, {}, "no hand-off"),
        ("", {}, {"engines": (0, 1)}, "d0 cannot be measured: the fleet has no prefill engine for a hand-off"),
        ("", {}, {"down": "d0"}, "Connection refused"),
    ],
)
def test_what_cannot_be_measured_says_why(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: str,
    sim: dict[str, object],
    sections: dict[str, Any],
    complaint: str,
) -> None:
    out = tmp_path / "profiles.json"
    assert profiled(out, *(words or SHORT).split(), sim=sim, **sections) == 1
    assert complaint in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--only x", "the configuration has no engine x; it has d0, p0"),
        ("", "exists; say --overwrite"),
        ("--only p0", "line 1, column 1: is not valid JSON"),
    ],
)
def test_arguments_that_do_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, complaint: str
) -> None:
    out = tmp_path / "profiles.json"
    out.write_text("old")
    assert profiled(out, *words.split()) == 2
    assert complaint in capsys.readouterr().err
    assert out.read_text() == "old"


def test_batches_that_do_not_fit_into_memory_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "profiles.json"
    assert profiled(out, *SHORT.split(), sim={"blocks": 256}) == 0
    assert "d0: left out: 8 decodes of 1024 tokens: more than the KV memory of" in capsys.readouterr().out
    profile = parse_profiles(out.read_bytes(), "").profiles["d0"]
    assert profile.decode_max_kv_tokens <= 256 * 16
    is_speed(profile, TIME)


def test_other_work_on_an_engine_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = fleet_config(1, 1)
    args = arguments(tmp_path / "profiles.json", *SHORT.split())

    async def main(world: World) -> int:
        memory = MemoryFabric()
        async with trio.open_nursery() as nursery:
            for item in config.engines:
                engine = SimEngine(
                    EngineConfig(name=item.iid, model=MODEL, role=item.role.value, advertise_host=item.iid), memory
                )
                await nursery.start(engine.serve, world.network.listen(item.iid, 8000))
            client = await SimClient.connect(world.network, parse_address("http://d0:8000"))
            body = {"prompt": "go on", "max_tokens": 5000, "stream": True, "ignore_eos": True}
            await client.send_request("POST", "/v1/completions", json=body)
            assert await client.receive_event() is not None
            code = await measure(args, config, world.network)
            client.disconnect()
            nursery.cancel_scope.cancel()
        return code

    assert run_world(main, 1) == 1
    assert "d0 has 1 other requests; measure an idle fleet" in capsys.readouterr().err


@pytest.mark.parametrize("after_s", [0.001, 0.4, 2.0, 9.0])
def test_being_told_to_end_ends_every_request_to_every_engine(tmp_path: Path, after_s: float) -> None:
    config = fleet_config(1, 1)
    args = arguments(tmp_path / "profiles.json", *SHORT.split())

    async def main(world: World) -> None:
        memory = MemoryFabric()
        async with trio.open_nursery() as nursery:
            engines = []
            for item in config.engines:
                engine = SimEngine(
                    EngineConfig(name=item.iid, model=MODEL, role=item.role.value, advertise_host=item.iid, time=TIME),
                    memory,
                )
                engines.append(engine)
                await nursery.start(engine.serve, world.network.listen(item.iid, 8000))
            with trio.move_on_after(after_s) as scope:
                await measure(args, config, world.network)
            assert scope.cancelled_caught
            await trio.sleep(0.01)
            assert [(e.state().running, e.state().waiting) for e in engines] == [(0, 0), (0, 0)]
            assert world.network.open_connections() == []
            assert not args.out.exists()
            nursery.cancel_scope.cancel()

    run_world(main, 1)
