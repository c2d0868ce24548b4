"""A further rank of a divided model: `python -m servekit.engine.worker`, started by the first one (runner/workers.py).

It has a runner and no scheduler: it loads its part of the model, and then does its part of each step that the first
rank begins. It ends when its standard input closes, which is what happens when the first rank ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import queue
import signal
import sys
import threading
from typing import TYPE_CHECKING

from servekit.config.errors import ConfigError
from servekit.garbage import take_for_permanent

if TYPE_CHECKING:
    from servekit.runner.workers import RankOrder, ToRank

_LOST, _FAILED = 1, 2


def main() -> int:
    """Run the rank that the RankOrder on standard input describes; returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.disable(logging.WARNING)  # The first rank says it already.
    inbox: queue.SimpleQueue[ToRank] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(inbox,), name="inbox", daemon=True).start()
    from servekit.runner.group import RankLost
    from servekit.runner.workers import RankOrder

    order = inbox.get()
    assert isinstance(order, RankOrder)
    try:
        _serve(order, inbox)
    except RankLost:
        return _LOST  # The first rank says which.
    except Exception as error:
        _say(f"rank {order.rank} failed: {type(error).__name__}: {error}")
    return _FAILED


def _say(line: str) -> None:
    print(f"servekit: {' '.join(line.split())}", file=sys.stderr, flush=True)


def _receive(inbox: queue.SimpleQueue[ToRank]) -> None:
    """Take what the first rank sends, and end at once when it has gone, whatever this rank waits for."""
    with open(sys.stdin.fileno(), "rb", closefd=False) as stream:
        try:
            while True:
                inbox.put(pickle.load(stream))
        except (EOFError, pickle.UnpicklingError):  # The latter: it was killed while it sent.
            os._exit(_LOST)
        except BaseException as error:
            _say(f"a rank cannot read what it is told: {error!r}")
            os._exit(_FAILED)


def _serve(order: RankOrder, inbox: queue.SimpleQueue[ToRank]) -> None:
    from servekit.engine.build import FollowingRank
    from servekit.runner.inputs import SharedStep
    from servekit.runner.workers import Assemble

    os.write(sys.stdout.fileno(), b".")
    rank = FollowingRank(order)
    take_for_permanent()
    while True:
        match inbox.get():
            case SharedStep() as step:
                rank.follow(step)
            case Assemble(config):
                # The first rank is refused for the same reason, and says so.
                with contextlib.suppress(ConfigError):
                    rank.assemble(config)


if __name__ == "__main__":
    status = main()
    os._exit(status)  # Not through the libraries' exit handlers, which may wait for ranks that have gone.
