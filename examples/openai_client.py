"""OpenAI's own client: `python examples/openai_client.py [URL]`, with `faser serve --openai-port 9000` running."""

import sys

from openai import APIConnectionError, OpenAI

if __name__ == "__main__":
    url = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:9000/v1"
    client = OpenAI(base_url=url, api_key="none")  # a real key if the server has --api-key-file
    try:
        model = client.models.list().data[0].id
    except APIConnectionError as error:
        sys.exit(f"error: {url}: {error}")
    prompt = "def read_lines(path):\n"
    for chunk in client.completions.create(model=model, prompt=prompt, max_tokens=40, temperature=0, stream=True):
        print(chunk.choices[0].text, end="", flush=True)
    print()
    answer = client.completions.create(
        model=model, prompt=prompt, max_tokens=40, temperature=0, extra_body={"spec_decode_metrics": "summary"}
    )
    figures = (answer.model_extra or {})["metrics"]["speculative_decoding"]
    print(f"== {figures['num_accepted_draft_tokens']} of {figures['num_draft_tokens']} draft tokens accepted")
