"""Measuring a fleet: engine profiles and first-token calibration, for the `profile` and `check` commands do; the router imports none of it.

Only `fit` needs numpy and only `plots` matplotlib (the extra `profile`).
"""
