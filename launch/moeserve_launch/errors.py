"""How a mistake becomes one line: which errors are the user's, and how a rank tells its launcher about them.

A rank writes its error into the file that torchrun's agent names (TORCHELASTIC_ERROR_FILE, the format that the agent
reads), marked as the user's; the supervisor prints it once, whatever number of ranks met it.
"""

import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from moeserve.config import ConfigError
from moeserve.models.checkpoint import CheckpointError
from moeserve_placement import PlacementError

USER_ERRORS = (ConfigError, CheckpointError, PlacementError, MemoryError)


def tell(error: BaseException) -> None:
    """One line on standard error."""
    text = " ".join(str(error).split()) or type(error).__name__
    print(f"moeserve: error: {text}", file=sys.stderr, flush=True)


def record_user_error(error: BaseException) -> None:
    """Leave the error for the agent, where there is one that reads it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    text = " ".join(str(error).split()) or type(error).__name__
    extra = {"py_callstack": "", "timestamp": str(int(time.time())), "user_error": True}
    with open(path, "w") as file:
        json.dump({"message": {"message": text, "extraInfo": extra}}, file)


def is_user_error(failures: Mapping[int, Any]) -> bool:
    """Whether one of torchelastic's `ProcessFailure`s by rank was marked by `record_user_error`."""
    return any(_user_message(failure) is not None for failure in failures.values())


def describe_failure(failures: Mapping[int, Any]) -> str:
    """One line about the failure that came first; a user's mistake goes before whatever followed from it."""
    by_time = sorted(failures.items(), key=lambda item: item[1].timestamp)
    for _, failure in by_time:
        message = _user_message(failure)
        if message is not None:
            return message
    rank, failure = by_time[0]
    if failure.exitcode < 0:
        return f"rank {rank} was ended by {failure.signal_name()}"
    return f"rank {rank} ended with exit code {failure.exitcode}"


def _user_message(failure: Any) -> str | None:
    message = failure.message
    if isinstance(message, dict) and message.get("extraInfo", {}).get("user_error"):
        return str(message["message"])
    return None
