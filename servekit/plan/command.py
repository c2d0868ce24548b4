"""`servekit plan`: what carries a load, as a text."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from rich.console import Console

from servekit.config.plan import PlanConfig, PlanFormat
from servekit.plan.capacity import plan_capacity
from servekit.plan.claims import check_claims
from servekit.plan.report import document, print_plan

if TYPE_CHECKING:
    from servekit.config.compose import Composed


def render(composed: Composed[PlanConfig]) -> str:
    """Plan a load and write it out. Raises ConfigError for a load that cannot be carried."""
    plan = plan_capacity(composed.config)
    verdicts = check_claims(plan)
    if composed.config.format is PlanFormat.json:
        return json.dumps(document(plan, verdicts), indent=2)
    console = Console()
    with console.capture() as written:
        print_plan(plan, verdicts, console)
    return written.get().rstrip()
