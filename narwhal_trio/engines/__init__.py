"""What differs between engine families, as pure functions over request and response bodies."""
