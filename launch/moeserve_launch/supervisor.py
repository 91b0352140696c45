"""`moeserve serve` on one host: checks, frontend, and torchrun's agent around the ranks, in one process tree.

The supervisor outlives its ranks. When one of them dies the agent ends the others and the supervisor starts all of them
again; the frontend, which keeps the clients' connections and the journal, stays. A mistake of the user (a
`user_error` in the rank's error file) or a failure before the first time the server was ready ends everything at once.
"""

import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence

from moeserve.config import Config
from moeserve_launch.errors import USER_ERRORS, describe_failure, is_user_error, tell
from moeserve_launch.frontend import FrontendProcess
from moeserve_launch.preflight import check_model, check_ports
from moeserve_launch.topology import (
    FRONTEND_IS_RUNNING,
    set_single_host_network,
    set_thread_environment,
    threads_per_rank,
)

_SHUTDOWN_TIMEOUT_S = 5


class Supervisor:
    """Owner of the frontend process and of the ranks."""

    def __init__(self, config: Config, serve_argv: Sequence[str]) -> None:
        """`serve_argv`: the command line behind `moeserve`, which every rank reads again."""
        self._config = config
        self._serve_argv = list(serve_argv)
        self._stopping = threading.Event()

    def run(self) -> int:
        """Serve until told to stop; returns the exit code."""
        try:
            model = check_model(self._config)
            check_ports(self._config.server)
        except USER_ERRORS as error:
            tell(error)
            return 1
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        frontend = FrontendProcess.start(self._config, model, owner_pid=os.getpid(), replica_bind_host="127.0.0.1")
        threading.Thread(target=self._watch_frontend, args=(frontend,), daemon=True, name="watch-frontend").start()
        try:
            self._build_native_kernels()
            return self._run_ranks(frontend)
        except KeyboardInterrupt:
            print("moeserve: stopping", file=sys.stderr)
            return 0
        finally:
            self._stopping.set()
            frontend.stop()

    def _build_native_kernels(self) -> None:
        """Once, so that ranks find them; without them the ranks serve in plain torch."""
        from moeserve.worker.device import build_native_kernels, resolve_device

        reason = build_native_kernels(resolve_device(self._config.model.device))
        if reason is not None:
            print(f"moeserve: {reason}", file=sys.stderr, flush=True)

    def _run_ranks(self, frontend: FrontendProcess) -> int:
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        has_been_ready = False
        for restart in range(self._config.server.max_restarts + 1):
            try:
                self._launch_ranks()
            except SignalException as stopped:
                return self._exit_code_of_signal(stopped.sigval, frontend)
            except ChildFailedError as failed:
                has_been_ready = has_been_ready or frontend.was_ready()
                print(f"moeserve: error: {describe_failure(failed.failures)}", file=sys.stderr, flush=True)
                if is_user_error(failed.failures) or not has_been_ready:
                    return 1
                if restart < self._config.server.max_restarts:
                    print("moeserve: starting the ranks again; open requests go on", file=sys.stderr, flush=True)
        print(f"moeserve: error: gave up after {self._config.server.max_restarts} restarts", file=sys.stderr)
        return 1

    def _launch_ranks(self) -> None:
        """One life of the ranks, as `torchrun --standalone --nproc-per-node N -m moeserve serve ...` would run them."""
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        _silence_agent()
        parallel = self._config.parallel
        os.environ[FRONTEND_IS_RUNNING] = "1"
        set_single_host_network(os.environ)
        set_thread_environment(os.environ, threads=threads_per_rank(parallel, local_world_size=parallel.world_size))
        launch = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=parallel.world_size,
            run_id=f"moeserve-{os.getpid()}",
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            shutdown_timeout=_SHUTDOWN_TIMEOUT_S,
        )
        elastic_launch(launch, sys.executable)("-m", "moeserve", *self._serve_argv)

    def _watch_frontend(self, frontend: FrontendProcess) -> None:
        """Without a frontend there is nobody to serve: a frontend that dies takes the server down."""
        code = frontend.process.wait()
        if not self._stopping.is_set():
            print(f"moeserve: error: the frontend ended with exit code {code}", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGTERM)

    @staticmethod
    def _exit_code_of_signal(signal_number: int, frontend: FrontendProcess) -> int:
        """Stopping by request is success; stopping because the frontend died is not."""
        if frontend.process.poll() is not None:
            return 1
        print(f"moeserve: stopping ({signal.Signals(signal_number).name})", file=sys.stderr)
        return 0


def _silence_agent() -> None:
    """The agent's own log lines repeat, at length, what the supervisor says in one; each of its loggers has a level."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
