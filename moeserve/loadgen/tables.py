"""Tables in Markdown, which read as well on a terminal."""

from collections.abc import Sequence

Cell = str | int | float | None


def table(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> list[str]:
    """Lines of a table, its columns padded; numbers to the right, fractions with three figures, None as a dash."""
    texts = [list(header), *([_text(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in texts) for column in range(len(header))]
    is_number = [
        any(isinstance(row[column], float | int) for row in rows)
        and not any(isinstance(row[column], str) for row in rows)
        for column in range(len(header))
    ]
    rule = [
        "-" * max(2, width - 1) + ":" if right else "-" * max(3, width)
        for width, right in zip(widths, is_number, strict=True)
    ]
    return [_line(row, widths, is_number) for row in (texts[0], rule, *texts[1:])]


def _line(row: Sequence[str], widths: Sequence[int], is_number: Sequence[bool]) -> str:
    cells = [
        cell.rjust(width) if right else cell.ljust(width)
        for cell, width, right in zip(row, widths, is_number, strict=True)
    ]
    return f"| {' | '.join(cells)} |"


def _text(cell: Cell) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, str):
        return cell
    if isinstance(cell, int):
        return f"{cell:,}"
    if abs(cell) >= 100:
        return f"{cell:,.0f}"
    return f"{cell:.1f}" if abs(cell) >= 10 else f"{cell:.2f}"
