"""One request's lifetime: its absolute deadline, and who ended it early. Knows nothing of requests, engines or HTTP."""

from __future__ import annotations

import trio

from narwhal_trio.types import AbortCause

__all__ = ["Lifetime"]


class Lifetime:
    """A cancel scope with a deadline, and the first cause for which it was cancelled.

    Whoever ends the request early calls `abort(cause)`, which records before it cancels. Ties go to the deadline, because trio
    delivers a passed deadline before anything else in the same pass. Nobody looks at a clock afterwards.
    """

    __slots__ = ("_cause", "_caused_at", "scope")

    def __init__(self, deadline_at: float) -> None:
        self.scope = trio.CancelScope(deadline=deadline_at)
        self._cause: AbortCause | None = None
        self._caused_at: float | None = None

    def adopt(self, scope: trio.CancelScope) -> None:
        """Let `scope`, which the caller has just entered, do the work of the one not entered so far: a nursery brings its own."""
        scope.deadline = self.scope.deadline
        if self.scope.cancel_called:
            scope.cancel()
        self.scope = scope

    @property
    def deadline_at(self) -> float:
        return self.scope.deadline

    def abort(self, cause: AbortCause) -> bool:
        """End the request for `cause`. Synchronous and idempotent: the first cause wins; returns whether this call was it."""
        # `cancel_called` also notices a deadline that has passed but that the run loop has not yet acted upon.
        if self.scope.cancel_called:
            return False
        self._cause = cause
        self._caused_at = trio.current_time()
        self.scope.cancel(reason=cause.value)
        return True

    @property
    def verdict(self) -> AbortCause | None:
        """Why the scope cut its body short; None if the body ran to its end. Meaningful once the scope has been left.

        A cancellation from outside (our host's own scope) is not ours to name: it passes through and leaves None here.
        """
        if not self.scope.cancelled_caught:
            return None
        return self._cause or AbortCause.DEADLINE

    @property
    def cause(self) -> AbortCause | None:
        """The cause recorded so far, whether or not the scope has been left."""
        if self._cause is not None:
            return self._cause
        return AbortCause.DEADLINE if self.scope.cancel_called else None

    @property
    def caused_at(self) -> float:
        """Instant from which cancel-to-engine-close is measured: the abort call, or the deadline itself."""
        return self.scope.deadline if self._caused_at is None else self._caused_at
