"""The real engine on random weights: decodes, prompts, both at once, with and without graphs and overlap."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from bench import Bench, Row
from torch import Tensor

from servekit.config.compose import compose_serve
from servekit.config.schema import Config, Device, DType, KernelSet, KVDType, Quantization
from servekit.core.request import RequestId, RequestSpec, SamplingParams
from servekit.engine.build import LoadedModel, assemble
from servekit.engine.engine import Engine
from servekit.engine.messages import StepOutput
from servekit.engine.resolve import resolve
from servekit.kernels import reference_kernels
from servekit.model.decoder import Decoder
from servekit.model.footprint import WeightBits
from servekit.model.local import LocalModel, SourceKind
from servekit.model.shapes import SHAPES
from servekit.model.spec import ModelSpec, tensor_shapes
from servekit.model.weights import StoredTensor, load_weights
from servekit.runner.device import find_device
from servekit.runner.memory import Formats, weight_bits

_TORCH = {DType.bfloat16: torch.bfloat16, DType.float32: torch.float32}
_KV_BYTES = {KVDType.fp8: 1, KVDType.bfloat16: 2, KVDType.float32: 4}
_WARM_UP_STEPS = 4
_SPARE_TOKENS = 512
"""Beyond the context, for the steps that are measured."""
_PREFILL_ROUNDS = 3
_STEPS_BETWEEN_PROMPTS = 16
_WHOLE = ("scheduler.prefill=whole",)
_CHUNKED = ("scheduler.prefill.chunk_tokens=null",)
"""Of a prompt, as much as the step has room for beside the decodes."""


class RandomTensors:
    """A checkpoint of random numbers that are made on the device: a host takes minutes for so many."""

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        self._device = device
        self._tensors = {name: StoredTensor(shape, 4 * torch.Size(shape).numel())
                         for name, shape in tensor_shapes(spec).items()}

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        return self._tensors

    def describe(self, name: str) -> str:
        return f"random tensor {name}"

    def read(self, name: str) -> Tensor:
        shape = self._tensors[name].shape
        made = torch.ones(shape, device=self._device)
        return made if name.endswith("norm.weight") else made.normal_(std=0.02)

    def read_stored(self, name: str) -> None:
        """None: these are plain numbers."""


def settings(bench: Bench, quantization: Quantization, max_step_tokens: int, *overrides: str,
             prefill: Sequence[str] = _WHOLE) -> Config:
    """The configuration of all runs but for what one is about; later overrides win."""
    sizes = bench.sizes
    where = ["engine.device=cuda", "engine.kernels=triton"] if bench.device.type == "cuda" else [
        "engine.device=cpu", "engine.kernels=reference", "memory.num_kv_blocks=400"]
    return compose_serve([
        f"model.source=dummy:{sizes.shape}", f"model.quantization={quantization.value}", *where,
        f"model.max_model_len={sizes.context_tokens + _SPARE_TOKENS}", "scheduler.prefix_cache=none",
        f"scheduler.max_num_seqs={max(sizes.batches)}", f"scheduler.max_step_tokens={max_step_tokens}", *prefill,
        "scheduler.admission.queue_timeout_s=null", "scheduler.admission.request_timeout_s=null", *overrides]).config


def decode_settings(bench: Bench, quantization: Quantization, *overrides: str) -> Config:
    """Prompts are computed one by one, so that all their steps have one size: products are tuned for each by itself."""
    longest = bench.sizes.context_tokens + _SPARE_TOKENS
    return settings(bench, quantization, max(longest, *bench.sizes.batches), *overrides)


def graph_sizes(bench: Bench, sizes: Sequence[int]) -> list[str]:
    """Graphs for these numbers of decodes, where there can be graphs."""
    return [f"engine.graph_batch_sizes=[{','.join(map(str, sizes))}]"] if bench.device.type == "cuda" else []


def load(bench: Bench, quantization: Quantization) -> LoadedModel:
    """The model on the device."""
    config, spec = decode_settings(bench, quantization), SHAPES[bench.sizes.shape]
    device = find_device(Device(bench.device.type))
    is_gpu = bench.device.type == "cuda"
    kernels = bench.kernels() if is_gpu else reference_kernels()
    resolved = resolve(config, spec, device, KernelSet(kernels.name))
    started = time.monotonic()
    weights = load_weights(RandomTensors(spec, bench.device), spec, _TORCH[resolved.dtype], bench.device, kernels,
                           resolved.quantization, lambda done, total: None)
    decoder = Decoder(spec, weights, kernels, max(*bench.sizes.prefills, bench.sizes.mixed_prompt_tokens)
                      + bench.sizes.context_tokens + _SPARE_TOKENS)
    return LoadedModel(config, LocalModel(SourceKind.dummy, bench.sizes.shape, None, bench.sizes.shape), spec, device,
                       kernels, resolved, decoder, time.monotonic() - started)


class Session:
    """An engine under one configuration, and its requests: random tokens in, so many tokens out."""

    def __init__(self, model: LoadedModel, config: Config) -> None:
        gc.collect()
        if model.device.kind is Device.cuda:
            torch.cuda.empty_cache()  # The cache of the session before.
        # Every setting is one that this model was loaded for.
        built = assemble(config, replace(model, config=config))
        self.engine: Engine = built.engine
        self.kv_tokens = built.facts.kv_tokens
        self._vocab = model.spec.vocab_size
        self._generator = torch.Generator().manual_seed(1)
        self._numbers = itertools.count()

    def add(self, count: int, prompt_tokens: int, max_tokens: int) -> list[RequestId]:
        """Requests that go on to `max_tokens` whatever they say."""
        prompts = torch.randint(self._vocab, (count, prompt_tokens), generator=self._generator).tolist()
        specs = [RequestSpec(RequestId(str(next(self._numbers))), tuple(prompt),
                             SamplingParams(max_tokens, temperature=0.0), time.monotonic()) for prompt in prompts]
        self.engine.add(specs)
        return [spec.request_id for spec in specs]

    def until_first_tokens(self, request_ids: Sequence[RequestId]) -> float:
        """Step until each has one; returns the seconds that it took."""
        start, waiting = time.perf_counter(), set(request_ids)
        while waiting:
            events = self.engine.step().events
            failed = [event.message for event in events if event.message]
            assert not failed, failed[0]
            waiting -= {event.request_id for event in events if event.token_ids}
        return time.perf_counter() - start

    def end(self, request_ids: Sequence[RequestId]) -> None:
        """Leave these requests, and whatever runs of them."""
        self.engine.abort(request_ids)
        for _ in range(3):
            if self.engine.has_work:
                self.engine.step()

    def steps(self, count: int) -> list[StepOutput]:
        return [self.engine.step() for _ in range(count)]


@dataclass(frozen=True)
class Work:
    """What a step must at least read and multiply."""

    spec: ModelSpec
    bits: WeightBits
    kv_bytes_per_token: int

    @classmethod
    def of(cls, model: LoadedModel) -> Work:
        resolved = model.resolved
        dtype_bytes, kv_bytes = _TORCH[resolved.dtype].itemsize, _KV_BYTES[resolved.kv_dtype]
        formats = Formats(resolved.quantization, resolved.kernels, dtype_bytes, kv_bytes)
        return cls(model.spec, weight_bits(model.spec, formats), model.spec.kv_bytes_per_token(kv_bytes))

    @property
    def weight_bytes(self) -> float:
        """Read once a step: the layers' matrices and the head."""
        head = self.spec.vocab_size * self.spec.hidden_size
        return (self.spec.num_matrix_parameters * self.bits.matrices + head * self.bits.head) / 8

    def decode_limit_s(self, bench: Bench, batch: int, context_tokens: float) -> float:
        """Products, then attention, one after the other; `context_tokens` of all requests together."""
        limits, head = bench.known_limits, self.spec.vocab_size * self.spec.hidden_size
        flops = 2.0 * batch * (self.spec.num_matrix_parameters + head)
        return (limits.seconds(self.weight_bytes, flops)
                + limits.seconds(context_tokens * self.kv_bytes_per_token, self._attention_flops(context_tokens)))

    def prefill_flops(self, tokens: int) -> float:
        """Of one prompt; the head sees its last token alone. Every query sees half of the prompt on average."""
        head = self.spec.vocab_size * self.spec.hidden_size
        return 2.0 * tokens * self.spec.num_matrix_parameters + 2.0 * head + self._attention_flops(tokens ** 2 / 2)

    def _attention_flops(self, pairs: float) -> float:
        """Of so many pairs of a query and a key."""
        return 4.0 * pairs * self.spec.num_layers * self.spec.num_heads * self.spec.head_dim


def bf16(bench: Bench) -> Iterator[Row]:
    """Decodes at every batch, then prompts."""
    model = load(bench, Quantization.none)
    yield {"name": "loaded", "seconds": model.load_s}
    yield from decodes(bench, model, "", bench.sizes.batches)
    yield from prefills(bench, model, bench.sizes.prefills)


def fp8(bench: Bench) -> Iterator[Row]:
    """The same with weights in fp8."""
    yield from quantized(bench, Quantization.fp8)


def int4(bench: Bench) -> Iterator[Row]:
    """The same with weights in int4."""
    yield from quantized(bench, Quantization.int4)


def quantized(bench: Bench, quantization: Quantization) -> Iterator[Row]:
    """Every number of rows has its own fastest configuration, which takes seconds to find: so a few at a time."""
    model, batches = load(bench, quantization), bench.sizes.batches
    yield {"name": "loaded", "seconds": model.load_s}
    for index in range(0, len(batches), 2):
        if bench.has_time:
            yield from decodes(bench, model, "", batches[index:index + 2])
    yield from prefills(bench, model, (2 * bench.sizes.context_tokens,))


def modes(bench: Bench) -> Iterator[Row]:
    """Graphs and overlap, each on and off; and a KV cache in fp8."""
    model, batches = load(bench, Quantization.none), bench.sizes.mode_batches
    graphs = [("graphs", graph_sizes(bench, batches))] if bench.device.type == "cuda" else []
    without = ["engine.cuda_graphs=false"] if bench.device.type == "cuda" else []
    for (graph_name, graph_settings), overlap in itertools.product([*graphs, ("no graphs", without)], (True, False)):
        if bench.has_time:
            yield from decodes(bench, model, f"{graph_name}, {'overlap' if overlap else 'no overlap'}", batches,
                               *graph_settings, f"engine.overlap={str(overlap).lower()}")
    if bench.has_time:
        narrow = replace(model, resolved=replace(model.resolved, kv_dtype=KVDType.fp8))
        yield from decodes(bench, narrow, "fp8 KV", batches, *graph_sizes(bench, batches), "memory.kv_dtype=fp8")


def decodes(bench: Bench, model: LoadedModel, mode: str, batches: Sequence[int], *overrides: str) -> Iterator[Row]:
    """The largest batch is filled once; the others are what is left when requests end."""
    sizes, work = bench.sizes, Work.of(model)
    config = decode_settings(bench, model.resolved.quantization, *(overrides or graph_sizes(bench, batches)))
    session = Session(model, config)
    most = session.kv_tokens // (sizes.context_tokens + _SPARE_TOKENS)
    if too_large := [batch for batch in batches if batch > most]:
        yield {"name": "decode", "mode": mode, "absent": f"the KV cache holds {most} requests, not {too_large}"}
        batches = [batch for batch in batches if batch <= most]
    if not batches:
        return
    # One more than the context: so the prompts and the largest step count as the same number of rows.
    requests = session.add(max(batches), sizes.context_tokens + 1, _SPARE_TOKENS - 1)
    session.until_first_tokens(requests)
    for batch in sorted(batches, reverse=True):
        if bench.has_time:
            session.engine.abort(requests[batch:])
            requests = requests[:batch]
            session.steps(_WARM_UP_STEPS)
            yield decode_row(bench, session, work, mode, batch)
    session.end(requests)


def decode_row(bench: Bench, session: Session, work: Work, mode: str, batch: int) -> Row:
    before, start = session.engine.stats(), time.perf_counter()
    outputs = session.steps(bench.sizes.timed_steps)
    step_s = (time.perf_counter() - start) / len(outputs)
    after = session.engine.stats()
    host_s = (after.schedule_s_total + after.update_s_total - before.schedule_s_total - before.update_s_total)
    contexts = [output.step.decode_context_tokens for output in outputs if output.step is not None]
    tokens = sum(len(event.token_ids) for output in outputs for event in output.events)
    assert tokens == batch * len(outputs), f"{tokens} tokens in {len(outputs)} steps of {batch} decodes"
    limit_s = work.decode_limit_s(bench, batch, statistics.mean(contexts))
    return {"name": "decode", "mode": mode, "batch": batch, "step_ms": 1e3 * step_s, "tokens_per_s": batch / step_s,
            "limit_ms": 1e3 * limit_s, "share": limit_s / step_s, "host_ms": 1e3 * host_s / len(outputs)}


def prefills(bench: Bench, model: LoadedModel, lengths: Sequence[int]) -> Iterator[Row]:
    """One prompt alone, a token shorter, in one step; the best of some rounds after one that tunes."""
    longest = max(lengths)
    config = settings(bench, model.resolved.quantization, max(longest, *bench.sizes.batches),
                      f"model.max_model_len={longest}",
                      *(["engine.cuda_graphs=false"] if bench.device.type == "cuda" else []))
    session, work = Session(model, config), Work.of(model)
    for tokens in lengths:
        if bench.has_time:
            session.until_first_tokens(session.add(1, tokens - 1, 1))
            seconds = min(session.until_first_tokens(session.add(1, tokens - 1, 1)) for _ in range(_PREFILL_ROUNDS))
            flops = work.prefill_flops(tokens - 1)
            limit_s = bench.known_limits.seconds(work.weight_bytes, flops)
            yield {"name": "prefill", "tokens": tokens, "ms": 1e3 * seconds, "tokens_per_s": tokens / seconds,
                   "limit_ms": 1e3 * limit_s, "share": limit_s / seconds}


def mixed(bench: Bench) -> Iterator[Row]:
    """Decodes that long prompts come between, in chunks beside them or whole before them."""
    model, sizes = load(bench, Quantization.none), bench.sizes
    most_seqs = sizes.mixed_decodes + 1
    longest = max(sizes.mixed_prompt_tokens, sizes.context_tokens) + _SPARE_TOKENS
    ways = {"chunked": (sizes.mixed_chunk_tokens + most_seqs, _CHUNKED), "whole": (longest, _WHOLE)}
    for name, (max_step_tokens, prefill) in ways.items():
        if bench.has_time:
            config = settings(bench, Quantization.none, max_step_tokens, f"model.max_model_len={longest}",
                              f"scheduler.max_num_seqs={most_seqs}", prefill=prefill)
            yield {"name": name, **mixed_load(bench, Session(model, config))}


def mixed_load(bench: Bench, session: Session) -> Row:
    sizes = bench.sizes
    session.until_first_tokens(session.add(1, sizes.mixed_prompt_tokens, 1))  # Tuned: not while it is measured.
    decoding = session.add(sizes.mixed_decodes, sizes.context_tokens, _SPARE_TOKENS - 1)
    session.until_first_tokens(decoding)
    session.steps(_WARM_UP_STEPS)
    return watched(session, decoding, sizes.mixed_prompts, sizes.mixed_prompt_tokens)


def watched(session: Session, decoding: Sequence[RequestId], num_prompts: int, prompt_tokens: int) -> Row:
    """Let the prompts come one after the other, with some steps between, and look at the gaps between tokens."""
    watch, ttft_s, start = Watch(session, decoding), [], time.perf_counter()
    for _ in range(num_prompts):
        prompt, = session.add(1, prompt_tokens, 1)
        sent = time.perf_counter()
        while prompt not in watch.step():
            pass
        ttft_s.append(time.perf_counter() - sent)
        for _ in range(_STEPS_BETWEEN_PROMPTS):
            watch.step()
    elapsed_s, gaps_s = time.perf_counter() - start, sorted(watch.gaps_s)
    session.end(decoding)
    return {"decodes": len(decoding), "prompts": num_prompts, "gap_p50_ms": 1e3 * statistics.median(gaps_s),
            "gap_p99_ms": 1e3 * gaps_s[int(0.99 * (len(gaps_s) - 1))], "gap_max_ms": 1e3 * gaps_s[-1],
            "ttft_p50_ms": 1e3 * statistics.median(ttft_s), "output_tokens_per_s": len(gaps_s) / elapsed_s,
            "prompt_tokens_per_s": num_prompts * prompt_tokens / elapsed_s}


class Watch:
    """Steps an engine and notes when the tokens of some requests come."""

    def __init__(self, session: Session, request_ids: Sequence[RequestId]) -> None:
        self.gaps_s: list[float] = []
        """Between each token and the one before it of the same request."""
        self._engine = session.engine
        self._last_s = dict.fromkeys(request_ids, time.perf_counter())

    def step(self) -> set[RequestId]:
        """One step; returns whose tokens came."""
        came = {event.request_id for event in self._engine.step().events if event.token_ids}
        now_s = time.perf_counter()
        for request_id in came & self._last_s.keys():
            self.gaps_s.append(now_s - self._last_s[request_id])
            self._last_s[request_id] = now_s
        return came
