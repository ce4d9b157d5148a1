"""The simulated engine: one model with two fronts, behind a socket or in memory on a virtual clock."""
