"""The front door: `python -m moeserve`, the `moeserve` script and `torchrun ... -m moeserve` are one program."""

import sys

from moeserve_launch.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
