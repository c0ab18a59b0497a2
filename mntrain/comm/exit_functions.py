"""Exit functions of extension modules, which forked children leave out. CPython."""

import ctypes
import os
from pathlib import Path
from typing import ClassVar

_EXIT_FUNCTIONS = 32  # that Py_AtExit takes at most
_libc = ctypes.CDLL(None, use_errno=True)


class _Place(ctypes.Structure):
    """Dl_info of dladdr(3): the library in which an address lies."""

    _fields_: ClassVar = [
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("symbol_address", ctypes.c_void_p),
    ]


def leave_end_to_parent(module_file: str) -> None:
    """Let later children skip what an extension module does at the interpreter's end. Local.

    Py_AtExit takes no function back, and mpi4py reads no option after its import. So in a child a
    function without effect takes the place of the module's in the interpreter's table, which is
    found by that function. An interpreter without such a table is left as it is.
    """
    without_effect = ctypes.cast(_libc.getppid, ctypes.c_void_p).value or 0
    ctypes.pythonapi.Py_AtExit(ctypes.c_void_p(without_effect))
    try:
        runtime = ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, "_PyRuntime"))
        end = _end_of_mapping(runtime)
    except (ValueError, OSError, StopIteration):  # no CPython, or no Linux
        return
    count = (end - runtime) // ctypes.sizeof(ctypes.c_size_t)
    words = (ctypes.c_size_t * count).from_address(runtime)
    own = next((index for index, word in enumerate(words) if word == without_effect), 0)
    place = _Place()
    replaced = [
        index
        for index in range(max(0, own - _EXIT_FUNCTIONS), own)
        if _libc.dladdr(ctypes.c_void_p(words[index]), ctypes.byref(place))
        and place.file == os.fsencode(module_file)
    ]

    def replace() -> None:
        for index in replaced:
            words[index] = without_effect

    os.register_at_fork(after_in_child=replace)


def _end_of_mapping(address: int) -> int:
    """Return where the mapping of this process ends in which an address lies."""
    with Path("/proc/self/maps").open() as lines:
        spans = ([int(word, 16) for word in line.split()[0].split("-")] for line in lines)
        return next(high for low, high in spans if low <= address < high)
