"""What every route works with, made once by whoever starts the server."""

from dataclasses import dataclass

from moeserve.config import Config
from moeserve.observability.frontend_metrics import FrontendMetrics
from moeserve.server.dashboard.live import LiveFeed
from moeserve.server.engine_client import EngineClient
from moeserve.server.errors import ApiError, show
from moeserve.server.placement.service import PlacementService
from moeserve.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerContext:
    config: Config
    tokenizer: Tokenizer
    engine: EngineClient
    metrics: FrontendMetrics
    placement: PlacementService
    live: LiveFeed
    model_max_len: int
    """Most tokens of prompt and output together; replicas may allow fewer."""
    created: int
    """When the server started, in seconds since 1970."""
    version: str

    @property
    def max_model_len(self) -> int:
        return min(self.model_max_len, self.engine.max_model_len or self.model_max_len)

    def resolve_model(self, name: str | None) -> str:
        """The name to answer with; 404 for a model that is not served."""
        names = self.config.model.served_names
        if name is None:
            return names[0]
        if name not in names:
            served = ", ".join(names)
            message = f"model {show(name)} does not exist; this server has {served}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return name
