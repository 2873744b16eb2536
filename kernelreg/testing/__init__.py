"""For authors of backends: a pytest plugin with the conformance suite.

In a test module, ``from kernelreg.testing.contract import *`` is the whole suite; then

    python -m pytest -p kernelreg.testing.plugin --backend acme [--evidence FILE.md]

runs each case of each operation on it. Right numbers and refusals with a reason pass, everything else fails.
"""
