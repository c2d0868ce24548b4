"""How the servers of this folder are configured."""

from __future__ import annotations

from collections.abc import Iterator

from faults.serving import Served

TINY = ("model.source=dummy:tiny", "model.dtype=float64", "engine.threads=1", "server.port=0",
        "server.dev_endpoints=true")
"""The model of every server that must agree with the reference."""
SETTINGS = {
    # One request at a time, whole prompts, nothing shared, memory for all.
    "reference": (*TINY, "scheduler/prefix_cache=none", "scheduler.prefill.chunk_tokens=null",
                  "scheduler.max_num_seqs=1", "scheduler.max_step_tokens=2048", "memory.num_kv_blocks=200",
                  "scheduler.admission.queue_timeout_s=null"),
    # Room for what the tests ask: 64 requests at a time.
    "roomy": (*TINY, "model.max_model_len=2048", "memory.num_kv_blocks=1024", "scheduler.max_num_seqs=64",
              "scheduler.prefill.chunk_tokens=64"),
    # 24 blocks of 8 tokens for up to 32 requests: a request of full length takes all of them.
    "tight": (*TINY, "model.max_model_len=192", "memory.num_kv_blocks=24", "memory.block_size_tokens=8",
              "scheduler.max_num_seqs=32", "scheduler.max_step_tokens=64", "scheduler.prefill.chunk_tokens=16"),
}
ENDLESS_TOKENS = 30_000
"""Of a request to the servers below: it lasts longer than any test waits."""
BUSY = ("engine.threads=1", "server.port=0", "model.max_model_len=32768", "memory.num_kv_blocks=2200",
        "scheduler.max_num_seqs=4", "scheduler.max_step_tokens=64", "scheduler.prefill.chunk_tokens=32",
        "scheduler.admission.max_queue_requests=8")
"""Four slots, eight places in the queue, and a context for requests that outlast a test."""


def left_as_found(server: Served) -> Iterator[Served]:
    """Lend a server to a test; afterwards it must be idle, well, and served by the same engine process."""
    engine_pid, log_start = server.engine_pid, len(server.log)
    yield server
    server.check_idle(log_start)
    assert server.engine_pid == engine_pid, f"the engine was restarted: {server.log[-3000:]}"
