"""What our progress bars share: silence for who wants it, and room for texts above."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from stepscope.cli.run import say


class QuietBar:
    """A bar on a terminal, in `_bar` once there is one; elsewhere only what is told."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._bar: Any = None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def tell(self, text: str) -> None:
        """A line above the bar."""
        if self._quiet:
            return
        if self._bar is not None:
            self._bar.console.print(f"stepscope: {text}", markup=False, highlight=False)
        else:
            say(text)
