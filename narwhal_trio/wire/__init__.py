"""The router side towards engines: streams, pool, HTTP/1.1 client."""
