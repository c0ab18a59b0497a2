"""Ways to train over slow links: the options of each, and the variant of step.py that times it."""

from typing import NamedTuple

EVERY = 20  # steps between exchanges in ranks/variants.py
WARM_UP = 100  # synchronous steps at the start of modes that exchange rarely
RARELY = f"--sync.mode {{}} --sync.every {{}} --sync.warmup {WARM_UP}"
SYNCHRONOUS = "every step, fp32"
DENSE = "SparseLoCo (1/16)"  # of each 4,096 changes, 256 are sent


class Mode(NamedTuple):
    """A way to train."""

    options: str  # of `python -m mntrain`, or of ranks/peer_losses.py
    variant: str = ""  # of step.py; "": not timed
    peer: bool = False
    warmup: int = 0  # synchronous steps in fp32 at the start
    every: int = 1  # steps after which exchanges repeat


def _timed(name: str) -> str:
    return f"mntrain stage 0, {name}"


def _rare(mode: str, every: int, more: str = "", *, timed: str = "") -> Mode:
    options = f"{RARELY.format(mode, every)} {more}".strip()
    variant = _timed(f"{timed} every {every}") if timed else ""
    return Mode(options, variant, warmup=WARM_UP, every=every)


def _peer(name: str, variant: str, more: str = "", warmup: int = 0) -> Mode:
    return Mode(f'--peer "{name}" {more}'.strip(), variant, peer=True, warmup=warmup)


_WARM = f"--warmup {WARM_UP}"
MODES = {
    SYNCHRONOUS: Mode("", "mntrain stage 0"),
    "bf16": Mode("--comm.wire-dtype bf16", _timed("bf16 wire")),
    "int8": Mode("--comm.compress int8", _timed("int8")),
    "local SGD, every 20": _rare("local-sgd", 20, timed="local SGD"),
    "DiLoCo, every 20": _rare("diloco", 20, timed="DiLoCo"),
    "SparseLoCo, every 10": _rare("sparseloco", 10),
    "SparseLoCo, every 30": _rare("sparseloco", 30),
    "SparseLoCo, every 5, 1/16": _rare("sparseloco", 5, "--sync.density 0.0625", timed=DENSE),
    "DDP, bf16 hook": _peer("DDP, bf16 hook", "DDP, bf16 hook"),
    "DDP, PowerSGD hook (rank 4)": _peer(
        "DDP, PowerSGD hook", "DDP, PowerSGD hook", _WARM, WARM_UP
    ),
    "PostLocalSGD, every 20": _peer(
        "PostLocalSGD", f"PostLocalSGD every {EVERY}", f"{_WARM} --every 20", WARM_UP
    ),
    "torchft DiLoCo, every 20": _peer("torchft DiLoCo", "", f"{_WARM} --every 20", WARM_UP),
}
