"""`python -m echelon` is `echelon`."""

from __future__ import annotations

import signal

from echelon.cli.common import _end

# --- interrupt ---


def main() -> None:
    """`echelon`. This module is quickly imported: Ctrl-C is looked after from then on."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is to be ignored
        signal.signal(signal.SIGINT, _end)  # nothing has begun: there is nothing to clean up
    from echelon.cli.main import main

    try:
        main()
    finally:  # what was to be done is done, or it has been said why not
        signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    main()
