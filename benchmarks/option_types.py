"""Types of command-line options, with one-sentence errors."""

import argparse
import math


def count(text: str) -> int:
    """Parse a positive whole number."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number of at least 1")
    return int(text)


def positive(text: str) -> float:
    """Parse a positive finite number."""
    try:
        number = float(text)
    except ValueError:
        number = 0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number above 0")
    return number


def layout(text: str) -> str:
    """Check the number of ranks on each node: 2,2."""
    if not all(ranks.isdecimal() and int(ranks) for ranks in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r}: give the ranks of each node, such as 2,2")
    return text


def rate(text: str) -> str:
    """Check the rate of a link: 1gbit."""
    number = text.removesuffix("gbit")
    if number == text or not number.replace(".", "", 1).isdecimal() or not float(number):
        raise argparse.ArgumentTypeError(f"{text!r}: give a rate above 0 in gbit, such as 1gbit")
    return text
