"""Rounds of rates to a table of ratios with their spread."""

from collections.abc import Sequence
from statistics import median


def ratio(rates: Sequence[float], base: Sequence[float]) -> str:
    """Median of the rounds' ratios, and the smallest and largest: `0.61 (0.58–0.64)`.

    Each round is compared with its own base: what slows the machine for a while slows both.
    """
    ratios = [rate / other for rate, other in zip(rates, base, strict=True)]
    return f"{median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, padded so that it reads well in a terminal too."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| "
        + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        + " |"
        for line in lines
    )
