"""How fast one version of Echelon is next to another: two checkouts, the same benchmarks.

    python benchmarks/versions.py --before ../old --after . --data ../shared/data --rounds 5

Each checkout needs its own `.venv` (`make test` builds it). Every round runs each benchmark once in
either checkout; which of them goes first alternates. A ratio is the speed of `after` ÷ that of
`before`, paired by round; the median counts. The last line is one JSON object of medians.

Use it to show that a change which is not about speed costs none: 1.00 means equally fast.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

DEADLINE = 900.0
STARTS = 5
"""Launches per measurement of start-up time."""
ABSENT = "lightning"
"""A peer that is not installed, so that a benchmark runs Echelon alone."""

Speeds = dict[str, float]


def main() -> None:
    chosen = arguments()
    found: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        works = benchmarks(chosen.data.resolve(), Path(scratch))
        for number in range(chosen.rounds):
            for name in chosen.only:
                both = [chosen.before.resolve(), chosen.after.resolve()]
                speeds = [works[name](root) for root in (both if number % 2 == 0 else both[::-1])]
                before, after = speeds if number % 2 == 0 else speeds[::-1]
                for part, speed in before.items():
                    found.setdefault(f"{name} {part}", []).append((speed, after[part]))
                    ratio = after[part] / speed
                    print(f"round {number + 1}: {name} {part} {ratio:.3f}", flush=True)
    print(f"\n{'':24}{'before':>12}{'after':>12}{'÷':>8}{'lowest':>8}{'highest':>8}")
    ratios = {name: [after / before for before, after in pairs] for name, pairs in found.items()}
    for name, pairs in found.items():
        middle = [median(speeds) for speeds in zip(*pairs, strict=True)]
        row = (median(ratios[name]), min(ratios[name]), max(ratios[name]))
        print(f"{name:24}{middle[0]:12,.1f}{middle[1]:12,.1f}" + "".join(f"{r:8.3f}" for r in row))
    print(json.dumps({name: round(median(each), 3) for name, each in ratios.items()}))


def benchmarks(data: Path, scratch: Path) -> dict[str, Callable[[Path], Speeds]]:
    """What to run in a checkout, by name; each returns speeds by part."""
    table = r"^(?P<part>\w+) on .*?^echelon +(?P<speed>[\d,.]+)"
    alone = ["--rounds", "1", "--peers", ABSENT, "--data", str(data)]
    prepare = ["--data", str(data), "--work", str(scratch), "--no-double"]
    return {
        "start": start_up,
        "loop": partial(run, "loop.py", [*alone, "--threads", "1"], [table]),
        "collective": partial(run, "collective.py", [*alone, "--only", "mlp,cnn"], [table]),
        "ps_training": partial(
            run,
            "ps_training.py",
            ["--rounds", "1", "--sides", "echelon_live,echelon_tcp", "--data", str(data)],
            [r"^(?P<part>echelon_\w+) +(?P<speed>[\d,.]+)"],
        ),
        "loader": partial(
            run,
            "loader.py",
            ["--rounds", "3", "--gb", "1", "--data", str(data / "fashion-mnist")],
            [
                r"^(?P<part>echelon) +(?P<speed>[\d,]+) samples",
                r"(?P<part>stream)ed at (?P<speed>[\d,]+)",
            ],
        ),
        "prepare": partial(
            run,
            "prepare.py",
            [*prepare, "--csv-mb", "128", "--text-mb", "64"],
            [r"^(?P<part>\w+) +echelon, once.*?(?P<speed>[\d,]+) rows/s"],
        ),
    }


def run(script: str, options: list[str], patterns: list[str], root: Path) -> Speeds:
    """Run a benchmark in a checkout and read the speeds of Echelon from what it prints."""
    command = [str(root / ".venv" / "bin" / "python"), str(root / "benchmarks" / script), *options]
    done = subprocess.run(
        command, cwd=root, capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    speeds = {
        match["part"]: float(match["speed"].replace(",", ""))
        for pattern in patterns
        for match in re.finditer(pattern, done.stdout, re.MULTILINE | re.DOTALL)
    }
    assert speeds, f"{script} printed no speed:\n{done.stdout[-2000:]}"
    return speeds


def start_up(root: Path) -> Speeds:
    """Launches per second of `import echelon` and of `echelon --help`."""
    programs = root / ".venv" / "bin"
    commands = {
        "import": [str(programs / "python"), "-c", "import echelon"],
        "help": [str(programs / "echelon"), "--help"],
    }
    speeds = {}
    for name, command in commands.items():
        begun = time.perf_counter()
        for _ in range(STARTS):
            subprocess.run(command, cwd=root, capture_output=True, timeout=DEADLINE, check=True)
        speeds[name] = STARTS / (time.perf_counter() - begun)
    return speeds


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--before", type=Path, required=True, help="checkout of the older version")
    parser.add_argument("--after", type=Path, default=Path(), help="checkout of the newer version")
    parser.add_argument("--data", type=Path, required=True, help="folder of the data sets")
    parser.add_argument("--rounds", type=int, default=5)
    known = ["start", "loop", "collective", "ps_training", "loader", "prepare"]
    parser.add_argument("--only", nargs="+", choices=known, default=known)
    return parser.parse_args()


if __name__ == "__main__":
    main()
