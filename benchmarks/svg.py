"""Pictures as SVG, on a ground of their own, so that they are seen on light and on dark pages."""

from collections.abc import Collection, Mapping, Sequence
from html import escape

INK, FAINT, RULE = "#0f172a", "#475569", "#cbd5e1"
# This project's in blues, what it adds to in amber, others in greys and earth.
OURS = ("#2563eb", "#0891b2", "#7c3aed", "#60a5fa", "#1e3a8a", "#db2777")
OTHERS = ("#94a3b8", "#a16207", "#64748b", "#15803d", "#b91c1c", "#475569")
ALONE = "#d97706"

Points = Sequence[tuple[float, float]]


def document(width: int, height: int, label: str, parts: Sequence[str]) -> str:
    """A whole picture; `label` says what it shows."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="system-ui, sans-serif" role="img" aria-label="{escape(label)}">'
        f'<rect x="1" y="1" width="{width - 2}" height="{height - 2}" rx="8" fill="#ffffff" '
        f'stroke="{RULE}" stroke-width="1.5"/>\n' + "\n".join(parts) + "</svg>\n"
    )


def text(
    x: float,
    y: float,
    words: str,
    *,
    size: int = 12,
    weight: str = "normal",
    color: str = INK,
    anchor: str = "start",
) -> str:
    """Words, from x on or up to it."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" '
        f'text-anchor="{anchor}" fill="{color}">{escape(words)}</text>'
    )


def bar(x: float, y: float, width: float, color: str) -> str:
    """A bar of 16 units' height."""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="16" rx="3" fill="{color}"/>'


def line(x1: float, y1: float, x2: float, y2: float, *, color: str = RULE, dash: str = "") -> str:
    """A straight line."""
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}" '
        f'stroke-width="1.5"{dashed}/>'
    )


def curves(
    title: str,
    lines: Mapping[str, Points],
    *,
    colors: Mapping[str, str],
    x_marks: Mapping[str, float],
    y_marks: Mapping[str, float],
    mark: float | None = None,
    dashed: Collection[str] = (),
) -> str:
    """Lines over two axes, with their names at the right, in the order in which they end.

    Marks are what an axis is labelled with: words to numbers, of which the first and the last are
    its ends. `mark`: where a line goes across; `dashed`: names of lines that are.
    ValueError where there is nothing to draw.
    """
    if not any(lines.values()):
        raise ValueError("no line has a point")
    width, left, right, top, bottom = 860, 70, 560, 60, 340
    (low_x, *_, high_x), (low_y, *_, high_y) = [
        (found[0], *found) for found in (list(x_marks.values()), list(y_marks.values()))
    ]

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            left + (right - left) * (x - low_x) / ((high_x - low_x) or 1),
            bottom - (bottom - top) * (y - low_y) / ((high_y - low_y) or 1),
        )

    parts = [text(30, 34, title, size=14, weight="bold")]
    for words, value in y_marks.items():
        y = at(low_x, value)[1]
        parts += [line(left, y, right, y), text(left - 8, y + 4, words, color=FAINT, anchor="end")]
    for words, value in x_marks.items():
        x = at(value, low_y)[0]
        parts.append(text(x, bottom + 20, words, color=FAINT, anchor="middle"))
    if mark is not None:
        y = at(low_x, mark)[1]
        parts.append(line(left, y, right, y, color=INK, dash="4 3"))
    drawn = {name: [at(*point) for point in points] for name, points in lines.items() if points}
    for name, points in drawn.items():
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dash = ' stroke-dasharray="5 3"' if name in dashed else ""
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colors[name]}" '
            f'stroke-width="2"{dash}/>'
        )
        if len(points) <= 12:
            parts += [
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colors[name]}"/>'
                for x, y in points
            ]
    order = sorted(drawn, key=lambda name: drawn[name][-1][1])
    heights = apart([drawn[name][-1][1] for name in order], bottom)
    for name, floor in zip(order, heights, strict=True):
        end_x, end_y = drawn[name][-1]
        parts.append(line(end_x + 4, end_y, right + 16, floor, color=colors[name]))
        parts.append(text(right + 20, floor + 4, name))
    return document(width, bottom + 40, title, parts)


def apart(heights: Sequence[float], bottom: float) -> list[float]:
    """Ascending heights, moved as little as lets a line of text stand at each, above the bottom."""
    found: list[float] = []
    for height in heights:
        found.append(max(height, found[-1] + 16) if found else height)
    for index in reversed(range(len(found))):
        bottom = found[index] = min(found[index], bottom)
        bottom -= 16
    return found


def shades(names: Sequence[str]) -> dict[str, str]:
    """A color for each: blues for this project's, amber for computing alone."""
    counts = {"ours": 0, "others": 0}
    found = {}
    for name in names:
        if name.startswith("computing"):
            found[name] = ALONE
            continue
        kind, palette = ("ours", OURS) if name.startswith("mntrain") else ("others", OTHERS)
        found[name] = palette[counts[kind] % len(palette)]
        counts[kind] += 1
    return found
