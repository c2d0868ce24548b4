"""The tuning file: what is promised, under which load, from where, over what, and for how long.

    slo:      {ttft: {p99: 2s}, tpot: {p99: 150ms}}
    workload: {name: chat, rate: auto}            # or {trace: chat.csv}; other keys are those of `servekit bench`
    base:     {preset: interactive, model: smollm2-135m}
    search:   default                             # or all, or knobs: {scheduler.max_num_seqs: "choice(16, 32, 64)"}
    budget:   {minutes: 20}
    study:    {sampler: tpe, seed: 0}
    compare:  [rule_of_thumb, random]             # beside the default, which always is
    folder:   tuning

With `target: openai` it is about another server: url, start_command and launch take the place of base, as
`server_settings` has them.

Words on the command line are the same keys, dotted: `budget.minutes=5`, `base.scheduler.max_num_seqs=64`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from servekit.config.bench import BenchConfig
from servekit.config.compose import compose_bench, compose_serve
from servekit.config.describe import CONF_DIR, nearest
from servekit.config.errors import ConfigError, require, show
from servekit.tuner.document import read_document
from servekit.tuner.judgement import Role
from servekit.tuner.launch import Configuration
from servekit.tuner.load_plan import LoadPlan
from servekit.tuner.rate_search import Allowance
from servekit.tuner.server_settings import KEYS as TARGET_KEYS
from servekit.tuner.server_settings import ServerSettings, TargetKind, parse_server, target_kind
from servekit.tuner.slo import Slo, parse_slo
from servekit.tuner.space import engine_settings
from servekit.tuner.study import SamplerKind, StudyOptions, startup_trials

SECTIONS = ("slo", "workload", "base", "search", "budget", "study", "compare", "folder", *TARGET_KEYS)
TUNING_FILES = CONF_DIR / "slo"
"""Those that come with servekit."""
_LEAST_MINUTES = 0.1


@dataclass(frozen=True)
class Budget:
    """When the search ends; the confirmation comes out of the same minutes."""

    minutes: float = 20.0
    """Time for everything: search, confirmation, attack."""
    trials: int | None = None
    """Trials at most. null: as many as there is time for."""
    requests: int = 100
    """Requests of one run of a trial."""
    confirm_requests: int = 400
    """Requests of one run of the confirmation."""
    confirm_share: float = 0.4
    """Share of the minutes that is kept for the confirmation."""
    min_run_s: float = 10.0
    """Shortest load of a run, in seconds: at a high rate more requests are sent. Those of the confirmation last twice
    as long."""
    warmup_requests: int = 5
    """Requests at the start of each run that are not judged."""
    timeout_s: float = 120.0
    """Longest time for one request."""
    max_busy_share: float | None = 0.1
    """Share of the machine that others may use before a run counts as disturbed. null: not checked."""
    max_slowdown: float | None = 1.25
    """Factor by which steps of equal size may slow down in the course of a run. null: not checked."""

    @property
    def search_s(self) -> float:
        """Time for the search, in seconds: what is not kept for the confirmation."""
        return self.minutes * 60 * (1 - self.confirm_share)

    @property
    def rival_s(self) -> float:
        """Time for the confirmation of whom else the winner is compared with, in seconds each; not of the minutes."""
        return self.minutes * 60 * self.confirm_share / 2

    def __post_init__(self) -> None:
        _number("budget.minutes", self.minutes, _LEAST_MINUTES)
        if self.trials is not None:
            _whole_number("budget.trials", self.trials, 1)
        _whole_number("budget.requests", self.requests, 2)
        _whole_number("budget.confirm_requests", self.confirm_requests, 2)
        _whole_number("budget.warmup_requests", self.warmup_requests, 0)
        _number("budget.min_run_s", self.min_run_s, 0)
        _number("budget.timeout_s", self.timeout_s, 1)
        if self.max_busy_share is not None:
            _number("budget.max_busy_share", self.max_busy_share, 0)
        if self.max_slowdown is not None:
            _number("budget.max_slowdown", self.max_slowdown, 1)
        _number("budget.confirm_share", self.confirm_share, 0)
        require(0 < self.confirm_share < 1, "budget.confirm_share", self.confirm_share, "must lie between 0 and 1",
                "for example budget.confirm_share=0.4")


@dataclass(frozen=True)
class Settings:
    """A tuning file with the words of the command line laid over it."""

    slo: Slo
    bench: BenchConfig
    """Workload and arrivals."""
    start_rate_per_s: float | None
    """Where the search begins; null: found by a first run."""
    base_overrides: tuple[str, ...]
    """Of servekit's own engine; none for another server."""
    base: Configuration
    """Where the search starts from."""
    search: object
    """As in the file: `default`, `all`, or knobs."""
    budget: Budget
    study: StudyOptions
    folder: Path
    values: Mapping[str, Any] = field(default_factory=dict)
    """Everything as it was given, for the record."""
    server: ServerSettings | None = None
    """What is tuned instead of servekit's own engine."""
    compare: tuple[Role, ...] = ()
    """With whom the winner is compared, beside the default."""

    def allowance(self, num_requests: int) -> Allowance:
        """What the search for one configuration's rate may take of the time, in runs of so many requests."""
        return Allowance.of(self.budget.search_s, self.slo, num_requests, self.budget.warmup_requests)

    @property
    def ignores_base(self) -> bool:
        """Whether a base is given that is not about what is tuned."""
        return self.server is not None and bool(self.values.get("base"))

    def assemble(self, overrides: Sequence[str]) -> Configuration:
        """The base configuration with more settings on top. Raises ConfigError."""
        if self.server is not None:
            return self.server.launch(overrides)
        return compose_serve([*self.base_overrides, *overrides]).config


def find_file(word: str) -> Path:
    """The tuning file that is meant: a path, or the name of one that comes with servekit. Raises ConfigError."""
    path = Path(word)
    if path.suffix or path.exists():
        return path
    known = sorted(file.stem for file in TUNING_FILES.glob("*.yaml"))
    meant = nearest(word, known)
    require(word in known, "file", word, f"is neither a file nor one of {', '.join(known)}",
            f"did you mean servekit tune {meant}?" if meant else "for example servekit tune chat")
    return TUNING_FILES / f"{word}.yaml"


def read_settings(path: Path, words: Sequence[str]) -> Settings:
    """Read a tuning file. Raises ConfigError, with the line of the file where it is to blame."""
    document = read_document(path)
    given = _overridden(document.values, words)
    try:
        return _settings(given)
    except ConfigError as error:
        error = _as_written(error)
        raise error if _is_said_by(words, error.key) else document.blame(error) from None


def _as_written(error: ConfigError) -> ConfigError:
    """The same, its key as it stands in a tuning file."""
    match error.key.partition(".")[0]:
        case "arrival" | "vocab_low" | "vocab_high":
            key = f"workload.{error.key}"
        case section if section in SECTIONS or section not in engine_settings().sections:
            key = error.key
        case _:
            key = f"base.{error.key}"
    return ConfigError(key, error.value, error.limit, error.remedy)


def _is_said_by(words: Sequence[str], key: str) -> bool:
    """Whether the command line says what a key is, or part of it."""
    said = (word.partition("=")[0] for word in words)
    return any(f"{key}.".startswith(f"{name}.") or name.startswith(f"{key}.") for name in said)


def _settings(given: Mapping[str, Any]) -> Settings:
    for key in given:
        if key not in SECTIONS:
            meant = nearest(str(key), SECTIONS)
            raise ConfigError(str(key), given[key], f"must be one of {', '.join(SECTIONS)}",
                              f"did you mean {meant}?" if meant else "see servekit tune --help")
    require("slo" in given, "slo", None, "must be given", "for example slo: {ttft: {p99: 2s}, tpot: {p99: 150ms}}")
    server = parse_server(given) if target_kind(given) is TargetKind.openai else None
    budget = _budget(_mapping(given, "budget"))
    base_overrides = tuple(_base_overrides(_mapping(given, "base"))) if server is None else ()
    bench, rate = _bench(_mapping(given, "workload"))
    _check_load(bench, budget)
    folder = given.get("folder", "tuning")
    require(isinstance(folder, str) and bool(folder), "folder", folder, "must be the name of a folder",
            "for example folder=tuning")
    return Settings(
        slo=parse_slo(given["slo"]), bench=bench, start_rate_per_s=rate, base_overrides=base_overrides,
        base=compose_serve(base_overrides).config if server is None else server.launch(),
        search=given.get("search", "default"), budget=budget, study=_study(_mapping(given, "study"), budget),
        folder=Path(folder), values=given, server=server,
        compare=_compare(given.get("compare", ()), server is None))


# --- sections ---------------------------------------------------------------------------------------------------------

def _budget(given: Mapping[str, Any]) -> Budget:
    _known("budget", given, tuple(Budget.__dataclass_fields__))
    return Budget(**given)


def _compare(given: object, is_own_engine: bool) -> tuple[Role, ...]:
    known = {role.value: role for role in (Role.rule_of_thumb, Role.random) if is_own_engine or role is Role.random}
    names = [given] if isinstance(given, str) else given
    require(isinstance(names, Sequence) and set(names) <= set(known), "compare", given,
            f"must be a list of {' and '.join(known)}", f"for example compare: [{', '.join(known)}]")
    assert isinstance(names, Sequence)
    return tuple(known[name] for name in dict.fromkeys(names))


def _study(given: Mapping[str, Any], budget: Budget) -> StudyOptions:
    known = ("name", "sampler", "seed", "storage", "trial_timeout_s")
    _known("study", given, known)
    samplers = {kind.value: kind for kind in SamplerKind}
    sampler = str(given.get("sampler", SamplerKind.tpe.value))
    require(sampler in samplers, "study.sampler", sampler, f"must be one of {', '.join(samplers)}",
            "for example study.sampler=tpe")
    options = {key: value for key, value in given.items() if key != "sampler"}
    for key in ("name", "storage"):
        require(key not in options or isinstance(options[key], str) or (key == "storage" and options[key] is None),
                f"study.{key}", options.get(key), "must be text", f"leave study.{key} out")
    _whole_number("study.seed", options.get("seed", 0), 0)
    _number("study.trial_timeout_s", options.get("trial_timeout_s", 3600.0), 1)
    trials = budget.trials if budget.trials is not None else 30
    return StudyOptions(sampler=samplers[sampler], num_startup_trials=startup_trials(trials), **options)


def _base_overrides(given: Mapping[str, Any]) -> Iterator[str]:
    for key, value in _flat(given):
        yield f"+preset={value}" if key == "preset" else f"{key}={_override_value(value)}"


def _bench(given: Mapping[str, Any]) -> tuple[BenchConfig, float | None]:
    """The load, and the rate to begin with."""
    overrides, rate = ["num_requests=1"], given.get("rate", "auto")
    require(rate == "auto" or (isinstance(rate, int | float) and rate > 0), "workload.rate", rate,
            "must be auto or a number of requests per second", "for example workload.rate=2")
    for key, value in given.items():
        match key:
            case "name":
                overrides.append(f"workload={value}")
            case "trace":
                overrides += [f"workload={_trace_kind(str(value))}", f"workload.path={value}", "arrival=trace"]
            case "arrival" if not isinstance(value, Mapping):
                overrides.append(f"arrival={value}")
            case "arrival":
                overrides += [f"arrival.{name}={_override_value(part)}" for name, part in value.items()]
            case "vocab_low" | "vocab_high":
                overrides.append(f"{key}={value}")
            case "rate":
                pass
            case _:
                overrides.append(f"workload.{key}={_override_value(value)}")
    return compose_bench(overrides).config, None if rate == "auto" else float(rate)


def _check_load(bench: BenchConfig, budget: Budget) -> None:
    """Refuse arrivals without a rate, a trace with a line that cannot be read, and one that is too short."""
    plan = LoadPlan(bench, 0, budget.warmup_requests, budget.timeout_s)
    plan.at_rate(1.0)
    needed = max(budget.requests, budget.confirm_requests)
    require(plan.available is None or plan.available >= needed, "workload.trace", plan.available,
            f"requests are left after the warm-up, and a run of the confirmation judges {needed}",
            "choose a longer trace, or lower budget.confirm_requests and budget.requests")


def _trace_kind(path: str) -> str:
    return "mooncake" if path.endswith(".jsonl") else "azure"


# --- the command line -------------------------------------------------------------------------------------------------

def _overridden(values: Mapping[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """The file's values with `key=value` words laid over them; a key names a section and what is inside it."""
    given: dict[str, Any] = json.loads(json.dumps(values, default=str))
    for word in words:
        key, equals, text = word.partition("=")
        require(bool(equals) and bool(key), "setting", word, "must have the form key=value",
                "for example budget.minutes=5")
        section, _, rest = key.partition(".")
        if not rest:
            given[section] = _read(key, text)
            continue
        inside = given.get(section)
        inside = dict(inside) if isinstance(inside, Mapping) else {}
        latency, _, percentile = rest.partition(".")
        if section == "slo" and percentile and not isinstance(inside.get(latency), Mapping):
            inside[latency] = {}
        given[section] = _with(inside, rest, _read(key, text))
    return given


def _with(inside: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """A mapping with one value more, replacing the same key in dotted or nested form."""
    first, _, rest = key.partition(".")
    if rest and isinstance(inside.get(first), Mapping):
        return {**inside, first: _with(dict(inside[first]), rest, value)}
    return {**inside, key: value}


def _read(key: str, text: str) -> Any:
    try:
        return yaml.safe_load(text) if text else None
    except yaml.YAMLError:
        raise ConfigError(key, text, "cannot be read as YAML", f"quote it, as in {key}='\"{text}\"'") from None


def _flat(given: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in given.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _override_value(value: Any) -> str:
    return show(value)


def _mapping(given: Mapping[str, Any], section: str) -> Mapping[str, Any]:
    value = given.get(section, {})
    require(isinstance(value, Mapping), section, value, "must hold keys and values",
            f"for example {section}: {{{'minutes: 20' if section == 'budget' else 'name: chat'}}}")
    assert isinstance(value, Mapping)
    return value


def _known(section: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in given:
        if key not in known:
            meant = nearest(str(key), known)
            raise ConfigError(f"{section}.{key}", given[key], f"must be one of {', '.join(known)}",
                              f"did you mean {section}.{meant}?" if meant else f"leave {section}.{key} out")


def _number(key: str, value: object, minimum: float) -> None:
    require(isinstance(value, int | float) and not isinstance(value, bool) and value >= minimum, key, value,
            f"must be a number of at least {minimum:g}", f"for example {key}={max(minimum, 1):g}")


def _whole_number(key: str, value: object, minimum: int) -> None:
    require(isinstance(value, int), key, value, "must be a whole number", f"for example {key}={max(minimum, 1)}")
    _number(key, value, minimum)
