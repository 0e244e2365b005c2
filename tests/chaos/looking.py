"""Looking: a thread that looks at something again and again."""

import threading


class Looking:
    """Looks from `start` to `stop`.

    Args:
        name: of the thread.
        every: seconds from one look to the next.
    """

    def __init__(self, name: str, every: float) -> None:
        self._every = every
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begins."""
        self._thread.start()

    def stop(self) -> None:
        """Ends, if it has begun."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    def look(self) -> None:
        """Looks once."""
        raise NotImplementedError

    def _run(self) -> None:
        while not self._ended.wait(self._every):
            self.look()
