"""`python -m faser_backend.cli` is the `faser` command."""

from faser_backend.cli.main import main

if __name__ == "__main__":
    main()
