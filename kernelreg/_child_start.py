"""Run as a script in a child process: takes the import path from its arguments, then runs the module they name.

Until the path is set, nothing is imported but ``sys``, which is built in.
"""

import sys

if __name__ == "__main__":
    _, module, *sys.path = sys.argv
    del sys.argv[1:]

    from importlib import import_module

    sys.exit(import_module(module).main())
