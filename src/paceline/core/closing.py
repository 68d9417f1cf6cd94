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
        self.close()
