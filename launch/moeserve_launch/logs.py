"""Where log lines of a process go: standard error, our own from INFO on, with the process's role in front."""

import logging


def configure_logging(role: str) -> None:
    """Once, at the start of a process; `role` is what an operator calls it, such as `rank 3` or `frontend`."""
    logging.basicConfig(
        level=logging.WARNING, format=f"%(asctime)s {role} %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S"
    )
    for package in ("moeserve", "moeserve_kernels", "moeserve_launch"):
        logging.getLogger(package).setLevel(logging.INFO)
