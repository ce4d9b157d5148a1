"""Torture of the streaming path over real sockets: a router in its own process between raw-socket engines and raw-socket clients.

`python -m tests.fuzz.torture --help`. A short slice is part of the test suite (`tests/fuzz/test_torture.py`).
"""
