"""`python -m echelon` is `echelon`."""

from echelon.cli.main import main

main()
