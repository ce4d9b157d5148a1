"""High availability: leases and standby."""
