"""guidellm: a short load of two streams on completions, without an error."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

to = f"target={os.environ['OPENAI_BASE_URL'].removesuffix('/v1')},model={os.environ['MODEL']}"
with tempfile.TemporaryDirectory() as folder:
    report = Path(folder, "report.json")
    options = {
        "--backend": f"kind=openai_http,{to},request_format=/v1/completions",
        "--profile": "kind=concurrent,streams=2",
        "--constraint": "kind=max_duration,seconds=10",
        "--data": "kind=synthetic_text,prompt_tokens=32,output_tokens=16",
        "--tokenizer": f"kind=hf_auto,model={os.environ['TOKENIZER']}",
        "--output": f"kind=json,path={report}",
    }
    pairs = [word for option in options.items() for word in option]
    subprocess.run([Path(sys.executable).with_name("guidellm"), "run", *pairs, "--disable-console"], check=True)
    [benchmark] = json.loads(report.read_text())["benchmarks"]
done = benchmark["metrics"]["request_totals"]
assert done["successful"] > 0 and not done["errored"], done
print(f"{done['successful']} completions from two streams in 10 s, none failed")
