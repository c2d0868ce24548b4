"""A memory attack: the winner must survive the worst that clients may send it.

A load test sends what the workload says. An engine that fills its memory to the last block may hold for as long as
that lasts, and die of one long prompt. So a fresh engine gets, one after the other:

- the longest prompts that the model's length allows, as many as fill the token budget of a step twice over;
- a full batch, `scheduler.max_num_seqs` requests at once, at full context. Where the KV cache cannot hold that, their
  prompts fill it but for an eighth and their answers ask for a quarter more than there is: running requests must give
  way, and are swapped where that is configured.

It survives if its process lives, no request is lost, and a small request is answered at the end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

import msgspec
import numpy as np

from servekit.config.errors import ConfigError
from servekit.config.preemption import Preemption
from servekit.config.resolve import config_hash
from servekit.config.schema import Config, RestartPolicy
from servekit.core.request import FinishReason
from servekit.engine.client import EngineClient, EngineState, StartError
from servekit.engine.messages import EngineFacts, EngineStats, StepRecord
from servekit.engine.process_client import ProcessClient
from servekit.load.target import FailureKind, RequestFailed
from servekit.load.workload import WorkloadRequest
from servekit.model.local import LocalModel
from servekit.tuner.engine_target import EngineTarget

FORMAT_VERSION = 1
OUTPUT_TOKENS = 8
"""Of a request with the longest prompt: enough that all of a batch decode together."""
_OVERFILL = 1.25
"""Of the KV cache, what the contexts of a full batch ask for."""
_PROMPT_SHARE = 0.7
"""Of such a context: all prompts fit, and 0.875 of the cache is full before the answers grow."""
_BUDGETS = 2
_RETRY_S = 0.05
_NO_LOSS = (FinishReason.queue_full, FinishReason.queue_timeout, FinishReason.request_timeout, FinishReason.over_quota)
"""Endings that the configuration itself asks for."""


class End(Enum):
    """What became of a request."""

    answered = "answered"
    given_up = "given_up"
    """By a limit of the configuration: it waited or took too long, its tenant's quota was used up."""
    cut_off = "cut_off"
    """By the attack's own time limit."""
    lost = "lost"
    """The engine failed it."""


class Sent(msgspec.Struct, frozen=True):
    """One request of an attack."""

    prompt_tokens: int
    output_tokens: int
    end: End
    text: str = ""
    """What the engine said of a request that was not answered."""


class Phase(msgspec.Struct, frozen=True):
    """One kind of load, and what it did."""

    name: str
    duration_s: float
    requests: list[Sent]
    peak_running: int
    """Most requests that ran at once."""
    peak_kv_blocks: int
    preemptions: int
    swapped_out_blocks: int


class AttackLog(msgspec.Struct, frozen=True):
    """An attack as it is on disk."""

    config_hash: str
    num_kv_blocks: int
    max_model_len: int
    swap_is_configured: bool
    phases: list[Phase]
    peak_memory_bytes: int | None
    """Largest resident memory of the engine's process (VmHWM). None: unknown on this system. Not that of a GPU."""
    failure: str | None
    """Why the engine was not there to the end."""
    format_version: int = FORMAT_VERSION

    @property
    def survived(self) -> bool:
        """Whether the engine lived, lost no request and answered in the end."""
        last = self.phases[-1].requests if self.phases else []
        return (self.failure is None and not self.num(End.lost)
                and any(sent.end is End.answered for sent in last))

    @property
    def preemptions(self) -> int:
        """In all phases."""
        return sum(phase.preemptions for phase in self.phases)

    @property
    def swapped_out_blocks(self) -> int:
        """In all phases."""
        return sum(phase.swapped_out_blocks for phase in self.phases)

    @property
    def peak_kv_share(self) -> float:
        """Of the KV cache, how much was in use at once."""
        return max((phase.peak_kv_blocks for phase in self.phases), default=0) / self.num_kv_blocks

    def num(self, end: End) -> int:
        """Requests that ended so."""
        return sum(sent.end is end for phase in self.phases for sent in phase.requests)

    def write(self, path: Path) -> None:
        """Write it at once or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.part")
        part.write_bytes(msgspec.json.encode(self))
        part.replace(path)


def read_attack(path: Path) -> AttackLog:
    """Read what `AttackLog.write` wrote. Raises ConfigError for anything else."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=AttackLog)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError("attack", path, f"is not the log of an attack ({error})",
                          "keep the run folder as it was written") from None


@dataclass(frozen=True)
class Target:
    """What is attacked, as far as the load depends on it."""

    max_num_seqs: int
    max_step_tokens: int
    max_model_len: int
    kv_tokens: int
    vocab_size: int

    @classmethod
    def of(cls, config: Config, facts: EngineFacts) -> Target:
        """A running engine."""
        return cls(config.scheduler.max_num_seqs, config.scheduler.max_step_tokens, facts.max_model_len,
                   facts.kv_tokens, facts.vocab_size)

    @property
    def longest_prompt(self) -> int:
        """That leaves room for an answer, in the model's length and in the KV cache."""
        return max(1, min(self.max_model_len, self.kv_tokens) - OUTPUT_TOKENS)


@dataclass(frozen=True)
class Lengths:
    """Of one request."""

    prompt_tokens: int
    output_tokens: int


def longest_prompts(target: Target) -> list[Lengths]:
    """Prompts that fill the token budget of a step twice over: at least two, at most a batch."""
    wanted = max(2, -(-_BUDGETS * target.max_step_tokens // target.longest_prompt))
    return [Lengths(target.longest_prompt, OUTPUT_TOKENS)] * min(target.max_num_seqs, wanted)


def full_batch(target: Target) -> list[Lengths]:
    """As many requests as may run, at full context or at more than the KV cache holds."""
    context = int(_OVERFILL * target.kv_tokens / target.max_num_seqs)
    if context >= target.longest_prompt + OUTPUT_TOKENS:
        return [Lengths(target.longest_prompt, OUTPUT_TOKENS)] * target.max_num_seqs
    prompt_tokens = max(1, int(_PROMPT_SHARE * context))
    return [Lengths(prompt_tokens, max(1, context - prompt_tokens))] * target.max_num_seqs


def attack_process(config: Config, local: LocalModel, cache_dir: Path, timeout_s: float) -> AttackLog:
    """Attack a fresh engine process of this configuration; nothing that it does raises. `timeout_s` for each phase."""
    return asyncio.run(_attack_process(config, local, cache_dir, timeout_s))


async def _attack_process(config: Config, local: LocalModel, cache_dir: Path, timeout_s: float) -> AttackLog:
    mortal = replace(config, engine=replace(config.engine, restart=RestartPolicy.never))
    client = ProcessClient(mortal, local, cache_dir, lambda _: None)
    try:
        await client.start()
        return await attack(client, config, timeout_s, client.process_id)
    except (ConfigError, StartError) as error:
        return AttackLog(config_hash(config), 1, 1, _has_swap(config), [], None, str(error))
    finally:
        await client.shutdown()


async def attack(client: EngineClient, config: Config, timeout_s: float, process_id: int | None) -> AttackLog:
    """Attack a running engine. `timeout_s` is the longest time of one phase; what is under way then is cut off."""
    target, attacker = Target.of(config, client.facts), _Attacker(client, timeout_s)
    client.observe(attacker.watch)
    loads = (("longest prompts", longest_prompts(target)), ("full batch", full_batch(target)),
             ("after it", [Lengths(1, 1)]))
    phases = list[Phase]()
    for name, lengths in loads:
        if client.state is EngineState.ready:
            phases.append(await attacker.phase(name, _requests(lengths, target, seed=len(phases))))
    failure = None if client.state is EngineState.ready else f"the engine is {client.state.value}"
    return AttackLog(config_hash(config), client.facts.num_kv_blocks, target.max_model_len, _has_swap(config), phases,
                     peak_memory_bytes(process_id), failure)


def _has_swap(config: Config) -> bool:
    return config.scheduler.preemption.kind is Preemption.swap


def _requests(lengths: Sequence[Lengths], target: Target, seed: int) -> list[WorkloadRequest]:
    random = np.random.default_rng(seed)
    return [WorkloadRequest(index, random.integers(0, target.vocab_size, own.prompt_tokens).tolist(),
                            own.output_tokens) for index, own in enumerate(lengths)]


def peak_memory_bytes(process_id: int | None) -> int | None:
    """The largest resident memory that a process ever had; None where the system does not say."""
    if process_id is None:
        return None
    try:
        status = Path(f"/proc/{process_id}/status").read_text()
    except OSError:
        return None
    line = next((line for line in status.splitlines() if line.startswith("VmHWM:")), None)
    return None if line is None else int(line.split()[1]) * 1024


@dataclass
class _Attacker:
    """Sends phases to an engine and watches what they do to it."""

    client: EngineClient
    timeout_s: float
    peak_running: int = 0
    peak_kv_blocks: int = 0
    _target: EngineTarget = field(init=False)

    def __post_init__(self) -> None:
        self._target = EngineTarget(self.client)

    def watch(self, stats: EngineStats, step: StepRecord | None) -> None:
        """Take in one step."""
        self.peak_running = max(self.peak_running, stats.num_running)
        self.peak_kv_blocks = max(self.peak_kv_blocks, stats.kv_blocks_used)

    async def phase(self, name: str, requests: Sequence[WorkloadRequest]) -> Phase:
        """All requests at once, until the last has ended or the time is up."""
        self.peak_running = self.peak_kv_blocks = 0
        before, started_s = self.client.stats, time.monotonic()
        sent = await asyncio.gather(*(self._send(request, started_s + self.timeout_s) for request in requests))
        after = self.client.stats
        return Phase(name, time.monotonic() - started_s, list(sent), self.peak_running, self.peak_kv_blocks,
                     after.preemptions_total - before.preemptions_total,
                     after.swapped_out_blocks_total - before.swapped_out_blocks_total)

    async def _send(self, request: WorkloadRequest, until_s: float) -> Sent:
        """Send one until it is not refused: a short queue must not spare the engine the full batch."""
        end, text = End.cut_off, ""
        while (left_s := until_s - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(left_s), aclosing(self._target.send(request)) as seen:
                    async for _ in seen:
                        pass
                end, text = End.answered, ""
            except TimeoutError:
                end, text = End.cut_off, f"no answer within {self.timeout_s:g} s"
            except RequestFailed as failed:
                end, text = _end_of(failed), failed.failure.text
                if text.startswith(FinishReason.queue_full.value):
                    await asyncio.sleep(_RETRY_S)
                    continue
            break
        return Sent(len(request.prompt_token_ids), request.output_tokens, end, text)


def _end_of(failed: RequestFailed) -> End:
    is_wanted = failed.failure.kind is FailureKind.incomplete and failed.failure.text.startswith(
        tuple(reason.value for reason in _NO_LOSS))
    return End.given_up if is_wanted else End.lost
