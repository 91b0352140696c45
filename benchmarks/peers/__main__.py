"""`python -m benchmarks.peers`, from the repository's root: the same as `python benchmarks/bench_peers.py`."""

import sys

from benchmarks.bench_peers import main

sys.exit(main())
