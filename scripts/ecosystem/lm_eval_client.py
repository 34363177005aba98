"""lm-eval: a task of log-likelihoods and one of generation, made here, with local-completions."""

import json
import os
import tempfile
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

QUESTIONS = [("def add(a, b):\n    return a", [" + b", " while"], 0), ("for i in", [" import", " range(10):"], 1)]
COMMON = {"dataset_path": "json", "test_split": "test", "doc_to_text": "{{text}}", "num_fewshot": 0}
CHOICE = {"task": "choice", "output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": "answer"}
SPOKEN = {"task": "spoken", "output_type": "generate_until", "doc_to_target": "{{choices[answer]}}"}
SPOKEN |= {"generation_kwargs": {"until": ["@@"], "max_gen_toks": 8}, "metric_list": [{"metric": "exact_match"}]}

with tempfile.TemporaryDirectory() as folder:
    data, tasks = Path(folder, "data.jsonl"), []
    rows = [{"text": text, "choices": choices, "answer": answer} for text, choices, answer in QUESTIONS]
    data.write_text("\n".join(map(json.dumps, rows)))
    for task in (CHOICE, SPOKEN):
        whole = task | COMMON | {"dataset_kwargs": {"data_files": {"test": str(data)}}}
        Path(folder, f"{task['task']}.yaml").write_text(json.dumps(whole))
    arguments = {"model": os.environ["MODEL"], "base_url": os.environ["OPENAI_BASE_URL"] + "/completions"}
    arguments |= {"tokenizer": os.environ["TOKENIZER"], "tokenizer_backend": "huggingface", "max_length": 256}
    results = lm_eval.simple_evaluate(
        model="local-completions",
        model_args=arguments | {"num_concurrent": 2, "max_retries": 1},
        tasks=["choice", "spoken"],
        task_manager=TaskManager(include_path=folder, include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
accuracy = results["results"]["choice"]["acc,none"]
scores = [score for sample in results["samples"]["choice"] for (score, _), *_ in [sample["filtered_resps"]]]
assert len(results["samples"]["choice"]) == 2 and all(-100 < score < 0 for score in scores), scores
assert results["samples"]["spoken"][0]["resps"][0][0]
print(f"a task of log-likelihoods (accuracy {accuracy:g} on two questions) and one of generation")
