"""The result page of gpu.py: tables of measurements and what they are compared with."""

from pathlib import Path
from typing import Any

from emulated import environment_line, folders, write

OVERHEAD = 0.01  # of a step beside bare torch, at the most
UTILISATION = 0.45  # of the dense bf16 peak, at the least


def publish(page: dict[str, Any], name: str, output: Path) -> None:
    """Write the page and its figures."""
    write(folders(output)[0], name, page, report(page))


def report(page: dict[str, Any]) -> str:
    """Return the whole page."""
    jobs = [page[part] for part in ("step", "kernels") if part in page]
    used = [*jobs, *page.get("transports", [])][0]
    where = "the CPU, at toy sizes"
    if page["device"] == "cuda":
        where = f"one {used['gpu']}, CUDA {used['cuda']}"
    parts = [
        f"# On {where}",
        f"{environment_line(page, used['versions'])}. By:",
        f"    {page['command']}",
    ]
    if "step" in page:
        parts.append(step(page["step"]))
    parts += [transports(found) for found in page.get("transports", [])]
    if "kernels" in page:
        parts.append(kernels(page["kernels"]))
    return "\n\n".join(parts) + "\n"


def step(found: dict[str, Any]) -> str:
    """Return the table of a training step of a world of one vs. bare torch."""
    shape, peak = found["shape"], found["peak_flops"]
    how = "compiled whole unless said" if found["compiled"] else "not compiled"
    lines = [
        "## A training step of a world of one",
        f"A GPT of {found['parameters'] / 1e6:.1f} M parameters ({shape['layers']} layers, "
        f"{shape['heads']} heads, width {shape['width']}, context {shape['context']}, vocabulary "
        f"{shape['vocab']}); bf16 autocast, {how}, fused AdamW, no clipping; a micro-batch of "
        f"{found['micro_batch']} sequences. Medians of turns of steps in a row, the ways by turns "
        "in one process. The ratio is the median over the rounds, to the bare loop's turn of the "
        f"same round; the goal is {1 + OVERHEAD:.2f} at the most.",
        f"A token takes {found['flops_per_token'] / 1e6:.0f} MFLOP forward and backward: 6 a "
        "parameter of a matrix, and 6 * layers * width * context for causal attention. "
        + (
            f"The peak is {peak / 1e12:.0f} TFLOP/s, dense bf16; the goal is "
            f"{UTILISATION:.0%} of it."
            if peak
            else "This device's peak is not known."
        ),
        "| | step, ms | tokens/s | x bare torch | model TFLOP/s | % of peak | loss of step 3 |\n"
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    table = "\n".join(row(name, way, found, peak) for name, way in found["ways"].items())
    return "\n\n".join(lines) + "\n" + table


def row(name: str, way: dict[str, Any], found: dict[str, Any], peak: float | None) -> str:
    """Return the row of one variant."""
    tokens_per_s = found["tokens"] / way["median_s"]
    flops = tokens_per_s * found["flops_per_token"]
    return (
        f"| {name} | {way['median_s'] * 1e3:.2f} | {tokens_per_s:,.0f} | {way['ratio']:.4f} | "
        f"{flops / 1e12:.3g} | {f'{flops / peak:.1%}' if peak else ''} | {way['loss']:.4f} |"
    )


def transports(found: dict[str, Any]) -> str:
    """Return the table of all-reduce by transport."""
    sizes = [copy["mib"] for copy in found["copies"]]
    limits = {copy["mib"]: copy["seconds"] for copy in found["copies"]}
    took = {(row["what"], row["mib"]): row["median_s"] for row in found["rows"]}
    lines = [
        f"## All-reduce of fp32 between {found['ranks']} ranks on "
        f"{' and '.join(sorted(set(found['places'])))}, {found['library']}",
        "Medians, milliseconds, of the slowest rank; in brackets the share of the copy limit: what "
        "all ranks at once need to copy as many bytes to the host and as many back, both ways at "
        "a time, from and to pinned memory. A transport that stays on the device may pass it.",
    ]
    head = "| MiB | " + " | ".join(map(short, sizes)) + " |\n|---|" + "--:|" * len(sizes)
    rows = [
        f"| {name} | "
        + " | ".join(
            f"{took[name, at] * 1e3:.3g} ({limits[at] / took[name, at]:.0%})" for at in sizes
        )
        + " |"
        for name in dict.fromkeys(row["what"] for row in found["rows"])
    ]
    rows.append("| copy limit | " + " | ".join(f"{limits[at] * 1e3:.3g}" for at in sizes) + " |")
    rows += [f"\n{name} was not measured: {why}" for name, why in found["absent"].items()]
    return "\n\n".join([*lines, "\n".join([head, *rows])])


def short(mib: float) -> str:
    """Return a size in MiB."""
    return f"{mib:g}"


def kernels(found: dict[str, Any]) -> str:
    """Return the table of sums by CuPy's kernel and by torch."""
    title = "## Sums of several addends by CuPy's kernel and by torch"
    if "absent" in found:
        return f"{title}\n\nNot measured: {found['absent']}"
    lines = [
        f"| sum | torch, us | {found['other']}, us | x torch's speed | same bits |",
        "|---|--:|--:|--:|---|",
    ]
    lines += [
        f"| {row['what']} | {row['torch_s'] * 1e6:.1f} | {row['cupy_s'] * 1e6:.1f} | "
        f"{row['torch_s'] / row['cupy_s']:.2f} | {'yes' if row['same'] else 'no'} |"
        for row in found["rows"]
    ]
    note = ""
    if found["other"] == "torch":
        note = "On the CPU both columns are torch's and differ by chance.\n\n"
    return f"{title}\n\n{note}" + "\n".join(lines)
