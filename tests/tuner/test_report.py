"""The report: its figures are those of the logs, and the page draws them without a network."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from servekit.config.compose import compose_serve
from servekit.config.resolve import config_hash
from servekit.tuner.attack import AttackLog, End, Phase, Sent
from servekit.tuner.certificate import Circumstances, certify
from servekit.tuner.confirmation import Confirmation, Confirmed, Finalist, Rules, roles_of
from servekit.tuner.executor import RunLength
from servekit.tuner.importance import FEWEST_TRIALS, knob_importance
from servekit.tuner.judgement import Role, judge
from servekit.tuner.report import LEVELS, Findings, report_data, write_report
from servekit.tuner.reverts import Revert
from servekit.tuner.run_log import read_run
from servekit.tuner.space import Condition, Integers, Knob, Ladder, Options, Reals, Space, Value
from servekit.tuner.study import RAN, Origin, Trial
from servekit.tuner.trial import Ending
from tuner_runs import PLAN, SLO, FakeEngine

BASE = ("model.source=dummy:tiny",)
SEQS, POLICY, WEIGHT, KV = ("scheduler.max_num_seqs", "scheduler.policy.kind", "scheduler.policy.prefill_weight",
                            "memory.num_kv_blocks")
SPACE = Space((Knob(SEQS, Ladder((8, 16, 32, 64))), Knob(POLICY, Options(("fifo", "sjf"))),
               Knob(WEIGHT, Reals(0.1, 1.0), Condition(POLICY, ("sjf",))), Knob(KV, Integers(64, 512, is_log=True))),
              {SEQS: 8, POLICY: "fifo", WEIGHT: 0.5, KV: 256})
DEFAULT_CONFIG = compose_serve(BASE).config
TUNED_CONFIG = compose_serve([*BASE, f"{SEQS}=16"]).config


def trial(number: int, values: dict[str, Value], rate_per_s: float, ending: Ending = Ending.measured,
          **changes: Any) -> Trial:
    broken = -0.5 if rate_per_s > 0 else 0.7
    return Trial(number, Origin.sampler, ending, values, f"hash {number}", rate_per_s,
                 {RAN: -1.0 if ending.has_verdict else 1.0, "ttft.p95": broken, "tpot.p95": -0.5}, None, {}, **changes)


def some_trials(count: int) -> list[Trial]:
    """The number of sequences decides; everything else is chance."""
    random, trials = Random(3), []
    for number in range(count):
        seqs, policy = random.choice((8, 16, 32, 64)), random.choice(("fifo", "sjf"))
        values: dict[str, Value] = {SEQS: seqs, POLICY: policy, KV: random.randrange(64, 513)}
        if policy == "sjf":
            values[WEIGHT] = random.uniform(0.1, 1.0)
        rate = {8: 3.0, 16: 6.0, 32: 0.0, 64: 1.0}[seqs]
        trials.append(trial(number, values, rate * random.uniform(0.97, 1.03)))
    return trials


REVERTS = (Revert("", None, None, True, {"ttft.p95": 0.01}), Revert(SEQS, 16, 8, False, {"ttft.p95": 0.4}),
           Revert(POLICY, "fifo", "sjf", None, {}, "the engine died"))


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    folder = tmp_path_factory.mktemp("report")
    finalists = (Finalist("trial 3", Role.tuned, TUNED_CONFIG, 6.0, (f"{SEQS}=16", "scheduler/policy=fifo")),
                 Finalist("default", Role.default, DEFAULT_CONFIG, 2.5),
                 Finalist("rule of thumb", Role.rule_of_thumb, compose_serve([*BASE, f"{SEQS}=64"]).config, 4.0))
    capacity = {16: 10.0, 64: 7.0}
    engine = FakeEngine(folder, lambda config: capacity.get(config.scheduler.max_num_seqs, 5.0))
    confirmed = Confirmation(SLO, finalists, engine, Rules(RunLength(120, 0.0), max_rounds=3)).run()
    attack = AttackLog(config_hash(TUNED_CONFIG), 10, 64, False,
                       [Phase("after it", 0.1, [Sent(1, 1, End.answered)], 1, 9, 4, 0)], 300 * 2**20, None)
    attack.write(folder / "attack.json")
    certificate = certify(folder, SLO, PLAN, confirmed, {"trial 3": folder / "attack.json"}, [], Circumstances(
        BASE, {"device": "cpu", "cores": 2}, {"trials": 36, "minutes": 12.5}, "2024-05-01T10:00:00+00:00"))
    logs = []
    for rate_per_s in (5.0, 7.0, 9.0):
        _, path = engine.measure_at(TUNED_CONFIG, rate_per_s, 60, f"trial 3 run {len(logs)}", cold=True,
                                    stops_early=False)
        logs.append({"rate_per_s": rate_per_s, "log": path.name})
    trials = some_trials(36)
    trials[0] = replace(trials[0], origin=Origin.base, config_hash=config_hash(DEFAULT_CONFIG), rate_per_s=2.6,
                        values={SEQS: 8, POLICY: "fifo", KV: 256}, constraints={RAN: -1.0, "ttft.p95": -0.1},
                        facts={"bound": {"sequences": 30, "nothing_waiting": 10}})
    trials[3] = replace(trials[3], config_hash=config_hash(TUNED_CONFIG), values={SEQS: 16, POLICY: "fifo", KV: 256},
                        rate_per_s=6.2, constraints={RAN: -1.0, "ttft.p95": -0.1},
                        facts={"runs": logs, "bound": {"token_budget": 5, "nothing_waiting": 95}})
    trials[5] = trial(5, {SEQS: 64, POLICY: "fifo", KV: 64}, 0.0, Ending.crashed)
    return Findings(certificate, folder, folder / "runs", SPACE, trials, "dummy:tiny", "fixed lengths",
                    ("4 knobs around the base", "a trial takes about 20 s"), REVERTS)


def test_the_summary_has_everybody_with_bounds(findings: Findings) -> None:
    data = report_data(findings)
    assert [(row["name"], row["role"], row["is_winner"]) for row in data["rows"]] == [
        ("trial 3", "tuned", True), ("default", "default", False), ("rule of thumb", "rule_of_thumb", False)]
    winner = data["rows"][0]
    ttft = winner["promises"][0]
    assert winner["confirmed_per_s"] == winner["at_per_s"] == 6.0
    assert ttft["limit_s"] == 1.0 and ttft["low_s"] <= ttft["latency_s"] <= ttft["high_s"]
    assert ttft["num_requests"] == 240 and ttft["holds"]
    assert data["ratio"]["low"] <= data["ratio"]["value"]
    assert data["differences"][0]["num_pairs"] == 240
    assert data["objective"] == ["95 % of requests: ttft ≤ 1 s", "95 % of requests: tpot ≤ 300 ms"]


def test_curves_are_distribution_functions_of_the_logs(findings: Findings) -> None:
    data = report_data(findings)
    ttft = data["curves"][0]
    names = [series["name"] for series in ttft["series"]]
    assert names[:2] == ["trial 3 at 6/s", "default at 6/s"] and names[3] == "rule of thumb at 4/s"
    assert ttft["limits"] == [{"limit_s": 1.0, "share": 0.95}]
    winner = ttft["series"][0]
    assert winner["x"] == sorted(winner["x"]) and winner["y"][-1] == 1.0 and winner["count"] == 240
    runs = [read_run(findings.folder / run.log) for run in findings.certificate.claim.runs if run.finalist == "trial 3"]
    longest = max(request.latencies.ttft_s for run in runs for request in run.measured if request.latencies)
    assert winner["x"][-1] == longest
    at_limit = max((y for x, y in zip(winner["x"], winner["y"], strict=True) if x <= 1.0), default=0)
    missed = data["rows"][0]["promises"][0]["num_missed"]
    assert at_limit == pytest.approx(1 - missed / 240, abs=0.01)


def test_knee_takes_the_runs_of_the_search_too(findings: Findings) -> None:
    ttft = report_data(findings)["knees"][0]
    points = {series["name"]: series["points"] for series in ttft["series"]}
    assert {5.0, 6.0, 7.0, 9.0} <= {point["rate_per_s"] for point in points["trial 3"]}
    assert ttft["per_mille"] == 950


def test_trials_say_why_they_are_infeasible(findings: Findings) -> None:
    trials = report_data(findings)["trials"]
    assert trials[5]["reason"] == "crashed" and not trials[5]["is_feasible"]
    missed = next(row for row in trials if row["reason"].startswith("missed"))
    assert missed["reason"] == "missed ttft.p95 at every rate that was tried"
    assert trials[3]["reason"] == "" and trials[3]["is_feasible"]


def test_bounds_and_space_show_the_winner_beside_the_default(findings: Findings) -> None:
    data = report_data(findings)
    assert {row["name"]: row["shares"] for row in data["bounds"]} == {
        "trial 3": {"token_budget": 0.05, "nothing_waiting": 0.95},
        "default": {"sequences": 0.75, "nothing_waiting": 0.25}}
    rows = {row["knob"]: row for row in data["space"]}
    assert (rows[SEQS]["default"], rows[SEQS]["winner"], rows[SEQS]["changed"]) == ("8", "16", True)
    assert not rows[POLICY]["changed"] and rows[WEIGHT]["winner"] == ""
    assert rows[WEIGHT]["condition"] == f"{POLICY} is sjf"


def test_other_levels_come_from_the_same_logs(findings: Findings) -> None:
    levels = report_data(findings)["levels"]
    rates = {row["name"]: row["rates_per_s"] for row in levels["rows"]}
    for row in rates.values():
        known = [value or 0.0 for value in row]
        assert known == sorted(known), "a laxer objective never lowers the rate"
    assert rates["any configuration"][LEVELS.index(1.0)] >= rates["trial 3"][LEVELS.index(1.0)] >= 6.0
    assert rates["trial 3"][-1] > rates["default"][-1]


# --- importance -------------------------------------------------------------------------------------------------------

def test_the_knob_that_decides_is_found() -> None:
    shares = knob_importance(SPACE, some_trials(60))
    assert shares is not None
    assert next(iter(shares)) == SEQS and shares[SEQS] > 0.6
    assert sum(shares.values()) == pytest.approx(1) and set(shares) == {SEQS, POLICY, WEIGHT, KV}


def test_infeasible_trials_count_as_bad_whatever_their_rate() -> None:
    trials = some_trials(60)
    fooled = [replace(one, rate_per_s=100.0) if one.values[SEQS] == 32 else one for one in trials]
    assert all(not one.is_feasible for one in fooled if one.values[SEQS] == 32)
    assert knob_importance(SPACE, fooled) == knob_importance(SPACE, trials)


def test_too_few_trials_say_so(findings: Findings) -> None:
    trials = some_trials(FEWEST_TRIALS - 1)
    assert knob_importance(SPACE, trials) is None
    bad = [replace(one, ending=Ending.invalid) for one in some_trials(FEWEST_TRIALS)]
    assert knob_importance(SPACE, bad) is None
    why = report_data(replace(findings, trials=trials))["importance"]
    assert why["shares"] is None and why["why"].startswith("Too few trials: 29")


# --- the page ---------------------------------------------------------------------------------------------------------

def test_the_page_needs_nothing_from_elsewhere(findings: Findings, tmp_path: Path) -> None:
    write_report(findings, tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    urls = set(re.findall(r"https?://[^\s\"']+", text))
    assert urls == {"http://www.w3.org/2000/svg"}, "a name, which is not fetched"
    assert not re.search(r"<(link|img|iframe)|src=|@import|fetch\(", text)
    data = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert data is not None and json.loads(data[1])["winner"] == "trial 3"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    if not Path("/usr/bin/chromium").exists():
        pytest.skip("needs Chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        yield browser
        browser.close()


HEADINGS = {"complete": "trial 3 holds the objective at 6.00 requests per second, ",
            "no trials": "trial 3 holds the objective at 6.00 requests per second, ",
            "nothing holds": "No configuration that holds", "nothing found": "No configuration held the objective"}


@pytest.mark.parametrize("case", list(HEADINGS))
def test_chromium_draws_it(findings: Findings, tmp_path: Path, browser: Any, case: str) -> None:
    if case == "nothing holds":
        findings = without_winner(findings)
    if case == "nothing found":
        findings = without_finalists(findings, tmp_path)
    if case == "no trials":
        findings = replace(findings, trials=[], plan=())
    write_report(findings, tmp_path / "report.html")
    page, errors, asked = browser.new_page(), list[str](), list[str]()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto((tmp_path / "report.html").as_uri())
    assert errors == [] and asked == [(tmp_path / "report.html").as_uri()]
    titles = page.locator("h2").all_inner_texts()
    assert {"Second measurement", "Throughput against latency", "Why", "Certificate"} <= set(titles)
    assert ("Latency" in titles) is (case != "nothing found"), "the distributions are those of the second measurement"
    heading = page.locator("h1").inner_text()
    assert heading.startswith(HEADINGS[case])
    said = page.locator("main").inner_text()
    assert all((text in said) is (case == "nothing found") for text in (
        CLOSEST, "Nothing was measured again.", NOWHERE))
    assert ("scheduler.max_num_seqs 16 8 40" in " ".join(said.split())) is (case != "nothing found")
    assert "NaN" not in page.content() and "undefined" not in page.locator("main").inner_html()


CLOSEST = "Closest: trial 3 at 1.20 req/s, which breaks ttft.p95; most of its steps were bound by token_budget."
NOWHERE = "held the objective at no rate that was tried"


def without_finalists(findings: Findings, folder: Path) -> Findings:
    """The search found nothing that is worth a second measurement."""
    finalists = (Finalist("trial 3", Role.tuned, TUNED_CONFIG, 0.0),
                 Finalist("default", Role.default, DEFAULT_CONFIG, 0.0))
    reasons = dict.fromkeys(("trial 3", "default"), NOWHERE)
    confirmed = Confirmed(finalists, (), reasons, judge(SLO, roles_of(finalists), ()))
    about = Circumstances(BASE, {}, {}, "2024-05-01T10:00:00+00:00")
    certificate = certify(folder, SLO, PLAN, confirmed, {}, [], about)
    trials = [replace(one, rate_per_s=0.0, constraints={RAN: -1.0, "ttft.p95": 0.4}) for one in findings.trials]
    return replace(findings, certificate=certificate, folder=folder, trials=trials, reverts=(), closest=CLOSEST)


def test_where_nothing_was_found_it_still_says_what_bound_the_closest(findings: Findings, tmp_path: Path) -> None:
    data = report_data(without_finalists(findings, tmp_path))
    assert data["closest"] == CLOSEST and data["winner"] is None and data["curves"][0]["series"] == []
    waiting = {row["name"]: row["shares"]["nothing_waiting"] for row in data["bounds"]}
    assert waiting == {"trial 3": 0.95, "default": 0.25}
    assert data["failures"] == dict.fromkeys(("trial 3", "default"), NOWHERE)
    rates = {series["name"]: [point["rate_per_s"] for point in series["points"]]
             for series in data["knees"][0]["series"]}
    assert rates == {"trial 3": [5.0, 7.0, 9.0], "default": []}, "of the search, which is all there is"
    assert "runs" not in dict(data["facts"]) and not any(row["is_feasible"] for row in data["trials"])


def without_winner(findings: Findings) -> Findings:
    """The same logs judged as if nothing had survived."""
    judgement = findings.certificate.judgement
    fallen = [replace(found, survives_attack=False) for found in judgement.finalists]
    changed = replace(judgement, finalists=tuple(fallen), winner=None, ratio=None, differences=())
    return replace(findings, certificate=msgspec.structs.replace(findings.certificate, judgement=changed))
