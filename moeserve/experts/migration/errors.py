"""Why a change of the placement could not be staged."""


class StagingError(Exception):
    """The message is `what: details`; what is in force stays so."""
