"""A plan as tensors: every token, position and slot against a naive count."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from servekit.core.plan import Plan, PlanItem
from servekit.core.request import Request, RequestId, RequestSpec, SamplingParams
from servekit.runner.inputs import SampledTokens, build_inputs


@given(st.data(), st.integers(1, 17))
@settings(max_examples=100, deadline=None)
def test_tokens_positions_and_slots(data: st.DataObject, block_size: int) -> None:
    items, blocks = [], iter(data.draw(st.permutations(range(400))))
    for number in range(data.draw(st.integers(1, 6))):
        tokens = data.draw(st.lists(st.integers(0, 1000), min_size=1, max_size=60))
        request = Request(RequestSpec(RequestId(str(number)), tuple(tokens), SamplingParams(max_tokens=1), 0.0), 1000)
        request.block_ids = [next(blocks) for _ in range(-(-len(tokens) // block_size))]
        start = data.draw(st.integers(0, len(tokens) - 1))
        count = data.draw(st.integers(1, len(tokens) - start))
        items.append(PlanItem(request, start, count, start + count == len(tokens)))
    plan = Plan(tuple(items), sum(item.num_tokens for item in items))

    inputs = build_inputs(plan, block_size, SampledTokens(()))

    expected = [(item.request.token_ids[position], position,
                 item.request.block_ids[position // block_size] * block_size + position % block_size)
                for item in items for position in range(item.start, item.start + item.num_tokens)]
    found = zip(inputs.token_ids.tolist(), inputs.positions.tolist(), inputs.batch.slots.tolist(), strict=True)
    assert list(found) == expected
    assert inputs.row_of[-1] == plan.num_tokens
    for row, item in enumerate(items):
        end = item.start + item.num_tokens
        held = -(-end // block_size)
        assert inputs.row_of[row + 1] - inputs.row_of[row] == item.num_tokens
        assert inputs.batch.context_lens[row] == end == inputs.batch.context_lens_host[row]
        assert inputs.batch.block_tables[row, :held].tolist() == item.request.block_ids[:held]
    assert inputs.batch.max_query_tokens == max(item.num_tokens for item in items)
    assert inputs.batch.max_context_tokens == max(item.start + item.num_tokens for item in items)
