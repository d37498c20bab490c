"""One error type for everything an operator can put right, and the exit codes of the command line."""

import sys

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_HOST = 3
EXIT_INTERRUPTED = 130


class ApplianceError(Exception):
    """Something failed in a way that the operator can act on.

    `message` says what is wrong, with the offending value and where it stands; `hint` says what to do.
    """

    exit_code = EXIT_FAILED

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(ApplianceError):
    """The command line or a configuration is wrong."""

    exit_code = EXIT_USAGE


class HostError(ApplianceError):
    """The machine lacks something that the command needs."""

    exit_code = EXIT_HOST


class PatchError(ApplianceError):
    """The patch series, the wheel or the installed engine is not what the manifest says."""


def report(error: ApplianceError) -> int:
    """Say on stderr what is wrong and what to do; return the exit code."""
    print(f"error: {error}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)
    return error.exit_code
