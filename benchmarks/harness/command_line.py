"""The two flags that every benchmark takes, and where a record goes."""

import argparse
import json
from pathlib import Path


def add_common_arguments(parser: argparse.ArgumentParser, *, quick: str = "under 50 s on two cores") -> None:
    """`--quick` (with this help) and `--json`."""
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", metavar="FILE", help="write everything measured; - is standard output")


def write_json(target: str | None, record: object) -> None:
    """To the file, to standard output for `-`, nowhere for None."""
    if target is None:
        return
    text = json.dumps(record, indent=1)
    if target == "-":
        print(text)
    else:
        Path(target).write_text(text + "\n")
