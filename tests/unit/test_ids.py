"""Request ids are UUIDs of version 4, all different, in a forked child too."""

from __future__ import annotations

import os
import uuid
from collections import Counter

from narwhal_trio.core.ids import new_request_id


def test_they_are_random_uuids() -> None:
    made = [new_request_id() for _ in range(2000)]
    parsed = [uuid.UUID(text) for text in made]
    assert [str(each) for each in parsed] == made
    assert {each.version for each in parsed} == {4}
    assert {each.variant for each in parsed} == {uuid.RFC_4122}
    assert len(set(made)) == len(made)
    for place in {*range(36)} - {8, 13, 14, 18, 23}:
        seen = Counter(text[place] for text in made)
        assert len(seen) == (4 if place == 19 else 16)
        assert max(seen.values()) < 2 * len(made) / len(seen)


def test_a_forked_child_makes_others() -> None:
    new_request_id()  # so that some are in stock
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(theirs, " ".join(new_request_id() for _ in range(40)).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    got = os.read(ours, 4096).decode().split()
    os.close(ours)
    os.close(theirs)
    assert len(got) == 40
    assert not {*got} & {new_request_id() for _ in range(80)}
