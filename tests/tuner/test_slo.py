"""The objective and the lines that refuse a wrong one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from servekit.config.bench import SloConfig
from servekit.config.errors import ConfigError
from servekit.load.metrics import RequestLatencies
from servekit.load.percentiles import Percentile, nearest_rank
from servekit.tuner.document import read_document
from servekit.tuner.slo import Promise, parse_slo, seconds


def test_every_form() -> None:
    slo = parse_slo({"ttft": {"p50": "500ms", "p99": "2s"}, "itl": {"p99.9": "0.1 s"},
                     "goodput": {"share": "95%", "ttft": "1.5s", "e2e": "1min"}})
    assert slo.promises == (
        Promise("ttft.p50", 500, SloConfig(ttft_s=0.5)), Promise("ttft.p99", 990, SloConfig(ttft_s=2.0)),
        Promise("itl.p99.9", 999, SloConfig(itl_s=0.1)), Promise("goodput", 950, SloConfig(ttft_s=1.5, e2e_s=60.0)))


@pytest.mark.parametrize("count", [1, 2, 9, 10, 99, 100, 101, 250, 1000, 1001])
@pytest.mark.parametrize("percentile", list(Percentile))
def test_misses_allowed_are_those_that_the_percentile_forgives(percentile: Percentile, count: int) -> None:
    """Of a sample with so many slow requests the percentile is fast, with one more it is slow."""
    allowed = Promise("ttft", percentile.per_mille, SloConfig(ttft_s=1.0)).misses_allowed(count)
    assert nearest_rank([0.0] * (count - allowed) + [9.0] * allowed, percentile) == 0.0
    assert nearest_rank([0.0] * (count - allowed - 1) + [9.0] * (allowed + 1), percentile) == 9.0


def test_goodput_needs_all_its_limits_in_one_request() -> None:
    slo = parse_slo({"ttft": {"p50": "1s"}, "tpot": {"p50": "1s"},
                     "goodput": {"share": "90%", "ttft": "1s", "tpot": "1s"}})
    halves = [RequestLatencies(2.0, 0.1, 0.1, 3.0), RequestLatencies(0.1, 2.0, 2.0, 3.0)]
    assert slo.misses(halves) == (1, 1, 2)


def test_fingerprint_is_of_what_is_promised() -> None:
    one = parse_slo({"ttft": {"p99": "2s"}, "tpot": {"p99": "150ms"}})
    assert one.fingerprint == parse_slo({"tpot": {"p99.0": "0.15s"}, "ttft": {"p99": "2000 ms"}}).fingerprint
    assert one.fingerprint != parse_slo({"ttft": {"p99": "2s"}, "tpot": {"p90": "150ms"}}).fingerprint
    assert one.fingerprint != parse_slo({"ttft": {"p99": "2s"}, "itl": {"p99": "150ms"}}).fingerprint


@pytest.mark.parametrize(("value", "message"), [
    (None, "slo=null: must be a mapping of latencies to percentiles; for example slo={ttft: {p99: 2s}}"),
    ({}, "slo={}: promises nothing; for example slo={ttft: {p99: 2s}}"),
    ({"tfft": {"p99": "2s"}}, "slo.tfft={p99: 2s}: must be one of ttft, tpot, itl, e2e, goodput; did you mean "
                              "slo.ttft?"),
    ({"ttft": "2s"}, "slo.ttft=2s: names no percentile; write slo.ttft={p99: 2s}"),
    ({"ttft": {}}, "slo.ttft={}: names no percentile; write slo.ttft={p99: 2s}"),
    ({"ttft": {"p99": 2}}, "slo.ttft.p99=2: has no unit; write slo.ttft.p99=2s or slo.ttft.p99=2ms"),
    ({"ttft": {"p99": "2"}}, "slo.ttft.p99=2: must be a number and one of us, ms, s, min; for example "
                             "slo.ttft.p99=150ms"),
    ({"ttft": {"p99": "-2s"}}, "slo.ttft.p99=-2s: must be a number and one of us, ms, s, min; for example "
                               "slo.ttft.p99=150ms"),
    ({"ttft": {"p99": "0s"}}, "slo.ttft.p99=0s: must be longer than 0; for example slo.ttft.p99=150ms"),
    ({"ttft": {"p100": "2s"}}, "slo.ttft.p100=2s: a percentile must lie between p50 and p99.9, in tenths; for example "
                               "slo.ttft={p99: 2s}"),
    ({"ttft": {"p49.9": "2s"}}, "slo.ttft.p49.9=2s: a percentile must lie between p50 and p99.9, in tenths; for "
                                "example slo.ttft={p99: 2s}"),
    ({"ttft": {"mean": "2s"}}, "slo.ttft.mean=2s: a percentile must lie between p50 and p99.9, in tenths; for example "
                               "slo.ttft={p99: 2s}"),
    ({"ttft": {"p50": "3s", "p99": "2s"}}, "slo.ttft.p99=2s: one of the limits of slo.ttft follows from another; a "
                                           "higher percentile needs a longer limit; leave one of them out"),
    ({"goodput": 0.95}, "slo.goodput=0.95: must be a share and the limits that a good request keeps; for example "
                        "slo.goodput={share: 95%, ttft: 2s, tpot: 150ms}"),
    ({"goodput": {"ttft": "2s"}}, "slo.goodput={ttft: 2s}: has no share; for example "
                                  "slo.goodput={share: 95%, ttft: 2s, tpot: 150ms}"),
    ({"goodput": {"share": "95%"}}, "slo.goodput={share: 95%}: limits no latency; for example "
                                    "slo.goodput={share: 95%, ttft: 2s, tpot: 150ms}"),
    ({"goodput": {"share": 95, "ttft": "2s"}}, "slo.goodput.share=95: must be a percentage between 50% and 99.9%, in "
                                               "tenths; for example slo.goodput.share=95%"),
    ({"goodput": {"share": "95%", "p99": "2s"}}, "slo.goodput.p99=2s: must be one of share, ttft, tpot, itl, e2e; for "
                                                 "example slo.goodput={share: 95%, ttft: 2s, tpot: 150ms}"),
])
def test_a_wrong_objective_is_refused_in_one_line(value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_slo(value)
    assert str(raised.value) == message


@pytest.mark.parametrize(("text", "expected"), [("2s", 2.0), ("150ms", 0.15), ("1.5 min", 90.0), ("250us", 0.00025)])
def test_durations(text: str, expected: float) -> None:
    assert seconds("slo.ttft.p99", text) == pytest.approx(expected)


# --- the file ---------------------------------------------------------------------------------------------------------

def test_an_error_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "slo.yaml"
    path.write_text("# chat\nslo:\n  ttft: {p99: 2s}\n  tpot:\n    p99: 150\nbudget: {minutes: 20}\n")
    document = read_document(path)
    assert document.values["budget"] == {"minutes": 20}
    with pytest.raises(ConfigError) as raised:
        parse_slo(document.values["slo"])
    assert str(document.blame(raised.value)) == (f"slo.tpot.p99=150: has no unit ({path}, line 5); write "
                                                 "slo.tpot.p99=150s or slo.tpot.p99=150ms")


def test_an_error_of_a_key_that_is_not_there_names_the_section(tmp_path: Path) -> None:
    path = tmp_path / "slo.yaml"
    path.write_text("budget: {}\nslo:\n  scheduler/policy: x\n")
    document = read_document(path)
    assert "line 2)" in str(document.blame(ConfigError("slo.ttft.p99", 1, "is missing", "add it")))
    assert "line 3)" in str(document.blame(ConfigError("slo.scheduler/policy", 1, "is wrong", "change it")))
    assert f"({path})" in str(document.blame(ConfigError("search", 1, "is missing", "add it")))


@pytest.mark.parametrize(("text", "message"), [
    ("slo: {ttft: {p99: 2s}\n", "line 2: expected ',' or '}', but got '<stream end>'"),
    ("- 1\n", "must hold keys and values"), ("", "must hold keys and values"),
    ("slo:\n  ttft: {p99: 2s}\n  ttft: {p99: 3s}\n", "slo.ttft=...: is given twice"),
    ("slo: !!python/object:os.system x\n", "cannot be read"),
])
def test_a_file_that_cannot_be_read(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "slo.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        read_document(path)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    with pytest.raises(ConfigError, match="no such file"):
        read_document(tmp_path / "other.yaml")
