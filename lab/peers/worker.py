"""Peers that are libraries: a process of their own that lab.peers.workers runs in, with a Python of its own."""

from __future__ import annotations

import hashlib
import json
import select
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from lab.answers import Answer, Job
from lab.bench.servers import START_TIMEOUT_S
from lab.peers import turns
from lab.places import ROOT

ANSWER_TIMEOUT_S = 600.0  # for all answers of an order


class WorkerPeer:
    """A library that continues token ids.

    python, module: what runs lab.peers.workers.loop. tokenizer: makes text of answers, by which these are compared.

    Raises RuntimeError with what the process said where it does not come up.
    """

    def __init__(self, python: Path, module: str, options: list[str], *, tokenizer: Path, log: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(tokenizer))
        self._log = log
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [str(python), "-m", module, *options],
                cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                **turns.OWN_GROUP,
            )  # fmt: skip
        try:
            with turns.turn(self.process):
                self.version: str = self._line(START_TIMEOUT_S)["version"]
        except BaseException:
            self.stop()
            raise

    def run(self, jobs: list[Job], num_clients: int) -> tuple[list[Answer], float]:
        """num_clients requests in flight until all jobs are answered. Returns answers and seconds."""
        assert self.process.stdin is not None
        order = {"num_clients": num_clients, "jobs": [asdict(job) for job in jobs]}
        with turns.turn(self.process):
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()
            found = self._line(ANSWER_TIMEOUT_S)
        answers = [Answer(**answer, digest="") for answer in found["answers"]]
        for answer in answers:
            text = self._tokenizer.decode(answer.token_ids, skip_special_tokens=True)
            answer.digest = hashlib.sha256(text.encode()).hexdigest()
        return answers, found["seconds"]

    def _line(self, timeout_s: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        has_come, _, _ = select.select([self.process.stdout], [], [], timeout_s)
        line = self.process.stdout.readline() if has_come else ""
        if not line:
            reason = "ended" if has_come else f"said nothing for {timeout_s:.0f} s"
            raise RuntimeError(f"the peer {reason}:\n{self._log.read_text()[-4000:]}")
        return json.loads(line)

    def stop(self) -> None:
        turns.stop(self.process)
