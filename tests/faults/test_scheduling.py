"""Chunks, budgets, preemption and company change when a token comes, never which one, and starve nobody."""

from __future__ import annotations

from pathlib import Path

import pytest

from faults.configurations import TINY
from faults.outputs import Reference, greedy, output, random_ids, streamed
from faults.serving import COMPLETIONS, Reply, Served, read_to_end, read_until, run, served

SHAPES = {
    "one token a step, below a block": ("scheduler.max_num_seqs=1", "scheduler.max_step_tokens=1",
                                        "scheduler.prefill.chunk_tokens=1"),
    "chunk above an odd block": ("scheduler.max_num_seqs=5", "scheduler.max_step_tokens=64",
                                 "scheduler.prefill.chunk_tokens=17", "memory.block_size_tokens=7"),
    "block above chunk and context": ("scheduler.max_num_seqs=8", "scheduler.max_step_tokens=64",
                                      "scheduler.prefill.chunk_tokens=15", "memory.block_size_tokens=700"),
}
"""Orders of chunk, step budget, block size and context (600 tokens); the tight server is one more."""


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_no_shape_of_steps_changes_the_output(shape: tuple[str, ...], folder: Path, reference: Reference) -> None:
    """F01, B18: whatever the order of chunk, budget, block and context, a long prompt equals whole prefill."""
    block_size = next((int(item.partition("=")[2]) for item in shape if "block_size" in item), 16)
    bodies = [greedy(random_ids(10, 500), 15), *(greedy(random_ids(11 + i, 30 + 10 * i), 30) for i in range(3))]
    room = ("model.max_model_len=600", f"memory.num_kv_blocks={3000 // block_size}")
    with served(folder, *TINY, *shape, *room) as server:
        assert [output(reply) for reply in server.together(bodies)] == reference.many(bodies)
        assert output(server.post(COMPLETIONS, bodies[0])) == reference.one(bodies[0])
        server.check_idle()


def test_greedy_output_does_not_depend_on_company(roomy: Served, reference: Reference) -> None:
    """F02 (three rounds rather than ten): one prompt alone and among fifteen others."""
    mine = greedy(random_ids(20, 33), 30)
    for number in range(3):
        others = [greedy(random_ids(100 * number + i, 5 + 9 * i), 30) for i in range(15)]
        replies = roomy.together([*others[:number * 5], mine, *others[number * 5:]])
        assert output(replies[number * 5]) == reference.one(mine)


def test_short_requests_overtake_a_long_prefill_and_decodes_go_on_beside_it(busy: Served) -> None:
    """B02: a prompt of a thousand chunks takes its share of each step and no more."""
    long_prompt = {"prompt": [7] * 32_000, "max_tokens": 1}
    with (busy.sent(COMPLETIONS, {"prompt": "d", "max_tokens": 30_000, "stream": True, "ignore_eos": True}) as decode,
          busy.sent(COMPLETIONS, long_prompt)):
        read_until(decode, 3)
        busy.wait_until(lambda: busy.stats["num_running"] == 2)
        tokens_before = busy.stats["generation_tokens_total"]
        steps_before = busy.stats["num_steps_total"]
        replies = busy.together([{"prompt": f"short {i}", "max_tokens": 3} for i in range(5)])
        assert [reply.status for reply in replies] == [200] * 5
        stats = busy.stats
        assert stats["num_running"] == 2, "the long prompt was meant to take longer than the short requests"
        num_steps = stats["num_steps_total"] - steps_before
        assert stats["generation_tokens_total"] - tokens_before >= num_steps + 5 * 3 - 5, "a step without the decode"


def test_preempted_requests_keep_their_place(tight: Served) -> None:
    """B07: of equal requests, earlier ones finish first, however often the pool ran out."""
    prompts = [random_ids(300 + i, 40) for i in range(12)]
    before = tight.stats["preemptions_total"]
    reply = tight.post(COMPLETIONS, {**greedy([], 50), "prompt": prompts, "stream": True})
    assert tight.stats["preemptions_total"] > before, "the pool was meant to be too small"
    finished = [choice["index"] for event in reply.events for choice in event["choices"] if choice["finish_reason"]]
    assert finished == sorted(finished)


def test_a_resumed_request_is_not_preempted_again_and_again(tight: Served, reference: Reference) -> None:
    """B09: with prompts of many chunks in a tight pool, recomputation stays a fraction of the work."""
    bodies = [greedy(random_ids(400 + i, 70), 60) for i in range(6)]
    before = tight.stats
    replies = tight.together(bodies)
    after = tight.stats
    assert [output(reply) for reply in replies] == reference.many(bodies)
    preemptions = after["preemptions_total"] - before["preemptions_total"]
    assert 0 < preemptions <= 5 * len(bodies)
    computed = sum(after[name] - before[name] for name in ("prompt_tokens_total", "generation_tokens_total"))
    assert computed <= 3 * len(bodies) * (70 + 60)
    assert after["recomputed_tokens_total"] > before["recomputed_tokens_total"]


def test_arrivals_while_others_stream_do_not_disturb_them(tight: Served, reference: Reference) -> None:
    """B12: requests that arrive one by one push others out; every stream is still the reference."""
    bodies = [greedy(random_ids(500 + i, 20 + 7 * i), 60) for i in range(8)]
    expected = reference.many(bodies)

    async def body() -> None:
        async with tight.session() as session:
            answers = []
            for one in bodies:
                answers.append(await session.post(COMPLETIONS, json={**one, "stream": True}))
                await answers[0].content.readuntil(b"\n\n")
            texts = [await answer.text() for answer in answers]
        for text, right in zip(texts[1:], expected[1:], strict=True):
            assert streamed(Reply(200, {}, text).events) == right

    run(body())


def test_a_preempted_stream_ends_like_any_other(tight: Served) -> None:
    """B12: role of the last chunk, reason, [DONE], for the request that is certain to be preempted."""
    with (tight.sent(COMPLETIONS, greedy(random_ids(600, 90), 90, stream=True)) as old,
          tight.sent(COMPLETIONS, greedy(random_ids(601, 90), 90, stream=True)) as young):
        texts = [read_to_end(connection) for connection in (old, young)]
    for text in texts:
        assert text.count('"finish_reason":"length"') == 1
        assert text.rstrip().removesuffix("0").rstrip().endswith("data: [DONE]")
