"""The client side of the router: HTTP/1.1 edge, ASGI adapter, hypercorn lane, routes."""
