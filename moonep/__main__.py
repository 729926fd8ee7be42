"""`python -m moonep`: the same as the `moonep` command."""

from moonep.cli import main

if __name__ == "__main__":
    main()
