"""Pure protocol code: bytes in, values out. Knows no event loop, no engine state and no router."""
