"""`python -m echelon` is `echelon`."""

from echelon.cli.interrupt import main

if __name__ == "__main__":
    main()
