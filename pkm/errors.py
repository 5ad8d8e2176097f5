"""The one exception for everything a user can cause, and how a program ends because of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps

from pkm.format import printable

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


class UserError(Exception):
    """What went wrong, where, and how to fix it.

    what   one sentence: the mistake, with the value found
    where  file:line, dotted key, command-line argument or path
    fix    what to do about it, as an imperative
    """

    def __init__(self, what: str, where: str | None = None, fix: str | None = None):
        self.what, self.where, self.fix = what, where, fix
        place = f"{where}: " if where else ""
        remedy = f"\n  fix: {fix}" if fix else ""
        # Names are bytes: what does not print would be an error in the middle of this one.
        super().__init__(printable(f"{place}{what}{remedy}"))


class UserErrors(UserError):
    """Several mistakes found in one pass, so that a user fixes them in one pass too."""

    def __init__(self, title: str, errors: list[UserError]):
        self.errors = errors
        super().__init__(title + "\n" + "\n".join(f"- {error}" for error in errors))


class ReportedByOtherRank(UserError):
    """The error of another rank, which says it: this one only ends with it."""


def exits_cleanly(main: Callable[[], int | None]) -> Callable[[], int]:
    """Wrap a program's main: a UserError becomes a message and exit status 2, Ctrl-C exit status 130."""

    @wraps(main)
    def program() -> int:
        try:
            return main() or 0
        except UserError as error:
            if not isinstance(error, ReportedByOtherRank):
                print(f"error: {error}", file=sys.stderr)
            return EXIT_USER_ERROR
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return EXIT_INTERRUPTED
        except BrokenPipeError:
            # The reader went away (`| head`): silence the interpreter's own complaint at exit.
            sys.stderr.close()
            return 0

    return program
