"""The result of a check."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from mntrain.alike.naming import first_names

Status = Literal["pass", "warn", "fail"]
ORDER: tuple[Status, ...] = ("pass", "warn", "fail")  # from the best to the worst


@dataclass(frozen=True)
class Finding:
    """One sentence about the job or a host, and the fix; a finding that passes needs none.

    With `warn`, the job is slower or at risk; with `fail`, it would end, hang or be wrong.
    """

    status: Status
    text: str
    fix: str = ""

    def __str__(self) -> str:
        """Return the sentence and the fix in one line."""
        return f"{self.text}. Fix: {self.fix}" if self.fix else self.text


def passed(text: str) -> Finding:
    """Return a finding that passes."""
    return Finding("pass", text)


def worst(findings: list[Finding]) -> Status:
    """Return the worst status of some findings; pass if there are none."""
    return max((finding.status for finding in findings), key=ORDER.index, default="pass")


def merge(findings: Iterable[tuple[str, Finding]]) -> Finding:
    """Return the worst of one check's findings, by host; it names the hosts unless it is of all.

    Where hosts differ in the text alone, the first counts.
    """
    by_host = list(findings)
    bad = max(by_host, key=lambda item: ORDER.index(item[1].status))[1]
    hosts = {host: None for host, found in by_host if found.status == bad.status}
    if bad.status == "pass" or len(hosts) == len(dict(by_host)):
        return bad
    return Finding(bad.status, f"{first_names(list(hosts), 4)}: {bad.text}", bad.fix)


def print_warnings(findings: Iterable[Finding]) -> None:
    """Print those that warn on stderr, one line each."""
    for finding in findings:
        if finding.status == "warn":
            print(f"mntrain: warning: {finding}", file=sys.stderr)
