"""Tools for tests of the router and of programs that embed it: an in-memory network, seeded worlds, a raw HTTP client."""

from narwhal_trio.testing.cancel import CancelPoint, cancel_at_every_step
from narwhal_trio.testing.client import ClientResponse, End, ReceivedEvent, SimClient
from narwhal_trio.testing.connection import Endpoint, Event, Link, LogEntry, SimConnection, SimStream
from narwhal_trio.testing.network import SimListener, SimNetwork, memory_pair
from narwhal_trio.testing.tasks import assert_no_tasks_left, format_task_tree, running_tasks
from narwhal_trio.testing.world import World, WorldStuck, run_world

__all__ = [
    "CancelPoint",
    "ClientResponse",
    "End",
    "Endpoint",
    "Event",
    "Link",
    "LogEntry",
    "ReceivedEvent",
    "SimClient",
    "SimConnection",
    "SimListener",
    "SimNetwork",
    "SimStream",
    "World",
    "WorldStuck",
    "assert_no_tasks_left",
    "cancel_at_every_step",
    "format_task_tree",
    "memory_pair",
    "run_world",
    "running_tasks",
]
