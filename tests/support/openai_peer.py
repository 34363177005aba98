"""A fake OpenAI server: `python -m tests.support.openai_peer --port N ...` answers with its input.

The text gives the number of prompt ids, the temperature and the seed, two tokens per event. Other prompts are refused.
"""

from __future__ import annotations

import argparse
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def events(body: dict[str, Any]) -> list[dict[str, Any]]:
    words = [f"{len(body['prompt'])} ids, ", f"T={body['temperature']:g}, ", f"{body['seed']}, ", "end"]
    choices = [{"text": word, "finish_reason": None} for word in words]
    choices[-1]["finish_reason"] = "stop"
    usage = {"completion_tokens": min(body["max_tokens"], 2 * len(words))}
    return [*({"choices": [choice], "usage": None} for choice in choices), {"choices": [], "usage": usage}]


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        is_good = self.path == "/v1/completions" and isinstance(body["prompt"], list)
        self.send_response(200 if is_good else 400)
        self.end_headers()
        if not is_good:
            self.wfile.write(b"no token ids")
            return
        for event in events(body):
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, format: str, *args: object) -> None:
        pass


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    ThreadingHTTPServer(("127.0.0.1", parser.parse_known_args()[0].port), Handler).serve_forever()
