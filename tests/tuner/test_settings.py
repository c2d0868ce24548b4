"""The tuning file and the words after it: what they mean, and what is refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from servekit.config.bench import AzureWorkloadConfig, GammaArrivalConfig, LognormalWorkloadConfig, TraceArrivalConfig
from servekit.config.errors import ConfigError
from servekit.tuner.settings import TUNING_FILES, Settings, find_file, read_settings
from servekit.tuner.study import SamplerKind

GOOD = """\
slo:
  ttft: {p99: 2s}
  tpot:
    p50: 80ms
    p99.9: 150ms
workload: {name: chat, rate: 2.5, max_prompt_tokens: 512, arrival: {kind: gamma, gap_cv: 2}}
base:
  preset: interactive
  model: {source: "dummy:tiny"}
  scheduler.max_num_seqs: 12
search:
  scheduler.max_num_seqs: choice(4, 8, 12)
budget: {minutes: 5, requests: 40, max_busy_share: null}
study: {sampler: gp, seed: 4}
folder: elsewhere
"""
SHORT = "slo: {ttft: {p99: 2s}}\nworkload: {name: chat}\n"


def read(text: str, *words: str, folder: Path) -> Settings:
    path = folder / "tune.yaml"
    path.write_text(text)
    return read_settings(path, words)


def error_of(text: str, *words: str, folder: Path) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        read(text, *words, folder=folder)
    assert "\n" not in str(caught.value)
    return caught.value


# --- what is meant ----------------------------------------------------------------------------------------------------

def test_a_whole_file(tmp_path: Path) -> None:
    settings = read(GOOD, folder=tmp_path)
    assert settings.slo.names == ("ttft.p99", "tpot.p50", "tpot.p99.9")
    assert isinstance(settings.bench.workload, LognormalWorkloadConfig)
    assert settings.bench.workload.max_prompt_tokens == 512 and settings.bench.arrival == GammaArrivalConfig(gap_cv=2)
    assert settings.start_rate_per_s == 2.5
    assert settings.base.model.source == "dummy:tiny" and settings.base.scheduler.max_num_seqs == 12
    assert settings.search == {"scheduler.max_num_seqs": "choice(4, 8, 12)"}
    assert (settings.budget.minutes, settings.budget.requests, settings.budget.max_busy_share) == (5, 40, None)
    assert (settings.study.sampler, settings.study.seed) == (SamplerKind.gp, 4)
    assert settings.folder == Path("elsewhere")
    assert settings.assemble(["scheduler.max_num_seqs=4"]).scheduler.max_num_seqs == 4
    assert settings.assemble([]) == settings.base


def test_what_a_short_file_leaves_out(tmp_path: Path) -> None:
    settings = read(SHORT, folder=tmp_path)
    assert settings.start_rate_per_s is None and settings.search == "default" and settings.study.storage is None
    assert settings.budget.minutes == 20 and settings.folder == Path("tuning")


def test_words_are_laid_over_the_file(tmp_path: Path) -> None:
    settings = read(GOOD, "budget.minutes=7.5", "slo.ttft.p99=3s", "slo.e2e.p99.9=20s", "slo.tpot.p99.9=200ms",
                    "base.scheduler.max_num_seqs=6", "base.scheduler/policy=sjf", "workload.rate=auto",
                    "study.sampler=qmc", "folder=there", "search=default", "budget.max_slowdown=null", folder=tmp_path)
    limits = {promise.name: promise.limits for promise in settings.slo.promises}
    assert limits["ttft.p99"].ttft_s == 3 and limits["e2e.p99.9"].e2e_s == 20 and limits["tpot.p99.9"].tpot_s == 0.2
    assert limits["tpot.p50"].tpot_s == 0.08
    assert settings.budget.minutes == 7.5 and settings.budget.requests == 40 and settings.budget.max_slowdown is None
    assert settings.base.scheduler.max_num_seqs == 6 and type(settings.base.scheduler.policy).__name__.startswith("Sjf")
    assert settings.start_rate_per_s is None and settings.search == "default" and settings.folder == Path("there")
    assert settings.study.sampler is SamplerKind.qmc and settings.study.seed == 4


def test_a_whole_section_on_the_command_line_replaces_that_of_the_file(tmp_path: Path) -> None:
    settings = read(GOOD, "slo={ttft: {p50: 1s}}", "workload={name: fixed}", folder=tmp_path)
    assert settings.slo.names == ("ttft.p50",) and settings.start_rate_per_s is None


def write_trace(path: Path, rows: int, bad_line: str = "") -> str:
    lines = [f"2024-05-10 00:00:{i:02},20,3" for i in range(rows)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines, *([bad_line] if bad_line else [])]))
    return str(path)


def test_a_trace(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.csv", 30)
    text = f"slo: {{ttft: {{p99: 2s}}}}\nworkload: {{trace: {trace}}}\nbudget: {{requests: 10, confirm_requests: 20}}\n"
    settings = read(text, folder=tmp_path)
    assert settings.bench.workload == AzureWorkloadConfig(path=trace)
    assert isinstance(settings.bench.arrival, TraceArrivalConfig)


@pytest.mark.parametrize("path", sorted(TUNING_FILES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_files_that_come_with_servekit(path: Path) -> None:
    settings = read_settings(path, ())
    assert path.read_text().startswith("# ")
    assert settings.base.model.name == "smollm2-135m" and settings.folder == Path("tuning") / path.stem


def test_a_bare_name_is_one_of_those(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_file("chat") == TUNING_FILES / "chat.yaml" and find_file("chat").exists()
    assert find_file("mine.yaml") == Path("mine.yaml")
    (tmp_path / "chat").touch()
    assert find_file("chat") == Path("chat")
    with pytest.raises(ConfigError, match=r"file=chatt: is neither a file nor one of batch, .*did you mean .* chat\?"):
        find_file("chatt")
    with pytest.raises(ConfigError, match="file=qqq"):
        find_file("qqq")


# --- what is refused --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("old, new, expected", [
    ("{p99: 2s}", "2s", "slo.ttft=2s: names no percentile (FILE, line 2); write slo.ttft={p99: 2s}"),
    ("{p99: 2s}", "{p99: 2}", "slo.ttft.p99=2: has no unit (FILE, line 2); write slo.ttft.p99=2s or slo.ttft.p99=2ms"),
    ("p50: 80ms", "p5: 80ms", "slo.tpot.p5=80ms: a percentile must lie between p50 and p99.9"),
    ("p50: 80ms", "p50: 80 parsecs", "slo.tpot.p50=80 parsecs: must be a number and one of us, ms, s, min"),
    ("  ttft:", "  ttfd:", "did you mean slo.ttft? "),
    ("budget:", "bugdet:", "must be one of slo, workload, base, search, budget, study, compare, folder, target, url, "
     "start_command, launch (FILE, line 13); "
     "did you mean budget?"),
    ("minutes: 5", "minuets: 5", "budget.minuets=5: must be one of minutes"),
    ("minutes: 5", "minuets: 5", "(FILE, line 13); did you mean budget.minutes?"),
    ("minutes: 5", "minutes: five", "budget.minutes=five: must be a number of at least 0.1 (FILE, line 13)"),
    ("minutes: 5", "minutes: 0", "budget.minutes=0: must be a number"),
    ("minutes: 5", "confirm_share: 1.5", "budget.confirm_share=1.5: must lie between 0 and 1"),
    ("requests: 40", "requests: 40.5", "budget.requests=40.5: must be a whole number (FILE, line 13)"),
    ("requests: 40", "trials: -1", "budget.trials=-1: must be a number of at least 1"),
    ("{minutes: 5, requests: 40, max_busy_share: null}", "20", "budget=20: must hold keys and values"),
    ("sampler: gp", "sampler: gb", "study.sampler=gb: must be one of tpe, gp, random, qmc (FILE, line 14)"),
    ("seed: 4", "seed: four", "study.seed=four: must be a whole number"),
    ("seed: 4", "trial_timeout_s: -5", "study.trial_timeout_s=-5: must be a number of at least 1"),
    ("seed: 4", "sead: 4", "did you mean study.seed?"),
    ("rate: 2.5", "rate: fast", "workload.rate=fast: must be auto or a number of requests per second (FILE, line 6)"),
    ("rate: 2.5", "rate: -1", "workload.rate=-1"),
    ("name: chat", "name: chatt", "did you mean"),
    ("max_prompt_tokens: 512", "max_prompt_token: 512", "did you mean workload.max_prompt_tokens?"),
    ("max_prompt_tokens: 512", "length_scale: wide", "workload.length_scale=wide"),
    ("kind: gamma, gap_cv: 2", "kind: gamma, gap_cv: -2", "workload.arrival.gap_cv=-2"),
    ("arrival: {kind: gamma, gap_cv: 2}", "arrival: closed", "workload.arrival=closed: has no rate to search"),
    ("scheduler.max_num_seqs: 12", "scheduler.max_num_sequences: 12", "base.scheduler.max_num_sequences=12"),
    ("scheduler.max_num_seqs: 12", "scheduler.max_num_seqs: 0", "base.scheduler.max_num_seqs=0: must be a number of at "
     "least 1 (FILE, line 10)"),
    ("preset: interactive", "preset: interactief", "did you mean"),
    ("folder: elsewhere", "folder: 7", "folder=7: must be the name of a folder (FILE, line 15)"),
    ("folder: elsewhere", "folder: {a: b}", "folder={a: b}: must be the name of a folder"),
    ("slo:\n", "slo2:\n", "did you mean slo?"),
])
def test_bad_values_are_refused_with_their_line(old: str, new: str, expected: str, tmp_path: Path) -> None:
    assert old in GOOD
    message = str(error_of(GOOD.replace(old, new, 1), folder=tmp_path)).replace(str(tmp_path / "tune.yaml"), "FILE")
    assert expected.strip() in message


@pytest.mark.parametrize("text, expected", [
    ("workload: {name: chat}\n", "slo=null: must be given"),
    ("slo:\n", "slo=null: must be a mapping"),
    ("slo: {}\n", "slo={}: promises nothing"),
    ("slo: {goodput: {share: 95%}}\n", "slo.goodput={share: 95%}: limits no latency"),
    ("slo: {goodput: {ttft: 2s}}\n", "slo.goodput={ttft: 2s}: has no share"),
    (SHORT + "5: 6\n", "5=6: must be one of"),
    (SHORT + "budget: {5: 6}\n", "budget.5=6: must be one of"),
    ("- slo\n", "must hold keys and values"),
    ("slo: {ttft: {p99: 2s}\nworkload: {name: chat}\n", "line 2"),
    ("slo: {ttft: {p99: 2s}}\nslo: {}\n", "is given twice"),
])
def test_bad_files_are_refused(text: str, expected: str, tmp_path: Path) -> None:
    assert expected in str(error_of(text, folder=tmp_path))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: there is no such file"):
        read_settings(tmp_path / "nowhere.yaml", ())


def test_a_trace_with_a_bad_line_is_refused_with_that_line(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.csv", 25, bad_line="2024-05-10 00:00:40,twenty,3")
    text = f"slo: {{ttft: {{p99: 2s}}}}\nworkload: {{trace: {trace}}}\nbudget: {{requests: 5, confirm_requests: 5}}\n"
    assert f"{trace}:27: " in str(error_of(text, folder=tmp_path))


def test_a_trace_that_is_missing_or_too_short_is_refused(tmp_path: Path) -> None:
    text = "slo: {{ttft: {{p99: 2s}}}}\nworkload: {{trace: {}}}\n"
    assert "cannot be read" in str(error_of(text.format(tmp_path / "none.csv"), folder=tmp_path))
    trace = write_trace(tmp_path / "trace.csv", 30)
    message = str(error_of(text.format(trace), folder=tmp_path))
    assert "workload.trace=25: requests are left after the warm-up, and a run of the confirmation judges 400" in message


@pytest.mark.parametrize("word, expected", [
    ("minutes", "setting=minutes: must have the form key=value"),
    ("=5", "setting==5"),
    ("budget.minuets=5", "did you mean budget.minutes?"),
    ("budget.minutes=soon", "budget.minutes=soon: must be a number"),
    ("budget.minutes=", "budget.minutes=null: must be a number"),
    ("bugdet.minutes=5", "did you mean budget?"),
    ("slo.ttft.p99=2", "slo.ttft.p99=2: has no unit"),
    ("slo.ttft=2s", "names no percentile"),
    ("workload={name: [}", "cannot be read as YAML"),
    ("base.scheduler.max_num_seqs=-3", "base.scheduler.max_num_seqs=-3: must be a number of at least 1"),
    ("folder=", "folder=null: must be the name of a folder"),
])
def test_bad_words_are_refused_and_the_file_is_not_blamed(word: str, expected: str, tmp_path: Path) -> None:
    message = str(error_of(GOOD, word, folder=tmp_path))
    assert expected in message and "tune.yaml" not in message
