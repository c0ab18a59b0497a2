"""Keep torch.compile out of what torch calls of a process group.

Compiled code calls a group through C++, as DDP does within forward to agree on its buckets. Dynamo
would trace the frames of Python that are called there, and refuses a process group's attributes.
"""

from contextlib import suppress
from inspect import isfunction, unwrap
from typing import TypeVar

T = TypeVar("T")


def untraced(cls: type[T]) -> type[T]:
    """Let Dynamo run the methods of a class, and what they call, as they are. Does not import it.

    Does nothing in a torch that cannot be told so.
    """
    with suppress(ImportError):
        from torch._C._dynamo.eval_frame import (  # noqa: PLC0415 - not in every torch
            _FrameAction,
            _FrameExecStrategy,
            set_code_exec_strategy,
        )

        skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
        for method in filter(isfunction, vars(cls).values()):
            for function in (method, unwrap(method)):
                set_code_exec_strategy(function.__code__, skip)
    return cls
