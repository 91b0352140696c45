"""Finds the first of several stop strings in a text that comes piece by piece (Knuth, Morris and Pratt 1977).

Constant work a character, on average, however long the strings are; and at any time it knows how much of the end of the
text could still become one of them.
"""


class StopMatcher:
    """All stop strings of one request."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._patterns = [_Pattern(stop) for stop in stops]

    @property
    def num_matched_chars(self) -> int:
        """How many characters at the end of the text could be the beginning of a stop string."""
        return max((pattern.num_matched for pattern in self._patterns), default=0)

    def advance(self, text: str) -> tuple[int, str] | None:
        """Go on with `text`; (end in `text`, stop string) of the first one complete, the longest if several are."""
        if not self._patterns:
            return None
        for index, char in enumerate(text):
            complete = [pattern.stop for pattern in self._patterns if pattern.advance(char)]
            if complete:
                return index + 1, max(complete, key=len)
        return None


class _Pattern:
    """How much of one string the text ends with."""

    __slots__ = ("_fallback", "num_matched", "stop")

    def __init__(self, stop: str) -> None:
        assert stop
        self.stop = stop
        self.num_matched = 0
        self._fallback = _borders(stop)

    def advance(self, char: str) -> bool:
        """Whether `char` completes the string; not to be called after that."""
        matched = self.num_matched
        while matched > 0 and self.stop[matched] != char:
            matched = self._fallback[matched - 1]
        if self.stop[matched] == char:
            matched += 1
        self.num_matched = matched
        return matched == len(self.stop)


def _borders(text: str) -> list[int]:
    """For each prefix: the length of the longest shorter prefix that it ends with."""
    borders = [0] * len(text)
    length = 0
    for index in range(1, len(text)):
        while length > 0 and text[index] != text[length]:
            length = borders[length - 1]
        if text[index] == text[length]:
            length += 1
        borders[index] = length
    return borders
