"""The stack of a thread that waits, goes on or has ended."""

import os
import resource
import threading

from mntrain.recorder.stacks import stack_of


def wait(event):
    event.wait()


def test_a_stack_has_the_files_lines_and_functions_of_the_thread_from_the_innermost(tmp_path):
    event, entered = threading.Event(), threading.Event()
    path = tmp_path / "größe.py"
    path.write_text("def outer(f, event):\n    f(event)\n")
    names = {}
    exec(compile(path.read_text(), str(path), "exec"), names)

    def run():
        entered.set()
        names["outer"](wait, event)

    thread = threading.Thread(target=run)
    thread.start()
    entered.wait()
    while not (own := [frame for frame in stack_of(thread.ident) if frame[0] == str(path)]):
        pass
    found = stack_of(thread.ident)
    assert own == [(str(path), 2, "outer")]
    place = found.index(own[0])
    assert found[place - 1] == (__file__, wait.__code__.co_firstlineno + 1, "wait")
    assert found[place + 1][2] == "run"
    event.set()
    thread.join()
    assert stack_of(thread.ident) == []


def test_the_stack_of_a_thread_that_goes_on_is_one_of_its_moments():
    ended = threading.Event()

    def inner(n):
        return n if n == 0 or ended.is_set() else inner(n - 1)

    def train():
        while not ended.is_set():
            inner(40)

    thread = threading.Thread(target=train)
    thread.start()
    for _ in range(100):
        names = [name for _, _, name in stack_of(thread.ident)]
        calls = [name for name in names if name in ("inner", "train")]
        assert calls in [["inner"] * n + ["train"] for n in range(42)]
    ended.set()
    thread.join()


def test_no_stack_is_known_while_no_file_descriptor_is_free():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        found = stack_of(threading.get_ident())
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert found == []
    assert stack_of(threading.get_ident())
