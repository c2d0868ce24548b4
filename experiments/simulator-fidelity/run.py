"""How well the simulator predicts a real server.

    nohup python experiments/simulator-fidelity/run.py out=/tmp/fidelity minutes=30 > fidelity.log 2>&1 &

Measures every setup and load (setups.py) with the default model on this machine's processor, which should have nothing
else to do, and then compares. A run that is in the folder `out` is not measured again, so the command can be repeated.

    out=FOLDER         where the raw results and the step logs go (some hundred megabytes; they hold prompts)
    result=FILE        what is found; result.json beside this script if not given
    minutes=30         after that no further run begins
    seconds=25         about how long each run lasts
    only=NAME,NAME     these setups only
    serve="KEY=VALUE"  more settings for every server, such as a model that is already on the disk
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
import time
from pathlib import Path

from compare import compare
from measure import measure
from setups import SETUPS

from servekit import __version__

HERE = Path(__file__).parent
SEED = 1000


def main() -> None:
    given = dict(argument.split("=", 1) for argument in sys.argv[1:])
    out = Path(given["out"]) if "out" in given else sys.exit(__doc__)
    unknown = given.keys() - {"out", "result", "minutes", "seconds", "only", "serve"}
    if unknown:
        sys.exit(f"unknown: {', '.join(sorted(unknown))}\n{__doc__}")
    names = given["only"].split(",") if "only" in given else [setup.name for setup in SETUPS]
    setups = [setup for setup in SETUPS if setup.name in names]
    ends_s = time.monotonic() + 60 * float(given.get("minutes", "30"))
    for number, setup in enumerate(setups):
        if time.monotonic() < ends_s:
            measure(out, setup, shlex.split(given.get("serve", "")), float(given.get("seconds", "25")),
                    SEED + 10 * number, lambda: time.monotonic() >= ends_s)
    facts = {"servekit": __version__, "python": platform.python_version(), "cpus": len(os.sched_getaffinity(0)),
             "machine": platform.machine(), "date": time.strftime("%Y-%m-%d")}
    result = {"facts": facts, **compare(out, setups)}
    Path(given.get("result", HERE / "result.json")).write_text(json.dumps(result, indent=1) + "\n")
    _print(result)


def _print(result: dict[str, object]) -> None:
    print(json.dumps(result["fit"], indent=1))
    for group, rows in result["summary"].items():
        print(f"\n{group:20} {'median':>8} {'largest':>8} {'limit':>7} {'within':>9} {'Spearman':>9}")
        for name, row in rows.items():
            limit = "" if row["limit"] is None else f"{row['limit']:.0%}"
            within = "" if row["within"] is None else f"{row['within']} of {row['of']}"
            rank = "" if row["spearman"] is None else f"{row['spearman']:.3f}"
            print(f"{name:20} {row['median_error']:8.1%} {row['largest_error']:8.1%} {limit:>7} {within:>9} {rank:>9}")
    for row in result["slo_rates"]:
        print(f"{row['setup']}: SLO held up to {row['measured_from']} and not at {row['measured_to']} req/s; "
              f"predicted {row['predicted']}")


if __name__ == "__main__":
    main()
