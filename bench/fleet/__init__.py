"""A fleet in virtual time: an arrival trace through the real router against simulated engines, once per way to split the engines.

Run `python -m bench.fleet --help`.
"""
