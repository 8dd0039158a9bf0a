"""Splitting lognormal sequence lengths over ranks: how far the dearest rank is above max(mean, largest length), and CPU time.

    .venv/bin/python benchmarks/balance.py [--quick]

Prints one JSON line per size and setting of `equal_size`, with Graham's longest-first greedy as the peer (without the equal sizes, which it
does not keep). Lengths are whole, so where a part holds few tokens one token more than the mean is already a visible share: `gap_to_whole`
counts from the mean rounded up, which no split of whole lengths can beat.
"""

import argparse
import json
import math
import time

import numpy as np

from offbeat.data.balance import longest_first, partition

CASES = [(256, 8), (1024, 8), (1024, 128), (4096, 64), (16384, 128), (65536, 512)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the three smallest cases")
    for num_items, k in CASES[: 3 if parser.parse_args().quick else None]:
        costs = np.random.default_rng(0).lognormal(4.0, 0.9, num_items).clip(16, 4096).round()
        bound = max(costs.sum() / k, costs.max())
        greedy = max(costs[part].sum() for part in longest_first(costs, k))
        for equal_size in (False, True):
            start = time.process_time()
            result = partition(costs, k, equal_size=equal_size)
            cpu_s = time.process_time() - start
            print(json.dumps({
                "benchmark": "balance", "case": f"{num_items} on {k}{', equal sizes' if equal_size else ''}",
                "gap": round(result.largest / bound - 1, 7), "gap_to_whole": round(result.largest / math.ceil(bound) - 1, 7),
                "certified_gap": round(result.gap, 7), "greedy_gap": round(greedy / bound - 1, 7), "cpu_s": round(cpu_s, 4),
            }), flush=True)


if __name__ == "__main__":
    main()
