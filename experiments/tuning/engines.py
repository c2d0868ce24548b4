"""One objective, and servers of several makes, each with the best of its own knobs. To be run by hand.

    python experiments/tuning/engines.py folder=/tmp/engines \\
        llama-server="llama-server -m smollm2.gguf -c 16384" \\
        vllm="python -m vllm.entrypoints.openai.api_server --model smollm2"

    folder=FOLDER        where the studies and their raw logs go; a study that is there goes on, and one that has its
                         certificate is read
    NAME="COMMAND"       a server, named as its search space in conf/target/; `--port` is added to its command
    objective=smooth     a tuning file of conf/slo/
    minutes=15           for each server, servekit's own among them
    port=18300           where they listen, one after the other
    words="KEY=VALUE …"  more words for every tuning file
    own="KEY=VALUE …"    more words for servekit's own engine, such as a model that is already on the disk
    out=FILE             what is found; engines.json beside this script if not given; what it
                         says of other servers for the same objective stays

Same prompts, same arrivals, same time. A server's default is its command as it is; servekit's is its default
configuration. No server that is absent is guessed at: it is not in the table.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from common import HERE, arguments, best_of, draw_rates, print_table, rate_text, tuning, write
from matplotlib import pyplot as plt

from servekit.config.errors import ConfigError

OWN = "servekit"
OPTIONS = ("folder", "objective", "minutes", "port", "words", "own", "out")
ROLES = ("default", "tuned")


def words_for(server: str, given: dict[str, str]) -> list[str]:
    """What the tuning file of an objective needs for this server."""
    usual = [f"budget.minutes={given.get('minutes', '15')}", *shlex.split(given.get("words", ""))]
    if server == OWN:
        return usual + shlex.split(given.get("own", ""))
    port = given.get("port", "18300")
    return [*usual, "target=openai", f"search={server}", f"url=http://127.0.0.1:{port}",
            f"start_command={given[server]} --port {port}"]


def rows(found: dict[str, Any]) -> Iterator[list[str]]:
    for server, verdict in found.items():
        yield [server, *(rate_text(best_of(verdict["finalists"], role)) for role in ROLES), str(verdict["winner"])]


def draw(objective: str, found: dict[str, Any], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(2.2 + 1.6 * len(found), 4.2))
    draw_rates(axes, found, ROLES)
    axes.set_title(f"{objective}: each server with its own knobs")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    given = arguments()
    if "folder" not in given:
        sys.exit(__doc__)
    folder, objective = Path(given["folder"]), given.get("objective", "smooth")
    out = Path(given.get("out", HERE / "engines.json"))
    before = json.loads(out.read_text()) if out.exists() else {}
    found = before.get("servers", {}) if before.get("objective") == objective else {}
    for server in (OWN, *(name for name in given if name not in OPTIONS)):
        found[server] = tuning(objective, words_for(server, given), folder / objective / server)
        plot = write("engines", {"objective": objective, "servers": found})
    print_table(["server", *(f"{role}, req/s" for role in ROLES), "winner"], list(rows(found)))
    draw(objective, found, plot)


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        sys.exit(str(error))
