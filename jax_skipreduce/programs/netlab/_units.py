"""Rates and durations as `tc` writes them, read strictly: what is easily mistaken is refused."""

from __future__ import annotations

import re
from fractions import Fraction

_BITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9, "tbit": 10**12}
_BYTE_UNITS = {"bps": "bit", "kbps": "kbit", "mbps": "mbit", "gbps": "gbit", "tbps": "tbit"}
_MICROSECONDS = {
    **dict.fromkeys(("us", "usec", "usecs"), 1),
    **dict.fromkeys(("ms", "msec", "msecs"), 10**3),
    **dict.fromkeys(("s", "sec", "secs"), 10**6),
}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.ASCII | re.IGNORECASE)


def parse_rate(text: str, name: str = "rate") -> int:
    """Bits per second.

    >>> parse_rate("500mbit")
    500000000

    Raises:
      ValueError: `text` is no rate; names the argument as `name`.
    """
    expected = "expected a number and bit, kbit, mbit, gbit or tbit, as in 500mbit"
    number, unit = _split(text, f"{name}={text!r}: {expected}")
    if unit in _BYTE_UNITS:
        # To tc, mbps are megabytes per second; to nearly everybody else, megabits.
        right = _BYTE_UNITS[unit]
        raise ValueError(f"{name}={text!r}: tc reads {unit} as bytes per second; write {number:g}{right} for bits")
    if unit not in _BITS:
        raise ValueError(f"{name}={text!r}: {expected}")
    rate = Fraction(text.strip()[: -len(unit)].strip()) * _BITS[unit]
    if rate < 1:
        raise ValueError(f"{name}={text!r}: a link needs a rate of more than 0")
    return int(rate)


def parse_duration(text: str, name: str = "queue") -> int:
    """Microseconds.

    >>> parse_duration("100ms")
    100000

    Raises:
      ValueError: `text` is no duration; names the argument as `name`.
    """
    expected = "expected a number and us, ms or s, as in 100ms"
    _, unit = _split(text, f"{name}={text!r}: {expected}")
    if unit not in _MICROSECONDS:
        raise ValueError(f"{name}={text!r}: {expected}")
    duration = Fraction(text.strip()[: -len(unit)].strip()) * _MICROSECONDS[unit]
    if duration < 1:
        raise ValueError(f"{name}={text!r}: the shortest queue is 1us")
    return int(duration)


def format_rate(bits_per_second: int) -> str:
    """The same for `tc`, in the largest unit that takes no fraction.

    >>> format_rate(1_500_000_000)
    '1500mbit'
    """
    unit = max((unit for unit, bits in _BITS.items() if bits_per_second % bits == 0), key=_BITS.__getitem__)
    return f"{bits_per_second // _BITS[unit]}{unit}"


def _split(text: str, message: str) -> tuple[float, str]:
    match = _QUANTITY.fullmatch(text.strip())
    if match is None:
        raise ValueError(message)
    return float(match[1]), match[2].lower()
