"""`python -m tests.benchmarks [web …]`: measure, and print tables. Takes less than three minutes."""

import argparse
import importlib

#: Modules of this package with a `main(rounds, seconds)`.
SUBJECTS = ("web", "outbox", "steps")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("subjects", nargs="*", default=["web"], help=", ".join(SUBJECTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2, help="of each measurement in a round")
    options = parser.parse_args()
    for subject in options.subjects:
        if subject not in SUBJECTS:
            parser.error(f"unknown subject {subject!r}; there are {', '.join(SUBJECTS)}")
        importlib.import_module(f"tests.benchmarks.{subject}").main(options.rounds, options.seconds)


if __name__ == "__main__":
    main()
