"""What the collector looks through, and when."""

from __future__ import annotations

import gc
from weakref import ref

from servekit.garbage import left_alone


class Node:
    """In a circle with itself, so that only the collector finds it."""

    def __init__(self) -> None:
        self.itself = self


def test_while_something_is_timed_only_what_is_new_is_looked_through() -> None:
    before = len(gc.get_objects())
    with left_alone():
        assert len(gc.get_objects()) < before / 2 and gc.isenabled()
        node = ref(Node())
        gc.collect()
        assert node() is None
    assert gc.get_freeze_count() == 0 and len(gc.get_objects()) > before / 2


def test_what_has_died_before_is_collected_and_an_error_ends_it_as_well() -> None:
    node = ref(Node())
    try:
        with left_alone():
            assert node() is None
            raise KeyError
    except KeyError:
        assert gc.get_freeze_count() == 0
