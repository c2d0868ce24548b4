"""The event parser, whatever the cuts between reads."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from servekit.load.sse import EventParser

STREAM = b': comment\n\ndata: {"a": 1}\n\nevent: x\ndata:{"b": "\xe2\x82\xac"}\r\n\r\ndata: [DONE]\n\n'
PAYLOADS = [b'{"a": 1}', b'{"b": "\xe2\x82\xac"}', b"[DONE]"]


@given(st.lists(st.integers(0, len(STREAM)), max_size=10))
def test_payloads_do_not_depend_on_the_cuts(cuts: list[int]) -> None:
    borders = [0, *sorted(cuts), len(STREAM)]
    parser = EventParser()
    received = [STREAM[a:b] for a, b in pairwise(borders)]
    assert [payload for part in received for payload in parser.feed(part)] == PAYLOADS


def test_an_unfinished_line_is_not_an_event() -> None:
    assert list(EventParser().feed(b'data: {"a"')) == []
