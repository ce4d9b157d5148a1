"""`python -m tests.fuzz.torture`: see `--help`."""

from __future__ import annotations

import argparse
import sys
import time

from tests.fuzz.torture.run import LANES, Plan, torture

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz.torture",
        description="Torture a router over real sockets until the time is up or something is found.",
    )
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--minutes", type=float, default=1.0, help="each lane is begun anew until this is over")
    parser.add_argument("--lane", choices=[*LANES, "all"], default="all")
    parser.add_argument("--exchanges", type=int, default=600, help="in one run of a router")
    parser.add_argument("--at-once", type=int, default=60, help="client connections")
    parser.add_argument("--only", type=int, default=None, help="only the exchange of this number")
    parser.add_argument("--faults", type=float, default=0.3)
    options = parser.parse_args()
    until = time.monotonic() + options.minutes * 60
    seed = options.seed
    while True:
        for name in LANES if options.lane == "all" else [options.lane]:
            plan = Plan(seed, name, options.exchanges, options.at_once, options.only, options.faults)
            print(plan.replay, flush=True)
            print("   ", torture(plan), flush=True)
        seed += 1
        if time.monotonic() >= until:
            sys.exit(0)
