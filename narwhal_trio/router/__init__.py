"""One request from arrival to outcome, and the router that owns the running ones."""
