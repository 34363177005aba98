"""A batch without a server: `python examples/offline_batch.py [ENGINE_DIR]`. The default is the demo pair."""

import sys

from faser_backend import LLM, SamplingParams

PROMPTS = ["def read_lines(path):\n", "import os\n", "class Stack:\n"]

if __name__ == "__main__":
    with LLM(*sys.argv[1:2]) as llm:
        for output in llm.generate(PROMPTS, SamplingParams(max_tokens=40, temperature=0.8, seed=1)):
            print(f"== {output.prompt!r}: {output.num_accepted} of {output.num_drafted} draft tokens accepted")
            print(output.text)
