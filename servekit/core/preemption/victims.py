"""Victim rules: which running request gives way, shared by the preemption components."""

from __future__ import annotations

from collections.abc import Sequence

from servekit.config.preemption import VictimRule
from servekit.core.policy.base import Policy
from servekit.core.request import Request


def choose_victim(rule: VictimRule, running: Sequence[Request], policy: Policy) -> Request:
    """Who of `running` (in order of admission, at least one) gives way.

    No rule can make the scheduler go round in circles. Output tokens survive a preemption. Whoever asks for room is a
    decode: it has sampled a token since it last started, and it samples another now unless it is the victim itself.
    So each round of preemptions is paid for by a token, and there are only so many tokens.

    No rule makes one request give way for ever, either, while others come and go:

    - policy: whom the policy would serve first is never the victim.
    - newest: a request gives way to those admitted before it only, and nobody new starts while it waits: they become
      fewer (vLLM V1, DeepSpeed-FastGen).
    - fewest_output and largest: the request that arrived first is spared, and each one is the first some day. The
      former loses the least work (SGLang; among equals the longest prompt), the latter frees the most blocks.

    A request that is alone is its own victim.
    """
    match rule:
        case VictimRule.policy:
            return policy.last(running)
        case VictimRule.newest:
            return running[-1]
        case VictimRule.fewest_output:
            return min(_without_first(running), key=lambda request: (
                request.num_output, -request.num_prompt, -request.sequence_number))
        case VictimRule.largest:
            return max(_without_first(running), key=lambda request: (
                len(request.block_ids), request.sequence_number))


def _without_first(running: Sequence[Request]) -> Sequence[Request]:
    """All but the request that arrived first, unless it is alone."""
    first = min(running, key=lambda request: request.sequence_number)
    return [request for request in running if request is not first] or running
