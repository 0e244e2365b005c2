"""Fuzzes targets, one after another: python -m tests.fuzz [--minutes N] [TARGET…]. Ends non-zero on a finding."""

import argparse
import sys

from tests.fuzz import building, running


def main() -> None:
    """Prints a row of docs/fuzzing.md for each target."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(running.TARGETS)}; default: all")
    parser.add_argument("--minutes", type=float, default=10, help="for each target (default: 10)")
    given = parser.parse_args()
    if unknown := [one for one in given.targets if one not in running.TARGETS]:
        parser.error(f"there is no target {unknown[0]!r}; there are {', '.join(running.TARGETS)}")
    is_clean = True
    for target in given.targets or running.TARGETS:
        try:
            report = running.run(target, round(given.minutes * 60))
        except building.Missing as exc:
            sys.exit(f"{target} cannot be fuzzed: {exc}")
        shown = "nothing" if report.is_clean else f"see {report.log} and {report.found}"
        print(
            f"| {target} | {report.seconds / 60:.1f} | {report.executions:,} | {report.edges:,} | {shown} |", flush=True
        )
        is_clean &= report.is_clean
    sys.exit(0 if is_clean else 1)


if __name__ == "__main__":
    main()
