"""`python -m quark` is the command line."""

from quark.cli import main

if __name__ == "__main__":
    main()
