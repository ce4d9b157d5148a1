"""The narwhal-trio command."""
