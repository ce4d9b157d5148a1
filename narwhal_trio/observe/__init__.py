"""Journal, metrics and log: they watch requests and never decide about them."""
