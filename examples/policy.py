"""A custom policy: `python examples/policy.py [ENGINE_DIR]`. Any command takes it as --policy file:policy.py.

It shares eight draft tokens per step among the requests, in proportion to their acceptance rates.
"""

import sys

from faser_backend import LLM, SamplingParams
from faser_backend.core.decision import WHOLE, Decision

BUDGET = 8  # draft tokens per step


class Shares:
    is_drafting = True  # a draft model is needed
    partitions = (WHOLE,)  # it never splits the device

    def decide(self, sequences, num_prefilling=0):
        rates = []
        for each in sequences:
            accepted, tested = each.stats.num_accepted, each.stats.num_tested
            rates.append((accepted + 1) / (tested + 2))  # 1/2 before the first draft
        total = sum(rates)
        return Decision([round(BUDGET * rate / total) for rate in rates])

    def observe(self, record):
        """Does nothing: the sequences hold their own counts."""


def make_policy(load_knowledge):
    return Shares()


if __name__ == "__main__":
    with LLM(*sys.argv[1:2], policy=f"file:{__file__}") as llm:
        for output in llm.generate(["def add(a, b):\n", "import os\n"], SamplingParams(max_tokens=40)):
            print(f"== {output.num_accepted} of {output.num_drafted} draft tokens accepted")
            print(output.text)
