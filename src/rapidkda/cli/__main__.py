"""`python -m rapidkda.cli`: the command line without its entry point."""

from . import main

if __name__ == "__main__":  # worker processes of `bench` import this module
    main()
