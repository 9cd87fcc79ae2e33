"""Start the command line: `python -m ekiben`."""

import os
import sys

if __name__ == "__main__":
    # Python looks for modules in the working folder first. That may be a recipe from elsewhere, with a yaml.py.
    if not sys.flags.safe_path and sys.path[0] != os.path.dirname(os.path.dirname(os.path.abspath(__file__))):
        del sys.path[0]
    from ekiben.cli import main

    main()
