"""The deadline and cancellation stress bench: load, simulated engines that keep the truth, and what the two add up to.

Whether an engine still works for a request that nobody wants can only be seen at the engine. `load` sends requests of which a share
is cut off by the client or has a deadline, each with a marker in its prompt; `engine` answers them and notes for each marker when work
began, when its connection was closed and which tokens it made; `truth` puts the two together. Both sides read one clock of the
machine.
"""
