"""How much of what its GPUs could compute a model uses.

Utilisation is the model's FLOP/s over the peak. What is computed twice (activations again, in
backward) does not count: the source is PaLM, appendix B (Chowdhery et al., 2022, arXiv 2204.02311).
"""

import re
from collections import deque
from collections.abc import Iterable
from statistics import median

# Peak dense TFLOP/s, without sparsity, by torch's name of the GPU: (bf16, fp16) of matrices summed
# in fp32, and fp32 without TF32, which torch does not use unless asked to. None: it has no such
# unit. As NVIDIA's data sheets state them, which where they give figures with sparsity give twice
# these; RTX 4090: NVIDIA's white paper on Ada.
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

COMPUTES_IN = {"fp32": "fp32", "bf16": "bf16", "bf16-pure": "bf16", "fp16": "fp16"}
"""By name of --train.precision, the dtype that matrices are multiplied in."""


def peak(model: str, dtype: str) -> float | None:
    """Peak dense FLOP/s of a GPU by torch's name of it, in fp32, bf16 or fp16; None: unknown.

    A part of a GPU (MIG) is unknown.
    """
    for pattern, (bf16, fp16, fp32) in _PEAKS.items():
        if re.fullmatch(pattern, model) and "MIG" not in model:
            tera = {"bf16": bf16, "fp16": fp16, "fp32": fp32}[dtype]
            return None if tera is None else tera * 1e12
    return None


def peak_of_all(gpus: Iterable[tuple[str, str]], dtype: str) -> float | None:
    """The same for all of a job: pairs (UUID, model) by rank. A shared GPU counts once.

    None where any is unknown, and on the CPU, which has neither.
    """
    peaks = [peak(model, dtype) for _, model in set(gpus)]
    known = [one for one in peaks if one is not None]
    return sum(known) if known and len(known) == len(peaks) else None


class Throughput:
    """How many items a second the steps train on, without what only begins or interrupts them.

    The median over the last 1000 steps, the first ones left out: they compile, and fill caches.
    """

    FIRST = 3

    def __init__(self) -> None:
        self._steps = 0
        self._recent: deque[float] = deque(maxlen=1000)

    def add(self, items: int, seconds: float) -> None:
        """Count a step."""
        self._steps += 1
        if self._steps == self.FIRST + 1:
            self._recent.clear()
        self._recent.append(items / seconds)

    @property
    def median(self) -> float:
        """Items a second, 0 before the first step."""
        return median(self._recent) if self._recent else 0.0
