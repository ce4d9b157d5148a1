"""The simulated engine: one model with two fronts, behind a socket or in memory on a virtual clock."""

from narwhal_trio.engine_sim.config import EngineConfig, TimeModel
from narwhal_trio.engine_sim.engine import EngineState, SimEngine
from narwhal_trio.engine_sim.fabric import HttpFabric, MemoryFabric
from narwhal_trio.engine_sim.faults import MISSING, Fault, Faults, Rule, overloaded
from narwhal_trio.engine_sim.http import Request

__all__ = [
    "MISSING",
    "EngineConfig",
    "EngineState",
    "Fault",
    "Faults",
    "HttpFabric",
    "MemoryFabric",
    "Request",
    "Rule",
    "SimEngine",
    "TimeModel",
    "overloaded",
]
