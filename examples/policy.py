"""A policy of one's own: `python examples/policy.py [ENGINE_DIR]`; any command takes it as --policy file:policy.py.

It has eight draft tokens to give in a step, and gives most to the requests whose drafts were accepted most.
"""

import sys

from faser_backend import LLM, SamplingParams
from faser_backend.core.decision import WHOLE, Decision

BUDGET = 8  # draft tokens of a step


class Shares:
    is_drafting = True  # a draft model is needed
    partitions = (WHOLE,)  # it never asks for a split of the device

    def decide(self, sequences, num_prefilling=0):
        rates = []
        for each in sequences:
            accepted, tested = each.server_acceptance
            rates.append((accepted + 1) / (tested + 2))  # a half before anything is known
        total = sum(rates)
        return Decision([round(BUDGET * rate / total) for rate in rates])

    def observe(self, record):
        """The sequences count for themselves."""


def make_policy(load_knowledge):
    return Shares()


if __name__ == "__main__":
    with LLM(*sys.argv[1:2], policy=f"file:{__file__}") as llm:
        for output in llm.generate(["def add(a, b):\n", "import os\n"], SamplingParams(max_tokens=40)):
            print(f"== {output.num_accepted} of {output.num_drafted} draft tokens accepted")
            print(output.text)
