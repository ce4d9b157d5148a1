"""Background control of a fleet: monitoring, probing, role moves, lifecycle."""
