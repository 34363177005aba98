"""A streaming client of Triton's HTTP, without a client library: `python examples/http_stream.py [URL]`."""

import json
import sys
import urllib.request

REQUEST = {"text_input": "def read_lines(path):\n", "max_tokens": 40, "stream": True}
REQUEST |= {"temperature": 0.8, "top_p": 0.95, "seed": 7}  # without top_p or top_k the server decodes greedily

if __name__ == "__main__":
    url = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000"
    body = json.dumps(REQUEST).encode()
    try:
        lines = urllib.request.urlopen(f"{url}/v2/models/ensemble/generate_stream", body, timeout=60)
    except OSError as error:
        sys.exit(f"error: {url}: {error}")
    with lines:
        for line in lines:
            if line.startswith(b"data:"):
                event = json.loads(line[5:])
                if "error" in event:
                    sys.exit(f"error: {event['error']}")
                print(event["text_output"], end="", flush=True)
    print()
