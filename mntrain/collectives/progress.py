"""The communication thread: tasks run in the order in which they were handed in, one at a time."""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class Ticket(Generic[T]):
    """The result of a task, some day."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._result: T | None = None
        self._error: BaseException | None = None

    def settle(self, task: Callable[[], T]) -> None:
        """Run the task and keep what it returned or raised. On the communication thread."""
        try:
            self._result = task()
        except BaseException as error:  # whatever it is, the waiting thread raises it
            self._error = error
        self._event.set()

    def wait(self) -> T:
        """Block until the task has run; return what it returned, or raise what it raised."""
        self._event.wait()
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]  # T may itself be None


class Progress:
    """One thread that makes all MPI calls of a world, so that training never stops to poll.

    Tasks run in the order of `submit`: on every rank the same order, as collectives need. Idle, the
    thread sleeps.
    """

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="mntrain communication", daemon=True)
        self._thread.start()

    def submit(self, task: Callable[[], T]) -> Ticket[T]:
        """Queue a task. Returns at once. RuntimeError after `close`."""
        if not self._thread.is_alive():
            raise RuntimeError("this world is closed: no communication after its `with` block")
        ticket: Ticket[T] = Ticket()
        self._tasks.put(lambda: ticket.settle(task))
        return ticket

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        self._tasks.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
