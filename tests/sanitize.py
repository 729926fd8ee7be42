"""Cases of the contract on the cuda backend, as a program that compute-sanitizer can watch: `make sanitize-gpu`.

    python tests/sanitize.py --ranks 2 one-token odd-sizes

Ranks share the visible GPUs. They are spawned, not forked: the sanitizer follows processes that start anew. It makes
everything slow, so the limits are long, but there are limits.
"""

from __future__ import annotations

import argparse

from test_contract import PARTS, compare, routed, run_case, specify

from moonep.testing.cases import BY_NAME
from moonep.testing.ranks import PerRank, Ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds for each case")
    parser.add_argument("cases", nargs="+", choices=BY_NAME, metavar="case")
    given = parser.parse_args()
    with Ranks(given.ranks, start_method="spawn", timeout_s=given.timeout) as ranks:
        for name in given.cases:
            at = routed(name, given.ranks)
            arguments = given.backend, name, given.ranks, PerRank(at.topk), PerRank(at.other)
            compare(ranks.run(run_case, *arguments), specify(name, given.ranks), PARTS)
            print(f"{name}: as specified on {given.ranks} ranks", flush=True)


if __name__ == "__main__":
    main()
