"""Numbers as people read them: a few digits and a unit."""

from collections.abc import Sequence


def number(value: float | None) -> str:
    """A loss: 2.4312, 1.2e-05, nan; - for none."""
    if value is None:
        return "-"
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e5 or value == 0 else f"{value:.3e}"


def count(value: float) -> str:
    """A number in thousands: 812, 12.3k, 1.20M."""
    return _scaled(value, 1000, ("", "k", "M", "G", "T", "P"))


def size(value: float) -> str:
    """Bytes in powers of 1024: 512 B, 1.50 GiB."""
    return _scaled(value, 1024, (" B", " KiB", " MiB", " GiB", " TiB", " PiB"))


def _scaled(value: float, base: int, units: Sequence[str]) -> str:
    """Three digits and a unit; whole numbers below the first unit stay whole."""
    power = 0
    while abs(value) >= 999.5 and power < len(units) - 1:
        value, power = value / base, power + 1
    whole = isinstance(value, int) or abs(value) >= 99.95
    return f"{value:.{0 if whole else 1 if abs(value) >= 9.995 else 2}f}{units[power]}"


def short_time(seconds: float) -> str:
    """Format a time below a minute: 21.3 us, 12.3 ms, 0.42 s."""
    if seconds >= 0.0995:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e6:.3g} us" if seconds < 0.9995e-3 else f"{seconds * 1e3:.3g} ms"


def clock(seconds: float) -> str:
    """Hours, if any, minutes and seconds: 1:07, 12:01:07."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
