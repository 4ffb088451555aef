"""`python -m quark` is the command line."""

from quark.cli import program

if __name__ == "__main__":
    program()
