"""What the options of benchmarks may be: argparse says so in one sentence where one is not."""

import argparse
import math


def count(text: str) -> int:
    """An option's value that is a number of something."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number, 1 or more")
    return int(text)


def positive(text: str) -> float:
    """An option's value that is an amount of something."""
    try:
        number = float(text)
    except ValueError:
        number = 0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number above 0")
    return number


def layout(text: str) -> str:
    """An option's value that is the ranks of each node."""
    if not all(ranks.isdecimal() and int(ranks) for ranks in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r}: give the ranks of each node, such as 2,2")
    return text


def rate(text: str) -> str:
    """An option's value that is the rate of a link."""
    number = text.removesuffix("gbit")
    if number == text or not number.replace(".", "", 1).isdecimal() or not float(number):
        raise argparse.ArgumentTypeError(f"{text!r}: give a rate above 0 in gbit, such as 1gbit")
    return text
