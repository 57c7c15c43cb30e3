"""lm-eval's local-completions on a running server, beside the same task on transformers.

In an environment that has lm-eval 0.4, torch and transformers (none of which the project needs):

    octavo serve FOLDER --port 8000          FOLDER: the model in Hugging Face form
    python benchmarks/lm_eval_task.py FOLDER --url http://127.0.0.1:8000

A small multiple-choice task of our own (lm_eval_task.json; nothing is fetched) runs on both. Prints
both accuracies and the largest difference between log-likelihoods of one answer, and fails unless
the accuracies are the same and no answer is further off than the tolerance.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any
from urllib.request import urlopen

NAME = "octavo_small"
YAML = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{"test": "{data}"}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - metric: acc
  - metric: acc_norm
"""

Scores = dict[tuple[int, int], tuple[float, bool]]
"""(question, choice) -> (log-likelihood, whether greedy decoding says it)."""


def evaluate(model: str, model_args: str, folder: str) -> tuple[dict[str, float], Scores]:
    """Accuracies of one model, and what it says of each answer."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    results: Any = simple_evaluate(
        model=model,
        model_args=model_args,
        tasks=[NAME],
        task_manager=TaskManager(include_path=folder, include_defaults=False),
        batch_size=8,
        log_samples=True,
        bootstrap_iters=0,
    )
    found = results["results"][NAME]
    scores = {
        (sample["doc_id"], choice): (float(value), str(greedy) == "True")
        for sample in results["samples"][NAME]
        for choice, (value, greedy) in enumerate(sample["filtered_resps"])
    }
    return {name: found[f"{name},none"] for name in ("acc", "acc_norm")}, scores


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", help="the folder that the server serves")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--tolerance", type=float, default=0.25, help="nats, of one answer")
    args = parser.parse_args()
    sys.path.pop(0)  # this folder, where kernels.py would pass for a package that others look for
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    data = Path(__file__).resolve().with_suffix(".json")
    with tempfile.TemporaryDirectory() as folder:
        text = YAML.format(name=NAME, data=data)
        Path(folder, f"{NAME}.yaml").write_text(text)
        with urlopen(f"{args.url}/v1/models") as reply:
            served = json.load(reply)["data"][0]["id"]
        server = f"model={served},base_url={args.url}/v1/completions,tokenizer={args.model}"
        server += ",tokenizer_backend=huggingface,tokenized_requests=True,max_retries=1"
        ours, own = evaluate("local-completions", server, folder)
        theirs, other = evaluate("hf", f"pretrained={args.model},dtype=float32,device=cpu", folder)
    assert own.keys() == other.keys()
    furthest = max(abs(own[key][0] - other[key][0]) for key in own)
    greedy = sum(own[key][1] != other[key][1] for key in own)
    print(f"server {ours}, transformers {theirs}; {len(own)} answers")
    print(f"largest difference {furthest:.4f} nats; is_greedy differs in {greedy}")
    return 0 if ours == theirs and furthest <= args.tolerance else 1


if __name__ == "__main__":
    sys.exit(main())
