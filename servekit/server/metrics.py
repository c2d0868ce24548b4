"""What Prometheus scrapes: the names, types and buckets that dashboards of LLM servers expect."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from servekit.core.request import FinishReason
from servekit.core.stats import Service
from servekit.engine.messages import Breakdown, EngineFacts, EngineStats, StepRecord
from servekit.load.metrics import Timeline, e2e_s, tpot_s
from servekit.server.errors import ErrorCode

TTFT_BUCKETS_S = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
TOKEN_BUCKETS_S = (.001, .002, .005, .01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
"""The usual buckets begin at 10 ms; the first three are for small models."""
REQUEST_BUCKETS_S = (.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
STEP_BUCKETS_S = (.0001, .0003, .001, .003, .01, .03, .1, .3, 1, 3, 10)
ITERATION_BUCKETS_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
PREFIX = "servekit"
ANSWERS = (FinishReason.stop, FinishReason.length)
LabelledCounter = Callable[[str], Counter]
"""A counter for each value of a label."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One finished engine request, as metrics and the log see it."""

    reason: FinishReason
    timeline: Timeline | None
    """None if it produced no token."""
    scheduled_s: float | None
    """When it was first part of a step; None if it never was."""
    num_prompt_tokens: int
    max_tokens: int


class Metrics:
    """The server's metrics in a registry of their own. All methods belong to the event loop."""

    def __init__(self, model_name: str, max_model_len: int) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._last = EngineStats()
        token_buckets = one_two_five(max_model_len)
        gauge, counter, histogram = self._gauge, self._counter, self._histogram

        self._running = gauge("num_requests_running", "Requests in the running batch.")
        self._waiting = gauge("num_requests_waiting", "Requests waiting to be scheduled.")
        self._kv_usage = gauge("kv_cache_usage_perc", "Share of the KV blocks held by requests, 0 to 1.")
        self._cache_config = Gauge(f"{PREFIX}:cache_config_info", "Shape of the KV cache; always 1.",
                                   ("model_name", "block_size", "num_gpu_blocks"), registry=self.registry)

        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that produced a token.")
        self._generation_tokens = counter("generation_tokens", "Output tokens.")
        self._sources = self._labelled("prompt_tokens_by_source", "Prompt tokens by where they came from.", "source")
        self._recomputed = counter("prompt_tokens_recomputed", "Tokens computed again after a preemption.")
        self._preemptions = counter("num_preemptions", "Preemptions.")
        self._preemption_kinds = self._labelled("preemptions_by_kind", "Preemptions by what became of the request: a "
                                                "paused one whose KV blocks are taken later counts twice.", "kind")
        self._swapped = self._labelled("swapped_blocks", "KV blocks copied to (out) and from (in) the host's memory.",
                                       "direction")
        self._prefix_queries = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._prefix_hits = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._finished = self._labelled("request_success", "Finished requests by reason.", "finished_reason")
        self._rejections = self._labelled("admission_rejections", "Requests refused by reason.", "reason")
        self._bounds = self._labelled("steps", "Steps by what kept them from doing more.", "bound")
        self._executions = self._labelled("steps_by_execution", "Steps by how they were computed: by the CUDA graph of "
                                          "a batch size, or eagerly.", "execution")
        self._classes = _ServiceCounters("class", "priority", self._labelled)
        self._tenants = _ServiceCounters("tenant", "tenant", self._labelled)
        self._http = Counter(f"{PREFIX}:http_requests", "HTTP requests.", ("method", "handler", "status"),
                             registry=self.registry)

        self._ttft = histogram("time_to_first_token_seconds", "Arrival to first token.", TTFT_BUCKETS_S)
        self._itl = histogram("inter_token_latency_seconds", "Gap between output tokens.", TOKEN_BUCKETS_S)
        self._tpot = histogram("request_time_per_output_token_seconds",
                               "Mean time per output token after the first, by request.", TOKEN_BUCKETS_S)
        self._e2e = histogram("e2e_request_latency_seconds", "Arrival to last token.", REQUEST_BUCKETS_S)
        self._queue = histogram("request_queue_time_seconds", "Arrival to first step.", REQUEST_BUCKETS_S)
        self._inference = histogram("request_inference_time_seconds", "First step to last token.", REQUEST_BUCKETS_S)
        self._prefill = histogram("request_prefill_time_seconds", "First step to first token.", REQUEST_BUCKETS_S)
        self._decode = histogram("request_decode_time_seconds", "First token to last token.", REQUEST_BUCKETS_S)
        self._prompt_sizes = histogram("request_prompt_tokens", "Prompt tokens by request.", token_buckets)
        self._output_sizes = histogram("request_generation_tokens", "Output tokens by request.", token_buckets)
        self._max_tokens = histogram("request_params_max_tokens", "max_tokens by request.", token_buckets)
        self._iteration = histogram("iteration_tokens_total", "Tokens computed by one step.", ITERATION_BUCKETS_TOKENS)
        self._steps = Histogram(f"{PREFIX}:scheduler_step_seconds", "Time of one step by part.",
                                ("model_name", "part"), buckets=STEP_BUCKETS_S, registry=self.registry)

    def describe(self, facts: EngineFacts) -> None:
        """Publish the shape of the KV cache."""
        self._cache_config.clear()
        self._cache_config.labels(self._model_name, facts.block_size_tokens, facts.num_kv_blocks).set(1)

    def observe_step(self, stats: EngineStats, step: StepRecord | None) -> None:
        """Take over what one step reports; a `StepObserver`."""
        last, self._last = counted_from(self._last, stats), stats
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._kv_usage.set(stats.kv_blocks_used / stats.kv_blocks_total if stats.kv_blocks_total else 0.0)
        cached = stats.cached_tokens_total - last.cached_tokens_total
        self._sources("local_compute").inc(stats.prompt_tokens_total - last.prompt_tokens_total)
        self._sources("local_cache_hit").inc(cached)
        self._recomputed.inc(stats.recomputed_tokens_total - last.recomputed_tokens_total)
        self._preemptions.inc(stats.preemptions_total - last.preemptions_total)
        self._prefix_queries.inc(stats.prefix_queries_total - last.prefix_queries_total)
        self._prefix_hits.inc(cached)
        self._swapped("out").inc(stats.swapped_out_blocks_total - last.swapped_out_blocks_total)
        self._swapped("in").inc(stats.swapped_in_blocks_total - last.swapped_in_blocks_total)
        if stats.breakdown is not None and stats.breakdown is not last.breakdown:
            self._observe_breakdown(last.breakdown or Breakdown(), stats.breakdown)
        if step is None:
            return
        self._iteration.observe(step.num_prefill_tokens + step.num_decode_tokens)
        for part, seconds in (("schedule", stats.schedule_s_total - last.schedule_s_total),
                              ("execute", stats.execute_s_total - last.execute_s_total),
                              ("update", stats.update_s_total - last.update_s_total)):
            self._steps.labels(self._model_name, part).observe(seconds)

    def _observe_breakdown(self, last: Breakdown, now: Breakdown) -> None:
        """Take over counters by name."""
        for counter, before, after in ((self._bounds, last.bounds, now.bounds),
                                       (self._executions, last.executions, now.executions),
                                       (self._preemption_kinds, last.preemptions, now.preemptions)):
            for name, total in after.items():
                counter(name).inc(total - before.get(name, 0))
        self._classes.count(last.classes, now.classes)
        self._tenants.count(last.tenants, now.tenants)

    def first_token(self, ttft_s: float, num_prompt_tokens: int, num_tokens: int) -> None:
        """A request's first event with tokens: `num_tokens` of them."""
        self._ttft.observe(ttft_s)
        self._prompt_tokens.inc(num_prompt_tokens)
        self._generation_tokens.inc(num_tokens)

    def more_tokens(self, gap_s: float, num_tokens: int) -> None:
        """A later event with tokens, `gap_s` after the one before; its tokens share the gap evenly."""
        for _ in range(num_tokens):
            self._itl.observe(gap_s / num_tokens)
        self._generation_tokens.inc(num_tokens)

    def finished(self, outcome: Outcome) -> None:
        """A request that has ended. Latencies are those of answers: errors and aborts would flatter them."""
        self._finished(outcome.reason.value).inc()
        if outcome.reason not in ANSWERS:
            return
        timeline, scheduled_s = outcome.timeline, outcome.scheduled_s
        self._prompt_sizes.observe(outcome.num_prompt_tokens)
        self._max_tokens.observe(outcome.max_tokens)
        if timeline is None:
            return
        self._output_sizes.observe(len(timeline.token_times_s))
        self._e2e.observe(e2e_s(timeline))
        tpot = tpot_s(timeline)
        if tpot is not None:
            self._tpot.observe(tpot)
        if scheduled_s is None:
            return
        first_s, last_s = timeline.token_times_s[0], timeline.token_times_s[-1]
        self._queue.observe(scheduled_s - timeline.arrived_s)
        self._prefill.observe(first_s - scheduled_s)
        self._decode.observe(last_s - first_s)
        self._inference.observe(last_s - scheduled_s)

    def refused(self, code: ErrorCode) -> None:
        """A request that was turned away before it computed anything."""
        self._rejections(code.value).inc()

    def answered(self, method: str, handler: str, status: int) -> None:
        """An HTTP request that has been answered; `handler` is its route, not its path."""
        self._http.labels(method, handler, status).inc()

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """The scrape's body and its content type, as the scraper's Accept header asks."""
        encode, content_type = choose_encoder(accept)
        return encode(_WithoutCreationTimes(self.registry)), content_type

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"{PREFIX}:{name}", text, ("model_name",), registry=self.registry).labels(self._model_name)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"{PREFIX}:{name}", text, ("model_name",), registry=self.registry).labels(self._model_name)

    def _labelled(self, name: str, text: str, label: str) -> LabelledCounter:
        metric = Counter(f"{PREFIX}:{name}", text, ("model_name", label), registry=self.registry)
        return lambda value: metric.labels(self._model_name, value)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"{PREFIX}:{name}", text, ("model_name",), buckets=buckets,
                         registry=self.registry).labels(self._model_name)


class _ServiceCounters:
    """What the requests of each class, or of each tenant, waited and got.

    The mean time in the queue is the rate of ..._queue_seconds over the rate of ..._started_requests. There are never
    more labels than the engine counts one by one (core.stats.MAX_GROUPS), and one for all others.
    """

    def __init__(self, scope: str, label: str, make: Callable[[str, str, str], LabelledCounter]) -> None:
        self._started = make(f"{scope}_started_requests", f"Requests that reached their first step, by {scope}.", label)
        self._queue_s = make(f"{scope}_queue_seconds", f"Arrival to first step, summed by {scope}.", label)
        self._prompt = make(f"{scope}_prompt_tokens", f"Prompt tokens of started requests by {scope}.", label)
        self._generation = make(f"{scope}_generation_tokens", f"Output tokens by {scope}.", label)

    def count(self, last: Mapping[str, Service], now: Mapping[str, Service]) -> None:
        """Take over what has been counted between two readings."""
        for name, service in now.items():
            before = last.get(name, _NO_SERVICE)
            self._started(name).inc(service.num_started - before.num_started)
            self._queue_s(name).inc(service.queue_s - before.queue_s)
            self._prompt(name).inc(service.prompt_tokens - before.prompt_tokens)
            self._generation(name).inc(service.generation_tokens - before.generation_tokens)


_NO_SERVICE = Service()


class _WithoutCreationTimes(Collector):
    """A registry without the `_created` series that its counters and histograms would have beside their values."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        """Every family of metrics."""
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family


_totals: Callable[[EngineStats], tuple[float, ...]] = attrgetter(
    "num_steps_total", "prompt_tokens_total", "cached_tokens_total", "prefix_queries_total", "recomputed_tokens_total",
    "generation_tokens_total", "preemptions_total", "swapped_out_blocks_total", "swapped_in_blocks_total",
    "schedule_s_total", "execute_s_total", "update_s_total")


def counted_from(last: EngineStats, now: EngineStats) -> EngineStats:
    """What the totals of two readings have grown from: `last`, or zero if one of them fell.

    Totals only fall when an engine dies, and the next one counts from zero.
    """
    has_fallen = any(after < before for before, after in zip(_totals(last), _totals(now), strict=True))
    return EngineStats() if has_fallen or _has_fewer_bounds(last, now) else last


def _has_fewer_bounds(last: EngineStats, now: EngineStats) -> bool:
    if last.breakdown is None or now.breakdown is None:
        return False
    return any(now.breakdown.bounds.get(bound, 0) < total for bound, total in last.breakdown.bounds.items())


def one_two_five(limit: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... up to and including the first that reaches `limit`."""
    buckets, decade = [], 1
    while True:
        for digit in (1, 2, 5):
            buckets.append(digit * decade)
            if buckets[-1] >= limit:
                return tuple(buckets)
        decade *= 10
