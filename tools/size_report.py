"""Sizes of the code: files and functions over the limits of CONTRIBUTING.md fail; the rest is a table by room."""

import ast
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("moeserve", "kernels", "placement", "launch", "benchmarks")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 70


def main() -> int:
    """Print the table; returns 1 when something is too long."""
    lines_by_room: dict[str, list[int]] = defaultdict(list)
    too_long: list[str] = []
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            source = path.read_text()
            num_lines = source.count("\n")
            name = path.relative_to(ROOT)
            lines_by_room["/".join(name.parts[:2]) if room == "moeserve" and len(name.parts) > 2 else room].append(
                num_lines
            )
            if num_lines > MAX_FILE_LINES:
                too_long.append(f"{name}: {num_lines} lines, at most {MAX_FILE_LINES}")
            too_long += [f"{name}:{text}" for text in _long_functions(source)]
    for place, sizes in sorted(lines_by_room.items()):
        print(f"{place:28} {len(sizes):4} files {sum(sizes):6} lines   longest {max(sizes):4}")
    print("\n".join(too_long))
    return bool(too_long)


def _long_functions(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            # Without the signature: a kernel's alone takes thirty lines.
            num_lines = (node.end_lineno or node.lineno) - node.body[0].lineno + 1
            if num_lines > MAX_FUNCTION_LINES:
                found.append(f"{node.lineno} {node.name}: {num_lines} lines, at most {MAX_FUNCTION_LINES}")
    return found


if __name__ == "__main__":
    sys.exit(main())
