"""text_table(): one row per gradient, as `describe` and `choose_protected` print it."""

from __future__ import annotations

from collections.abc import Sequence


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], num_left: int) -> str:
    """A table with a rule under the header and another one above the last row, which holds the totals.

    Args:
      header: names of the columns.
      rows: cells, as many per row as `header` has. At least one row.
      num_left: the number of columns, from the first on, that are set to the left. Other columns are set to the right.

    Returns:
      Lines without trailing spaces, joined by newlines.

    Example:
      >>> print(text_table(("gradient", "elements"), [("conv", "40"), ("total", "1,000")], num_left=1))
      gradient  elements
      ------------------
      conv            40
      ------------------
      total        1,000
    """
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if column < num_left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (header, *rows)
    ]
    rule = "-" * max(map(len, lines))
    return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1]])
