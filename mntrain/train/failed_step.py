"""The end of a step that an exception has interrupted on some rank, before its update.

    failed rank     raises -> takes part in the rest of the step -.
    other ranks     forward, backward, sums over ranks -----------+-> save -> the error ends the job

By taking part, the failed rank lets the others reach the end of the step, where all learn of it.
Nothing has been updated by then, so the run can be saved as it was after the step before.
"""

import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from mntrain.checkpoint import random_states, set_random_states
from mntrain.checks.finding import naming
from mntrain.errors import AgreedError, RemoteRankError, TrainingStoppedError
from mntrain.world import World
from zero.norms import NonFiniteGradientError
from zero.step_message import StepMessage

_PATIENCE_S = 5.0  # until a failed rank prints its error, if others have not ended the step


@contextmanager
def non_finite_stops(world: World, step: int) -> Iterator[None]:
    """Raise TrainingStoppedError in place of the block's NonFiniteGradientError, on all ranks."""
    try:
        yield
    except NonFiniteGradientError as error:
        raise TrainingStoppedError(f"in step {step}, {error}", world.rank) from None


class FailedStep:
    """The exception of this rank in a step, if any, and what all ranks do about one.

    `communicating` take part in what is left of the collectives of a step's parts, in this order.
    """

    def __init__(self, world: World, *communicating: Callable[[], None]) -> None:
        self._world, self._communicating = world, communicating
        self._error: Exception | None = None
        self._states = random_states(world.device)

    @property
    def flag(self) -> float:
        """1 if this rank's step has failed."""
        return float(self._error is not None)

    def begin_step(self) -> None:
        """Remember the random generators as they are before a step. Local."""
        self._states = random_states(self._world.device)

    @contextmanager
    def caught(self, message: StepMessage) -> Iterator[None]:
        """Keep an exception of the block, and do what ends the block on all ranks. Collective.

        The message tells the others. Errors that all ranks know of are raised, and so are those
        that come later than the message: of all ranks as well, or of a hook after backward.
        """
        try:
            yield
        except (AgreedError, RemoteRankError):
            raise
        except Exception as error:
            if message.sent:
                raise
            self._error = error
            with self._told_if_late(error):
                try:
                    for finish in self._communicating:
                        finish()
                except Exception:
                    raise error from None  # communication has failed, too

    def end_job(self, step: int, save: Callable[[], None]) -> NoReturn:
        """Save, then raise the exception on the first failed rank. Collective.

        `save` is called with the random generators as they were before the step. The other ranks
        raise a RemoteRankError.
        """
        failed = [r for r, flag in enumerate(self._world.gather(self.flag)) if flag]
        if self._world.master and len(failed) > 1:
            text = f"mntrain: step {step} failed on {naming('rank', failed)}: the report is of one"
            print(text, file=sys.stderr)
        set_random_states(self._states, self._world.device)
        save()
        if self._error is not None and self._world.rank == failed[0]:
            raise self._error
        while True:
            self._world.barrier()  # which the failed rank does not reach

    @contextmanager
    def _told_if_late(self, error: Exception) -> Iterator[None]:
        """Print the error if the block takes long, since a rank that hangs may be the reason."""
        text = "".join(traceback.format_exception(error))
        line = f"mntrain: rank {self._world.rank} failed, and waits for the others to end the step:"
        timer = threading.Timer(_PATIENCE_S, print, [f"{line}\n{text}"], {"file": sys.stderr})
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
