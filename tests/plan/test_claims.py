"""Claims about a load: the often-quoted 70B example, and claims that are right."""

from __future__ import annotations

from typing import Any

import pytest

from plan.planning import make_70b_config
from servekit.config.errors import ConfigError
from servekit.config.plan import ClaimConfig
from servekit.config.roofline import Precision
from servekit.plan.capacity import plan_capacity
from servekit.plan.claims import Verdict, check_claims


def verdicts(claim: ClaimConfig, **changes: Any) -> dict[str, Verdict]:
    plan = plan_capacity(make_70b_config(claim=claim, **changes))
    return {verdict.key.removeprefix("claim."): verdict for verdict in check_claims(plan)}


def test_no_claim_no_verdict() -> None:
    assert verdicts(ClaimConfig()) == {}


def test_seventy_billion_parameters_at_3000_tokens_per_second() -> None:
    """70B, 3000 tok/s with 20 concurrent requests of 200 + 200 tokens, 100 GB of KV, 50 GPUs for 1000 req/s."""
    claim = ClaimConfig(tokens_per_s=3000, concurrency=20, kv_bytes=100e9, gpus=50)
    found = verdicts(claim, kv_precision=Precision.bfloat16)
    assert list(found) == ["tokens_per_s", "concurrency", "kv_bytes", "gpus"]
    assert not any(verdict.holds for verdict in found.values())
    assert found["kv_bytes"].right == 20 * 400 * 327_680
    assert "the claim would do for 762.9 requests" in found["kv_bytes"].reason
    assert "a token every 6.7 ms" in found["tokens_per_s"].reason
    assert "takes 10.3 ms at full bandwidth" in found["tokens_per_s"].reason
    assert found["tokens_per_s"].right < 20 / 0.0103
    assert "it would take 66.67" in found["gpus"].reason and "the queue grows by" in found["gpus"].reason
    assert found["gpus"].right > 66.67
    assert "by Little's law 20 in flight on each of 50 GPUs" in found["concurrency"].reason


def test_claims_that_the_plan_makes_hold() -> None:
    plan = plan_capacity(make_70b_config(tpot_s=0.06))
    point = plan.point
    claim = ClaimConfig(tokens_per_s=point.requests_per_s * 200 / 2, concurrency=point.num_in_flight / 2,
                        kv_bytes=point.num_in_flight / 2 * 400 * 163_840, gpus=plan.gpus)
    found = verdicts(claim, tpot_s=0.06)
    assert all(verdict.holds for verdict in found.values()), found
    for name, verdict in found.items():
        assert verdict.right == pytest.approx(getattr(claim, name), rel=1e-4), name


@pytest.mark.parametrize(("claim", "key", "holds"), [
    (ClaimConfig(tokens_per_s=3200), "tokens_per_s", True), (ClaimConfig(tokens_per_s=3700), "tokens_per_s", False),
    (ClaimConfig(gpus=94), "gpus", True), (ClaimConfig(gpus=93), "gpus", False), (ClaimConfig(gpus=1), "gpus", False),
    (ClaimConfig(concurrency=80), "concurrency", True), (ClaimConfig(concurrency=40), "concurrency", False),
    (ClaimConfig(concurrency=20, kv_bytes=1.3e9), "kv_bytes", True),
    (ClaimConfig(concurrency=20, kv_bytes=1.0e9), "kv_bytes", False)])
def test_each_claim_on_its_own(claim: ClaimConfig, key: str, holds: bool) -> None:
    assert verdicts(claim, tpot_s=0.06)[key].holds is holds


def test_concurrency_ends_where_the_kv_cache_does() -> None:
    few, many = (verdicts(ClaimConfig(tokens_per_s=1, concurrency=count))["tokens_per_s"].right
                 for count in (1000, 100_000))
    plan = plan_capacity(make_70b_config())
    assert few == pytest.approx(many, rel=0.05)
    assert many == pytest.approx(plan.binding.requests_per_s * 200 / 2)


def test_a_claim_must_be_a_number_above_zero() -> None:
    with pytest.raises(ConfigError, match=r"claim\.kv_bytes"):
        ClaimConfig(kv_bytes=0)
