import ast
from pathlib import Path

import mntrain
import zero

MOST = 8  # arguments of a constructor beside `self`


def test_constructors_have_at_most_8_arguments():
    found = {}
    for package in (mntrain, zero):
        for path in Path(package.__file__).parent.rglob("*.py"):
            for kind in ast.walk(ast.parse(path.read_text())):
                for made in kind.body if isinstance(kind, ast.ClassDef) else ():
                    if getattr(made, "name", "") == "__init__":
                        given = made.args
                        names = [*given.posonlyargs, *given.args[1:], *given.kwonlyargs]
                        found[kind.name] = len(names)
    assert len(found) > 100
    assert [name for name, number in found.items() if number > MOST] == []
