"""Start the command line: `python -m ekiben`."""

from ekiben.cli import main

if __name__ == "__main__":
    main()
