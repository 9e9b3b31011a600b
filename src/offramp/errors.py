"""The one error class for everything that a user can fix.

It carries what was asked, what was given and how to fix it, so that the command line can print it without a traceback.
"""

from __future__ import annotations


class OfframpError(Exception):
    """Something that a user can fix. Other exceptions are bugs in Offramp and keep their ordinary classes."""

    def __init__(self, asked: str, given: str, fix: str) -> None:
        super().__init__(asked, given, fix)  # all three in args: the error survives pickling between processes
        self.asked = asked
        self.given = given
        self.fix = fix

    def __str__(self) -> str:
        return f"asked: {self.asked}\ngiven: {self.given}\nfix:   {self.fix}"


def missing_package(extra: str, package: str) -> OfframpError:
    """Return the error for an optional dependency that is not installed, with the command that installs it."""
    return OfframpError(
        asked=f"something that needs the package {package!r}",
        given=f"{package!r} is not installed (it belongs to the optional extra {extra!r})",
        fix=install_command(extra),
    )


def install_command(extra: str) -> str:
    """Return how an optional extra is installed, from the package index or in a clone."""
    return f"pip install 'offramp[{extra}]' (in a clone of Offramp: pip install -e '.[{extra}]')"
