"""Pure scheduling policy over plain values; time arrives as an argument."""
