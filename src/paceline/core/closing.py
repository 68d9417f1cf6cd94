"""What opens, closes: once, also at the end of a `with` block."""

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self, final


class Closing(ABC):
    """Something that the end of a `with` block closes, whatever ended it."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything. Closing twice is fine."""

    @final
    def __enter__(self) -> Self:
        return self

    @final
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self._failing(error)
        self.close()

    def _failing(self, error: BaseException) -> None:  # noqa: B027 - most need not know
        """An error ended the `with` block; closing is the next step."""
