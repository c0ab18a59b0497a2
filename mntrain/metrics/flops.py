"""Model FLOP/s, as a share of what the job's GPUs could compute.

Utilisation is the model's FLOP/s over the peak. Recomputation (activations again, in backward) does
not count. Source: PaLM, appendix B (Chowdhery et al., 2022, arXiv 2204.02311).
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from mntrain.metrics import units

# Peak dense TFLOP/s by torch's name of the GPU: bf16 and fp16 matrices summed in fp32, then fp32
# without TF32, which is torch's default; None where the GPU has no such unit. From NVIDIA's data
# sheets (halved where they state figures with sparsity) and, for the RTX 4090, its white paper.
_PEAKS: dict[str, tuple[float | None, float, float]] = {
    r"(NVIDIA )?A100-.*|(NVIDIA )?A100 .*PCIe": (312, 312, 19.5),
    r"NVIDIA H100 PCIe": (756, 756, 51),
    r"NVIDIA H100 NVL": (835, 835, 60),
    r"NVIDIA H100( \d+GB HBM[23]e?)?": (989, 989, 67),
    r"NVIDIA H200 NVL": (836, 836, 60),
    r"NVIDIA (H200|GH200 .*)": (989, 989, 67),
    r"NVIDIA B200": (2250, 2250, 75),
    r"NVIDIA L40S": (362, 362, 91.6),
    r"NVIDIA A10G": (70, 70, 35),
    r"Tesla V100-SXM2-.*": (None, 125, 15.7),
    r"Tesla V100-PCIE-.*": (None, 112, 14),
    r"NVIDIA GeForce RTX 4090": (165.2, 165.2, 82.6),
}

COMPUTE_DTYPES = {"fp32": "fp32", "bf16": "bf16", "bf16-pure": "bf16", "fp16": "fp16"}
"""The dtype in which matrices are multiplied, by name of --train.precision."""


def peak(model: str, dtype: str) -> float | None:
    """Return the peak dense FLOP/s of a GPU in "fp32", "bf16" or "fp16"; None if unknown.

    `model` is torch's name of the GPU. The peak of a part of a GPU (MIG) is unknown.
    """
    for pattern, (bf16, fp16, fp32) in _PEAKS.items():
        if re.fullmatch(pattern, model) and "MIG" not in model:
            tera = {"bf16": bf16, "fp16": fp16, "fp32": fp32}[dtype]
            return None if tera is None else tera * 1e12
    return None


def peak_of_job(gpus: Iterable[tuple[str, str]], dtype: str) -> float | None:
    """Return the sum of the peaks of a job's GPUs; None on CPUs or if any is unknown.

    `gpus` has (UUID, model) by rank. A GPU that several ranks share counts once.
    """
    peaks = [peak(model, dtype) for _, model in set(gpus)]
    known = [flops for flops in peaks if flops is not None]
    return sum(known) if known and len(known) == len(peaks) else None


def describe_utilisation(summary: Mapping[str, Any]) -> str:
    """Return a summary's model FLOP/s, and their share of the peak if it is known, as a text."""
    text = units.count(summary["model_flops_per_s"])
    number, prefix = (text[:-1], text[-1]) if text[-1].isalpha() else (text, "")
    flops = f"{number} {prefix}FLOP/s of the model"
    if summary["utilisation"] is None:
        return flops
    return f"{flops}, {summary['utilisation']:.0%} of the dense {summary['computes_in']} peak"
