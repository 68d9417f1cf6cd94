"""Output of a task, cut into lines."""

import codecs

MAX_LINE = 64 * 1024


class Lines:
    """Cuts output into lines as a terminal would show them: what `\\r` overwrote is left out."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""

    def feed(self, data: bytes, final: bool = False) -> list[str]:
        """Return the lines, or pieces of `MAX_LINE` characters, that `data` completes."""
        *lines, rest = (self._rest + self._decoder.decode(data, final)).split("\n")
        # The last character may be the first half of \r\n.
        self._rest = rest[rest.rfind("\r", 0, -1) + 1 :]
        if final and self._rest:
            lines.append(self._rest)
        pieces = []
        for line in lines:
            shown = line.removesuffix("\r").rpartition("\r")[2]
            pieces += [shown[i : i + MAX_LINE] for i in range(0, len(shown) or 1, MAX_LINE)]
        while len(self._rest) > MAX_LINE:
            pieces.append(self._rest[:MAX_LINE])
            self._rest = self._rest[MAX_LINE:]
        return pieces
