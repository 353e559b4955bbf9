"""`python -m esper` is the command line."""

from esper.cli import main

if __name__ == "__main__":
    main()
