"""Print a workload for `octavo bench throughput`: requests of mixed lengths, random tokens.

Prompts log-normal around 110 tokens, within 16 to 512; outputs 40 % under 60 tokens, 40 % up to
128, 20 % up to 256. The same file each time.
"""

from __future__ import annotations

import argparse
import json
import math
import random

ORDINARY_IDS = range(1000, 40000)
"""Token ids that are words in every vocabulary this is meant for: no control tokens."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=32, help="how many (default 32)")
    num_requests = parser.parse_args().requests
    draw = random.Random(0)
    requests = []
    for number in range(num_requests):
        length = min(512, max(16, round(draw.lognormvariate(math.log(110), 0.8))))
        low, high = draw.choices([(16, 60), (60, 128), (128, 256)], [40, 40, 20])[0]
        requests.append(
            {
                "id": number,
                "prompt_ids": draw.choices(ORDINARY_IDS, k=length),
                "max_tokens": draw.randint(low, high),
            }
        )
    print(json.dumps({"name": "mixed", "n": num_requests, "requests": requests}))


if __name__ == "__main__":
    main()
