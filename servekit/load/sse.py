"""Server-sent events, as far as the OpenAI API uses them."""

from __future__ import annotations

from collections.abc import Iterator

_DATA = b"data:"


class EventParser:
    """Cuts a byte stream into the payloads of its `data:` lines.

    The API sends one line of data an event, so a line is an event; comments and other fields are skipped.
    Lines may end in LF or CRLF and may be split anywhere between two reads.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, received: bytes) -> Iterator[bytes]:
        """Yield the payloads that are complete with these bytes."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        for line in lines:
            if line.startswith(_DATA):
                yield line[len(_DATA):].strip()
