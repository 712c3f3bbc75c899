"""The one thread that drives an engine's device; all other threads are its clients.

Clients put commands into its queue and read answers from queues of their own. So an interrupt reaches a
client and never a round of dispatches, and several threads can share an engine.
"""

import atexit
import threading
import weakref
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

from jaxspec.engine.errors import EngineError
from jaxspec.engine.rounds.core import EngineCore
from jaxspec.jax_settings import own_settings

Command = Callable[[EngineCore], object]


class EngineThread:
    """Runs an engine's rounds while there is work, sleeps otherwise, and ends with the engine."""

    def __init__(self, core: EngineCore):
        self._lock = threading.Lock()
        self._inbox: SimpleQueue[Command | None] = SimpleQueue()
        self._thread = threading.Thread(
            target=own_settings(core.device)(_serve),
            args=(self._inbox, weakref.ref(core)),
            name="jaxspec-engine",
            daemon=True,
        )
        self._thread.start()
        core.programs.when_compiled = partial(self._inbox.put, _wake)
        self._is_closed = False
        self._stop = partial(_stop, self._inbox, self._thread)
        weakref.finalize(core, self._stop).atexit = False
        # At exit the thread must end before JAX releases its devices, also if the engine has been collected
        # during a round. Exit handlers run last in, first out, and JAX's was registered first.
        atexit.register(self._stop)

    def put(self, command: Command) -> None:
        """Queues `command`, which the thread runs before its next round.

        Raises:
          EngineError: the engine is closed, or this process was forked from the one that loaded it.
        """
        with self._lock:
            if self._is_closed:
                raise EngineError("the engine is closed")
            if not self._thread.is_alive():  # a fork copies no threads, and nobody would answer
                raise EngineError("the engine does not work in a forked process: load it there")
            self._inbox.put(command)

    def wait_idle(self, timeout: float | None = None) -> bool:
        """Waits until nothing is queued, running or in flight; False if that took over `timeout` seconds.

        Raises:
          EngineError: as in `put`.
        """
        idle = threading.Event()
        self.put(lambda core: core.when_idle.append(idle.set))
        return idle.wait(timeout)

    def wait_prepared(self, timeout: float | None = None) -> bool:
        """Waits until every program is compiled and has run; False after `timeout` seconds, or if closed."""
        prepared = threading.Event()
        try:
            self.put(lambda core: core.when_prepared.append(prepared.set))
        except EngineError:
            return False
        return prepared.wait(timeout) and not self._is_closed

    def close(self) -> None:
        """Aborts every request and ends the thread after its current round."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._inbox.put(partial(EngineCore.close, why="the engine was closed"))
        self._stop()
        atexit.unregister(self._stop)


def _serve(inbox: SimpleQueue[Command | None], core_ref: weakref.ref[EngineCore]) -> None:
    _run_commands(inbox, core_ref)
    # A closed engine keeps nobody waiting.
    if (core := core_ref()) is not None:
        _announce(core.when_idle)
        _announce(core.when_prepared)


def _run_commands(inbox: SimpleQueue[Command | None], core_ref: weakref.ref[EngineCore]) -> None:
    while (command := inbox.get()) is not None:
        core = core_ref()
        if core is None:
            return
        _run_command(command, core)
        while core.has_work or not inbox.empty():
            if inbox.empty():
                core.step()
                continue
            if (command := inbox.get()) is None:
                core.close("the engine was closed")
                return
            _run_command(command, core)
        _announce(core.when_idle)
        while inbox.empty() and core.prepare_programs():
            pass
        if inbox.empty() and not core.programs.num_uncompiled:
            _announce(core.when_prepared)
        # While it sleeps, the thread must not keep the engine alive.
        del core, command


def _run_command(command: Command, core: EngineCore) -> None:
    """Runs a command; if it raises, nobody may wait for it, so every request ends."""
    try:
        command(core)
    except BaseException as error:
        core.close(f"the engine failed: {error!r}", reason="failed")


def _announce(listeners: list[Callable[[], object]]) -> None:
    for announce in listeners:
        announce()
    listeners.clear()


def _wake(core: EngineCore) -> None:
    """Does nothing; as a command, it makes the thread look for work."""


def _stop(inbox: SimpleQueue[Command | None], thread: threading.Thread) -> None:
    inbox.put(None)
    if thread is not threading.current_thread():
        thread.join()
