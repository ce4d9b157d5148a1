"""Public test tools: an in-memory network, seeded worlds on a virtual clock, cancel-at-every-checkpoint sweeps."""
