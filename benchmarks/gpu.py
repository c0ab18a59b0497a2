"""Training on a GPU: a GPT vs. bare torch, and all-reduce by transport.

    python benchmarks/gpu.py [--quick] [--parts step transports] [--ranks 2 4]

Needs one GPU, which several ranks share; with more GPUs, each rank has its own. Writes tables
to docs/results/. Takes about 8 minutes; with `--quick` about 3.

    python benchmarks/gpu.py --device cpu --tiny

runs all of it on the CPU at toy sizes, and writes only to the folder of `--output`.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from emulated import on_ranks, report_in
from results import DOCS, HERE, facts, heading, table, write

PARTS = ("step", "transports")
MIB, QUICK_MIB, TINY_MIB = (1, 4, 16, 64, 256, 1024), (1, 16, 256), (0.25, 1)
LIMIT_S = 600  # for one job
SECONDS = {"step": (120, 30, 1), "transports": (6.0, 2.0, 0.3)}
OVERHEAD = 0.01  # of a step beside bare torch, at the most
UTILISATION = 0.45  # of the dense bf16 peak, at the least
SHARE = (
    "Medians, milliseconds, of the slowest rank; in brackets the share of the copy limit: what all "
    "ranks at once need to copy as many bytes to the host and as many back, both ways at a time, "
    "from and to pinned memory. A transport that stays on the device may pass it."
)


def main() -> int:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="toy sizes; needed with --device cpu")
    parser.add_argument("--quick", action="store_true", help="fewer sizes, fewer steps")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, metavar="PART")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="for all-reduce")
    parser.add_argument("--micro-batch", type=int, default=0, help="sequences. 0: what has room")
    parser.add_argument("--output", type=Path, metavar="DIR", help="where results/ is; docs/")
    given = parser.parse_args()
    tiny = "at toy sizes with --device cpu --tiny"
    if given.device == "cpu" and not given.tiny:
        parser.error(f"on the CPU the sizes of a GPU take hours: try the benchmark {tiny}")
    if given.device == "cuda" and not torch.cuda.device_count():
        parser.error(f"torch sees no CUDA device here: use a CUDA build of torch, or try it {tiny}")
    page: dict[str, Any] = {**facts(), "device": given.device}
    if "step" in given.parts:
        page["step"] = job("step", given)
        losses = [way["loss"] for way in page["step"]["ways"].values()]
        assert max(losses) - min(losses) < 1e-3 * max(losses), losses
    if "transports" in given.parts:
        page["transports"] = [job("transports", given, ranks) for ranks in given.ranks]
    if given.tiny and not given.output:
        print("\n".join(report(page)))
    else:
        publish(page, "gpu-figures", given.output or DOCS)
    return 0


def job(part: str, given: argparse.Namespace, ranks: int = 1) -> dict[str, Any]:
    """Run a part on ranks of this machine, and return its report."""
    start, size = time.perf_counter(), 2 if given.tiny else int(given.quick)
    words = ["--part", part, "--device", given.device, "--micro-batch", given.micro_batch]
    words += ["--seconds", SECONDS[part][size], "--mib", *(MIB, QUICK_MIB, TINY_MIB)[size]]
    words += ["--tiny"] * given.tiny
    with tempfile.TemporaryDirectory() as cache:
        command = [HERE / "ranks" / "gpu.py", *words]
        found = report_in(on_ranks(ranks, command, {"XDG_CACHE_HOME": cache}, LIMIT_S))
    print(f"{part} on {ranks}: {time.perf_counter() - start:.1f} s", file=sys.stderr)
    return found


def publish(page: dict[str, Any], name: str, output: Path) -> None:
    """Write the page."""
    write(output, name, report(page))


def report(page: dict[str, Any]) -> list[str]:
    """Return the page as Markdown."""
    used = page["step"] if "step" in page else page["transports"][0]
    on_gpu = page["device"] == "cuda"
    where = f"one {used['gpu']}, CUDA {used['cuda']}" if on_gpu else "the CPU, at toy sizes"
    lines = heading(page, f"On {where}", used["versions"], "")
    if "step" in page:
        lines += [*step(page["step"]), ""]
    for found in page.get("transports", []):
        lines += [*transports(found), ""]
    return lines


def step(found: dict[str, Any]) -> list[str]:
    """Return the section about a training step."""
    shape, peak = found["shape"], found["peak_flops"]
    known = "The peak of this device is not known."
    if peak:
        known = f"The peak is {peak / 1e12:.0f} TFLOP/s, dense bf16; the goal is {UTILISATION:.0%}."
    rows = []
    for name, way in found["ways"].items():
        flops = found["tokens"] / way["median_s"] * found["flops_per_token"]
        cells = [f"{way['median_s'] * 1e3:.2f}", f"{found['tokens'] / way['median_s']:,.0f}"]
        cells += [f"{way['ratio']:.4f}", f"{flops / 1e12:.3g}"]
        rows.append([name, *cells, f"{flops / peak:.1%}" if peak else "", f"{way['loss']:.4f}"])
    head = ["", "step, ms", "tokens/s", "x bare torch", "model TFLOP/s", "% of peak"]
    return [
        "## A training step of a world of one",
        "",
        f"A GPT of {found['parameters'] / 1e6:.1f} M parameters ({shape['layers']} layers, "
        f"{shape['heads']} heads, width {shape['width']}, context {shape['context']}, vocabulary "
        f"{shape['vocab']}); bf16 autocast, "
        f"{'compiled whole unless said' if found['compiled'] else 'not compiled'}, fused AdamW, no "
        f"clipping; a micro-batch of {found['micro_batch']} sequences. Medians of turns of steps "
        "in a row, the ways by turns in one process. The ratio is the median over the rounds, to "
        f"the bare loop's turn of the same round; the goal is {1 + OVERHEAD:.2f} at the most. A "
        f"token takes {found['flops_per_token'] / 1e6:.0f} MFLOP forward and backward: 6 a "
        "parameter of a matrix, and 6 * layers * width * context for causal attention. " + known,
        "",
        *table([*head, "loss of step 3"], rows),
    ]


def transports(found: dict[str, Any]) -> list[str]:
    """Return the section about all-reduce by transport."""
    limits = {copy["mib"]: copy["seconds"] for copy in found["copies"]}
    took = {(row["what"], row["mib"]): row["median_s"] for row in found["rows"]}
    rows = [
        [
            name,
            *(f"{took[name, at] * 1e3:.3g} ({limits[at] / took[name, at]:.0%})" for at in limits),
        ]
        for name in dict.fromkeys(name for name, _ in took)
    ]
    rows.append(["copy limit", *(f"{seconds * 1e3:.3g}" for seconds in limits.values())])
    places = " and ".join(sorted(set(found["places"])))
    title = f"All-reduce of fp32 between {found['ranks']} ranks on {places}, {found['library']}"
    lines = [f"## {title}", "", SHARE, "", *table(["MiB", *(f"{at:g}" for at in limits)], rows)]
    for name, why in found["absent"].items():
        lines += ["", f"{name} was not measured: {why}"]
    return lines


if __name__ == "__main__":
    sys.exit(main())
