"""The entry point of the command `echelon` and of `python -m echelon`."""

from __future__ import annotations

import signal

from echelon.cli.common import exit_interrupted


def main() -> None:
    """Handle Ctrl-C, then import and run the command line.

    This module imports almost nothing, so that Ctrl-C is handled while the rest is imported.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not if SIGINT is ignored
        signal.signal(signal.SIGINT, exit_interrupted)  # nothing has begun, nothing to clean up
    from echelon.cli.main import main

    try:
        main()
    finally:  # the command has ended and reported its result: a late Ctrl-C changes nothing
        signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    main()
