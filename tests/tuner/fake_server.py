"""A server in a process of its own that takes its knobs as flags: one makes it faster, one crash, one hang.

It answers as an OpenAI-compatible server does, with the standard library alone, so that it starts at once.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


def read_flags() -> argparse.Namespace:
    """The knobs, from flags or from the file that one of them names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--slots", type=int, default=1, help="answers at a time")
    parser.add_argument("--broken", action="store_true", help="end before being ready")
    parser.add_argument("--stuck", action="store_true", help="never be ready")
    parser.add_argument("--dies", action="store_true", help="end at the first request of a load")
    parser.add_argument("--text-only", action="store_true", help="refuse token ids")
    parser.add_argument("--stops-early", action="store_true", help="end answers before they are as long as wanted")
    parser.add_argument("--child", type=Path, help="start a process that outlives this one, and write its id there")
    parser.add_argument("--config", type=Path, help="a JSON file with slots")
    flags = parser.parse_args()
    if flags.config is not None:
        flags.slots = json.loads(flags.config.read_text()).get("engine", {}).get("slots", flags.slots)
    return flags


class Server(ThreadingHTTPServer):
    """Answers as many requests at a time as it has slots; each holds its slot for as long as it is answered."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, flags: argparse.Namespace) -> None:
        super().__init__(("127.0.0.1", flags.port), Handler)
        self.flags = flags
        self.slots = threading.Semaphore(flags.slots)


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *args: object) -> None:
        """Nothing is said of requests."""

    def do_GET(self) -> None:
        """Health and models."""
        if self.path == "/health" and not self.server.flags.stuck:
            self._json(200, {"status": "ok"})
        elif self.path == "/v1/models":
            self._json(200, {"data": [{"id": "fake", "meta": {"n_vocab": 30000}}]})
        else:
            self._json(503 if self.path == "/health" else 404, {"error": {"message": "not ready"}})

    def do_POST(self) -> None:
        """A completion, token by token."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt, wanted = body["prompt"], body["max_tokens"]
        if isinstance(prompt, list) and self.server.flags.text_only:
            self._json(400, {"error": {"message": "prompt must be text"}})
            return
        if wanted > 4 and self.server.flags.dies:
            print("out of slots", flush=True)
            sys.stdout.flush()
            threading.Thread(target=self.server.shutdown).start()
            return
        num_prompt = len(prompt) if isinstance(prompt, list) else len(prompt.split()) + 1
        num_tokens = max(1, wanted - 2) if self.server.flags.stops_early and wanted > 4 else wanted
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        with self.server.slots:
            for _ in range(num_tokens):
                time.sleep(0.002)
                self._event({"choices": [{"text": " a", "finish_reason": None}]})
        self._event({"choices": [{"text": "", "finish_reason": "length"}],
                     "usage": {"prompt_tokens": num_prompt, "completion_tokens": num_tokens}})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _event(self, payload: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(payload).encode() + b"\n\n")
        self.wfile.flush()

    def _json(self, status: int, payload: dict[str, Any]) -> None:
        content = json.dumps(payload).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def main() -> None:
    """Serve until somebody ends it."""
    flags = read_flags()
    if flags.child is not None:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        flags.child.write_text(str(child.pid))
    if flags.broken:
        print("loading the model", flush=True)
        sys.exit("not enough memory for the slots")
    Server(flags).serve_forever()


if __name__ == "__main__":
    main()
