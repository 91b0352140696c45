"""The frontend process: HTTP on one port, replicas on another, until a signal comes or its owner is gone."""

import asyncio
import contextlib
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import psutil
import uvicorn

from moeserve.config import Config, ConfigError
from moeserve.observability.frontend_metrics import FrontendMetrics
from moeserve.server.app import create_app
from moeserve.server.context import ServerContext
from moeserve.server.dashboard.camera import Camera
from moeserve.server.dashboard.live import LiveFeed
from moeserve.server.engine_client import EngineClient
from moeserve.server.engine_registry import EngineRegistry
from moeserve.server.errors import ApiError
from moeserve.server.placement.service import PlacementService
from moeserve.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)

_WATCH_INTERVAL_S = 1.0
_SHUTDOWN_TIMEOUT_S = 3


def run_frontend(
    config: Config,
    *,
    model_folder: Path,
    max_model_len: int,
    owner_pid: int | None,
    replica_host: str = "127.0.0.1",
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    """Serve until SIGTERM, SIGINT or the end of the process `owner_pid`; see `Frontend`."""
    Frontend(
        config, model_folder=model_folder, max_model_len=max_model_len, replica_host=replica_host, on_ready=on_ready
    ).run(owner_pid=owner_pid)


class Frontend:
    """One server: built, run once, stopped from any thread."""

    def __init__(
        self,
        config: Config,
        *,
        model_folder: Path,
        max_model_len: int,
        replica_host: str = "127.0.0.1",
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        """Reads the tokenizer and opens both ports.

        `on_ready` is called once, when all replicas are there. Raises ConfigError when a port is taken or the
        tokenizer cannot be read.
        """
        registry = EngineRegistry(config.parallel.data_parallel_size)
        metrics = FrontendMetrics(registry.read_stats)
        tokenizer = load_tokenizer(model_folder)
        self.placement = PlacementService(config, metrics.registry, clock=time.monotonic)
        self._http_socket = _listen(config)
        self._engine = EngineClient(
            registry,
            metrics,
            max_unfinished=config.server.max_num_waiting,
            clock=time.monotonic,
            on_ready=on_ready,
            on_migrator=self.placement.receive,
        )
        try:
            self._engine.bind(f"tcp://{replica_host}:{config.server.replica_port}")
        except ConfigError:
            self._close()
            raise
        program_version = version("moeserve")
        camera = Camera(
            config,
            version=program_version,
            engine=self._engine,
            registry=registry,
            metrics=metrics,
            placement=self.placement,
            clock=time.monotonic,
            unix_time=time.time,
        )
        self._live = LiveFeed(camera)
        context = ServerContext(
            config=config,
            tokenizer=tokenizer,
            engine=self._engine,
            metrics=metrics,
            placement=self.placement,
            live=self._live,
            model_max_len=max_model_len,
            created=int(time.time()),
            version=program_version,
        )
        self._server = _Server(
            uvicorn.Config(
                create_app(context),
                log_config=None,  # whoever starts the process decides about logging
                log_level="warning",
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=_SHUTDOWN_TIMEOUT_S,
            ),
            self._engine,
            self._live,
        )

    @property
    def num_unfinished(self) -> int:
        """Sequences that wait for their end."""
        return self._engine.num_unfinished

    def run(self, *, owner_pid: int | None = None) -> None:
        """Serve until `stop()`, a signal, or the end of the process `owner_pid`.

        Open streams end with an error event then. Raises what ended the server, if it was an error.
        """
        try:
            asyncio.run(self._serve(owner_pid))
        finally:
            self._close()

    def stop(self) -> None:
        self._server.stop()

    async def _serve(self, owner_pid: int | None) -> None:
        tasks = [
            asyncio.create_task(self._engine.run(), name="engine client"),
            asyncio.create_task(self.placement.run(self._engine), name="placement"),
            asyncio.create_task(self._live.run(), name="dashboard"),
            asyncio.create_task(_watch(self._engine, owner_pid), name="watch"),
        ]
        for task in tasks:
            task.add_done_callback(lambda _: self._server.stop())
        await self._server.serve(sockets=[self._http_socket])
        for task in tasks:
            if task.done():
                task.result()  # where one of them failed, so does the server
            task.cancel()

    def _close(self) -> None:
        self._http_socket.close()
        self._engine.close()


class _Server(uvicorn.Server):
    """Tells the waiting clients before it waits for their connections."""

    def __init__(self, config: uvicorn.Config, engine: EngineClient, live: LiveFeed) -> None:
        super().__init__(config)
        self._engine = engine
        self._live = live

    def stop(self) -> None:
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._engine.fail_all(ApiError(503, "the server is shutting down", code="shutting_down"))
        await self._live.close()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop on a signal, and return: uvicorn's own handlers would raise it again at the end."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)


async def _watch(engine: EngineClient, owner_pid: int | None) -> None:
    """Notice lost replicas; return when the owner is gone."""
    owner = None if owner_pid is None else _find_process(owner_pid)
    while owner_pid is None or (owner is not None and _is_alive(owner)):
        engine.find_lost_replicas()
        await asyncio.sleep(_WATCH_INTERVAL_S)
    logger.warning("the process %d, which started this frontend, is gone", owner_pid)


def _find_process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def _is_alive(process: psutil.Process) -> bool:
    """psutil compares creation times: a process that got the id of a dead one is not it."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _listen(config: Config) -> socket.socket:
    """The HTTP socket. Raises ConfigError when the port is taken."""
    host, port = config.server.host, config.server.port
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        http_socket = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(f"server.port: cannot listen on {host}:{port}: {error.strerror}") from error
    http_socket.setblocking(False)
    return http_socket
