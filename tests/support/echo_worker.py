"""A fake library: `python -m tests.support.echo_worker [broken]` continues a prompt with its first ids."""

from __future__ import annotations

import sys

from faser_backend.lab.peers.worker import Record, new_answer, serve, take


def answer_all(jobs: list[Record], num_clients: int) -> list[Record]:
    print("a library's chatter")  # must not reach the reader of answers
    if "broken" in sys.argv:
        raise ValueError("out of order")
    answers = []
    for job in jobs:
        answers.append(new_answer())
        for token in job["prompt_ids"][: job["max_tokens"]]:
            take(answers[-1], [token])
    return answers


if __name__ == "__main__":
    serve("1.0", answer_all)
