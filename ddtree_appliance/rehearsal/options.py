"""What the command lines of the rehearsal's scripts share."""

import argparse
import sys


def positive(text: str) -> int:
    """An argument that is a whole number from 1 on. Raises argparse.ArgumentTypeError or ValueError."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return value


def say(text: str) -> None:
    """Progress, on stderr, at once."""
    print(text, file=sys.stderr, flush=True)
