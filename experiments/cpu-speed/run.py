"""servekit beside llama-server and vLLM on a CPU, over HTTP, one server at a time in alternating rounds.

    python experiments/cpu-speed/run.py llama=/path/to/llama-server gguf=DIR [vllm=/path/to/python hf=DIR]
                                        [rounds=2] [only=NAME,NAME] [growing=NAME,NAME] [batches=1,8] [contexts=512]
                                        [out=result.json]

gguf: folder with smol-q4_1.gguf, smol-q8_0.gguf and smol-f32.gguf; vllm: the Python of an environment that has vLLM for
CPUs; hf: the same model as a Hugging Face folder. A peer that is not given is said to be absent. Prompts are random
token ids, fresh for every request, so that no cache helps where none is meant to. Each figure is the median over
rounds; ratios are of figures from this one run. growing: whose time between tokens is measured over batches and
contexts too, once; with rounds=0 nothing else is.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import random
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

PORT = 18200
BATCHES = "1,2,4,8,16,32,64,128"
CONTEXTS = "128,256,512,1024,2048,4096"
OURS = {
    "servekit int8": "model.quantization=int8 scheduler.max_num_seqs={slots}",
    "servekit int4": "model.quantization=int4 scheduler.max_num_seqs={slots}",
    "servekit int8 by twos": "model.quantization=int8 scheduler.max_num_seqs=2",
}
LLAMA = "{llama} -m {file} -np {slots} -c {context} -t {cores} -tb {cores} --poll 0 --poll-batch 0 --threads-http 1"

VLLM = ("{python} -m vllm.entrypoints.openai.api_server --model {folder} --dtype {dtype} --max-model-len 8192 "
        "--max-num-seqs {slots} --enable-prefix-caching")


@dataclass(frozen=True)
class Contender:
    """A server to measure."""

    name: str
    command: str
    """With {port}, {slots} (requests at once) and {context} (tokens over all slots)."""
    extra: dict[str, Any]
    """Added to every request's body."""
    environment: dict[str, str]


@dataclass(frozen=True)
class Reply:
    """When the tokens of one request came, in seconds after it was sent."""

    token_times_s: tuple[float, ...]
    """One a chunk; a token that ends inside a character comes with the next."""
    num_tokens: int

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0]

    @property
    def tpot_s(self) -> float:
        return (self.token_times_s[-1] - self.token_times_s[0]) / max(1, self.num_tokens - 1)

    def late_tpot_s(self, count: int) -> float:
        """Over the last `count` tokens, when every request of the batch has its first."""
        times = self.token_times_s[-count:]
        return (times[-1] - times[0]) / (len(times) - 1)


class Load:
    """Requests to one running server."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str, extra: dict[str, Any], seed: int) -> None:
        self._session = session
        self._url = url
        self._model = model
        self._extra = extra
        self._rng = random.Random(seed)

    def prompt(self, num_tokens: int) -> list[int]:
        return [self._rng.randrange(100, 40000) for _ in range(num_tokens)]

    async def one(self, prompt: list[int], num_output: int) -> Reply:
        body = {"model": self._model, "prompt": prompt, "max_tokens": num_output, "temperature": 0, "stream": True,
                "ignore_eos": True, **self._extra}
        start = time.perf_counter()
        async with self._session.post(f"{self._url}/v1/completions", json=body) as reply:
            if reply.status != 200:
                raise RuntimeError(f"{reply.status}: {(await reply.text())[:300]}")
            times = [time.perf_counter() - start async for line in reply.content if line.startswith(b"data: {")]
        return Reply(tuple(times), num_output)

    async def together(self, prompts: list[list[int]], num_output: int) -> tuple[list[Reply], float]:
        start = time.perf_counter()
        replies = await asyncio.gather(*(self.one(prompt, num_output) for prompt in prompts))
        return list(replies), time.perf_counter() - start


async def headline(load: Load) -> dict[str, float]:
    """The four comparisons of the README."""
    batch, batch_s = await load.together([load.prompt(256) for _ in range(32)], 64)
    singles = [await load.together([load.prompt(32)], 64) for _ in range(3)]
    prefills = [await load.one(load.prompt(512), 2) for _ in range(3)]
    prefix = load.prompt(512)
    await load.one(prefix + load.prompt(8), 2)
    _, shared_s = await load.together([prefix + load.prompt(32) for _ in range(32)], 64)
    return {
        "batch_tok_s": 32 * 64 / batch_s,
        "batch_tpot_p50_ms": 1e3 * statistics.median(reply.tpot_s for reply in batch),
        "batch_ttft_p50_ms": 1e3 * statistics.median(reply.ttft_s for reply in batch),
        "single_tok_s": statistics.median(64 / seconds for _, seconds in singles),
        "prefill_512_ttft_ms": 1e3 * statistics.median(reply.ttft_s for reply in prefills),
        "shared_prefix_tok_s": 32 * 64 / shared_s,
    }


async def by_batch(load: Load, sizes: list[int]) -> dict[str, float]:
    """Milliseconds between tokens when so many requests of about 64 tokens decode at once; the median of three."""
    async def once(size: int) -> float:
        replies, _ = await load.together([load.prompt(32) for _ in range(size)], 40)
        return 1e3 * statistics.median(reply.late_tpot_s(12) for reply in replies)

    return {str(size): statistics.median([await once(size) for _ in range(3)]) for size in sizes}


async def by_context(load: Load, contexts: list[int]) -> dict[str, dict[str, float]]:
    """Time to first token and between tokens, of one request, by the length of its prompt."""
    found = {}
    for context in contexts:
        reply = await load.one(load.prompt(context - 24), 24)
        found[str(context)] = {"ttft_ms": 1e3 * reply.ttft_s, "tpot_ms": 1e3 * reply.tpot_s}
    return found


@contextmanager
def running(contender: Contender, slots: int, context: int) -> Iterator[str]:
    """Start a server; yields its address; stops it with everything it started."""
    command = contender.command.format(port=PORT, slots=slots, context=context)
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(shlex.split(command), stdout=log, stderr=log, start_new_session=True,
                                   env={**os.environ, **contender.environment})
        try:
            yield f"http://127.0.0.1:{PORT}"
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


async def ready(session: aiohttp.ClientSession, url: str, limit_s: float) -> str:
    """Wait for a server; returns the name of its model."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        try:
            async with session.get(f"{url}/health") as health:
                if health.status == 200:
                    async with session.get(f"{url}/v1/models") as models:
                        return str((await models.json())["data"][0]["id"])
        except (aiohttp.ClientError, OSError):
            pass
        await asyncio.sleep(0.1)
    raise RuntimeError(f"not ready after {limit_s:.0f} s")


@asynccontextmanager
async def loaded(contender: Contender, slots: int, context: int, seed: int) -> AsyncIterator[tuple[Load, float]]:
    """A running server that has answered a request, and how long its start took in seconds."""
    with running(contender, slots, context) as url:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(1800),
                                         connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session:
            start = time.perf_counter()
            model = await ready(session, url, 600)
            ready_s = time.perf_counter() - start
            load = Load(session, url, model, contender.extra, seed)
            await load.together([load.prompt(64) for _ in range(min(2, slots))], 8)
            yield load, ready_s


async def measure(contender: Contender, seed: int) -> dict[str, float]:
    async with loaded(contender, 32, 32 * 1024, seed) as (load, ready_s):
        return {"ready_s": ready_s, **await headline(load)}


async def grow(contender: Contender, seed: int, batches: list[int], contexts: list[int]) -> dict[str, Any]:
    async with loaded(contender, max(batches), max(batches) * 512, seed) as (load, _):
        found: dict[str, Any] = {"by_batch_ms": await by_batch(load, batches)}
    async with loaded(contender, 1, 8192, seed + 1) as (load, _):
        return {**found, "by_context": await by_context(load, contexts)}


def contenders(options: dict[str, str]) -> list[Contender]:
    cores = len(os.sched_getaffinity(0))
    ours = (f"{sys.executable} -m servekit serve server.port={{port}} model.max_model_len=8192 "
            "scheduler.admission.queue_timeout_s=null")
    found = [Contender(name, f"{ours} {settings}", {}, {}) for name, settings in OURS.items()]
    if "llama" in options:
        library_path = {"LD_LIBRARY_PATH": str(Path(options["llama"]).parent)}
        for kind in ("q4_1", "q8_0", "f32"):
            file = Path(options["gguf"]) / f"smol-{kind}.gguf"
            command = LLAMA.format(llama=options["llama"], file=file, cores=cores, slots="{slots}", context="{context}")
            found.append(Contender(f"llama-server {kind}", f"{command} --port {{port}}", {}, library_path))
    else:
        print("llama-server is absent: give llama=PATH gguf=DIR to measure it")
    if "vllm" in options:
        environment = {"VLLM_CPU_OMP_THREADS_BIND": f"0-{cores - 1}", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
                       "VLLM_CPU_KVCACHE_SPACE": "4", "HF_HUB_OFFLINE": "1"}
        for name, dtype in (("fp32", "float32"), ("bf16", "bfloat16")):
            command = VLLM.format(python=options["vllm"], folder=options["hf"], dtype=dtype, slots="{slots}")
            found.append(Contender(f"vllm {name}", f"{command} --port {{port}}", {}, environment))
    else:
        print("vLLM is absent: give vllm=PYTHON hf=DIR to measure it")
    only = options.get("only", "").split(",") if "only" in options else None
    return [contender for contender in found if only is None or contender.name in only]


def limits() -> dict[str, float]:
    """What the machine can do: memory read, float32 and int8 products, by torch; the best of two seconds each."""
    import torch

    from servekit.kernels.cpu import huge_pages

    numbers = huge_pages.empty((64 * 1024 * 1024,), torch.float32).fill_(1)
    weights = torch.randn(1536, 1536)
    x = torch.randn(512, 1536)
    packed = torch.ops.quantized.linear_prepack(torch.quantize_per_tensor(weights, 0.05, 0, torch.qint8), None)
    products = 2 * 512 * 1536 * 1536

    def best_s(run: Any) -> float:
        run()
        times, end = [], time.perf_counter() + 2
        while (start := time.perf_counter()) < end:
            run()
            times.append(time.perf_counter() - start)
        return min(times)

    return {"read_gb_s": 4 * numbers.numel() / best_s(numbers.sum) / 1e9,
            "float32_gflop_s": products / best_s(lambda: x @ weights.T) / 1e9,
            "int8_gop_s": products / best_s(lambda: torch.ops.quantized.linear_dynamic(x, packed)) / 1e9}


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


def show(results: dict[str, dict[str, float]]) -> None:
    if not results:
        return
    keys = list(next(iter(results.values())))
    width = max(map(len, results)) + 2
    print("".ljust(width) + "".join(key.rjust(21) for key in keys))
    for name, row in results.items():
        print(name.ljust(width) + "".join(f"{row[key]:21.1f}" for key in keys))
    peers = {name: row for name, row in results.items() if name not in OURS}
    for name in results.keys() & set(OURS) if peers else ():
        for key in keys[1:]:
            best = (min if key.endswith("_ms") else max)(peers, key=lambda peer: peers[peer][key])
            ours, theirs = results[name][key], peers[best][key]
            print(f"{key}: {ours:.1f} of {name} against {theirs:.1f} of {best}: {ours / theirs:.2f} x")


def main() -> None:
    options = dict(argument.split("=", 1) for argument in sys.argv[1:])
    rounds = int(options.get("rounds", "2"))
    competing = contenders(options)
    runs: dict[str, list[dict[str, float]]] = {contender.name: [] for contender in competing}
    for number in range(rounds):
        for index, contender in enumerate(competing):
            row = asyncio.run(measure(contender, 1000 * number + index))
            runs[contender.name].append(row)
            print(f"round {number + 1}, {contender.name}: {json.dumps({k: round(v, 1) for k, v in row.items()})}",
                  flush=True)
    growth, growing = {}, options.get("growing", "").split(",")
    batches, contexts = ([int(size) for size in options.get(key, default).split(",")]
                         for key, default in (("batches", BATCHES), ("contexts", CONTEXTS)))
    for index, contender in enumerate(competing):
        if contender.name in growing:
            growth[contender.name] = asyncio.run(grow(contender, 5000 + index, batches, contexts))
            print(f"growth, {contender.name}: {json.dumps(growth[contender.name])}", flush=True)
    result = {name: medians(rows) for name, rows in runs.items() if rows}
    show(result)
    if "out" in options:
        facts = {"date": time.strftime("%Y-%m-%d"), "machine": platform.machine(), "processor": _processor(),
                 "cores": len(os.sched_getaffinity(0)), "python": platform.python_version(), **limits()}
        Path(options["out"]).write_text(json.dumps(
            {"facts": facts, "medians": result, "rounds": runs, "growth": growth}, indent=1) + "\n")


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


if __name__ == "__main__":
    main()
