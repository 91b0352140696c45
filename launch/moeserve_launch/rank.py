"""One rank of an engine, from torchrun's environment to the end of its loop.

The first rank also sees to it that there is a frontend, unless a supervisor already did.
"""

import ctypes
import os
import signal
import socket
import sys

from moeserve.config import Config
from moeserve.parallel import PeerLostError
from moeserve_launch.compose import run_engine_rank
from moeserve_launch.errors import USER_ERRORS, record_user_error, tell
from moeserve_launch.frontend import FrontendProcess
from moeserve_launch.logs import configure_logging
from moeserve_launch.preflight import ServableModel, check_model, check_ports
from moeserve_launch.topology import RankEnvironment, set_single_host_network

_PR_SET_PDEATHSIG = 1


def run_rank(config: Config, place: RankEnvironment) -> int:
    """Serve as one rank; returns the exit code. A user's mistake is one line, told once."""
    _end_with_parent()
    configure_logging(f"rank {place.rank}")
    if place.is_single_host:
        set_single_host_network(os.environ)
    try:
        model = check_model(config)
        if place.rank == 0 and not place.frontend_is_running:
            _ensure_frontend(config, model, place)
        run_engine_rank(config, model, place)
    except USER_ERRORS as error:
        record_user_error(error)
        if place.rank == 0 and not place.frontend_is_running:
            tell(error)
        return 1
    except PeerLostError:
        print(f"moeserve: rank {place.rank} lost another rank", file=sys.stderr, flush=True)
        return 1
    return 0


def _end_with_parent() -> None:
    """No rank outlives its agent, however that one ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _ensure_frontend(config: Config, model: ServableModel, place: RankEnvironment) -> None:
    """Under a bare torchrun, rank 0 starts the frontend; it belongs to the agent, so it outlives a restart of ranks."""
    if place.restart_count > 0 and _is_listening(config.server.replica_port):
        return
    check_ports(config.server)
    FrontendProcess.start(config, model, owner_pid=os.getppid(), replica_bind_host=place.replica_bind_host)


def _is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
