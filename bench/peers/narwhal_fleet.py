"""Write the files that narwhal-inference wants before it serves. Runs in that router's own environment, not in ours.

    python narwhal_fleet.py FOLDER MODEL ROLE=URL...

Profiles are bound to running engine processes there, so the engines must listen already.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from pathlib import Path
from typing import Any

ROOM = 16384


def from_peer(module: str, name: str) -> Any:
    """Something of the other router, which only its own environment has."""
    return getattr(importlib.import_module(f"narwhal.{module}"), name)


async def main(folder: Path, model: str, engines: list[str]) -> None:
    pairs = [engine.split("=", 1) for engine in engines]
    fleet = {
        "model": model,
        "engines": [{"iid": f"e{n}", "url": url, "role": role, "pin": True} for n, (role, url) in enumerate(pairs)],
        # Its ingress answers 429 once its event loop lags a quarter of ttft_s: wide targets keep that out of the comparison.
        "slo": {"ttft_s": 600.0, "tpot_s": 60.0},
        "serving": {"admission": "open", "max_connections": ROOM, "queue_capacity": ROOM, "queue_timeout_s": 60.0},
        "engine": {
            "tokenize": False,
            "first_token_timeout_s": 60.0,
            "decode_read_timeout_s": 60.0,
            "pool_timeout_s": 60.0,
        },
        "profiles": {"path": str(folder / "profiles.json")},
        "recovery": {"state_path": str(folder / "state.json")},
    }
    (folder / "fleet.json").write_text(
        json.dumps(from_peer("contracts", "versioned")(from_peer("contracts", "FLEET"), fleet), indent=1)
    )
    config = from_peer("config", "FleetConfig").load(folder / "fleet.json")
    store = from_peer("profiling.store", "ProfileStore")(config.profiles_path)
    for spec in config.engines:
        generation = await from_peer("profiling.generation", "read_generation")(config, spec)
        profile = from_peer("profiling.model", "Profile")(
            iid=spec.iid,
            ttft_a=0.0,
            ttft_b=1e-7,
            ttft_c=1e-4,
            tpot_slope=0.0,
            tpot_intercept=1e-3,
            generation_digest=generation.digest,
            decode_min_requests=1,
            decode_max_requests=ROOM,
            decode_min_kv_tokens=1,
            decode_max_kv_tokens=100_000_000,
            decode_fit_mape=0.01,
            decode_cv_mape=0.01,
        )
        store.put(profile)


asyncio.run(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
