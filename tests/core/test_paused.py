"""Paused requests are found in the policy's order, also after the policy has changed its mind."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from core.helpers import make_spec
from servekit.core.paused import Holders, PausedRequests
from servekit.core.policy.base import PolicyDefaults
from servekit.core.policy.queue import Rank
from servekit.core.request import Request


class PlaceAsNoted(PolicyDefaults):
    """A policy whose places a test sets."""

    def __init__(self) -> None:
        self.places: dict[Request, int] = {}

    def place(self, request: Request) -> Rank:
        return (self.places[request], request.sequence_number)


class PausedMachine(RuleBasedStateMachine):
    """Requests come, go and are promoted; the last one is always found."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = PlaceAsNoted()
        self.paused = PausedRequests(self.policy)  # type: ignore[arg-type]
        self.here: list[Request] = []
        self.running = [self._request(-1)]

    def _request(self, place: int) -> Request:
        request = Request(make_spec(f"r{len(self.policy.places)}", 4), 64)
        request.sequence_number = len(self.policy.places)
        self.policy.places[request] = place
        return request

    @rule(place=st.integers(0, 9))
    def pause(self, place: int) -> None:
        self.here.append(self._request(place))
        self.paused.add(self.here[-1])

    @precondition(lambda self: self.here)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.here))
        self.here.remove(request)
        self.paused.discard(request)

    @precondition(lambda self: self.here)
    @rule(data=st.data(), by=st.integers(1, 9))
    def promote(self, data: st.DataObject, by: int) -> None:
        self.policy.places[data.draw(st.sampled_from(self.here))] -= by

    @invariant()
    def the_last_is_found(self) -> None:
        last = self.policy.last(self.here) if self.here else None
        assert self.paused.last() is last
        rest = [request for request in self.here if request is not last]
        assert self.paused.last(sparing=last) is (self.policy.last(rest) if rest else None)

    @invariant()
    def it_holds_who_is_here(self) -> None:
        assert len(self.paused) == len(self.here) and all(request in self.paused for request in self.here)
        but = self.here[0] if self.here else self._request(0)
        holders = Holders(self.running, self.paused, but)
        assert set(holders) == {*self.running, *self.here} - {but} and len(holders) == len(list(holders))
        assert but not in holders


TestPaused = PausedMachine.TestCase
