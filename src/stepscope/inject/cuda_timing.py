"""How long a CUDA device takes from a batch to the end of its step, by events in its own queue.

Nobody ever waits: events are recorded, and read when they have happened. One step in many is
measured, so that it costs a thousandth of the time at most. Standard library only, never raises.
"""

import sys
import time

events = sys.modules["_stepscope_events"]

_now = time.monotonic_ns
EVERY_NS = 20_000_000
TIMES_COST = 1000
_NOT_YET_NS = 500_000_000
_RAREST_NS = 250_000_000
"""Where the queue is full, recording an event waits like any launch would: that is no cost."""
_MOST_PENDING = 16


class DeviceTimer:
    """Told of batches and steps as they happen; tells the device's time for some of them."""

    def __init__(self):
        self.due = 0
        self._begin = None
        self._pending = []

    def batch_is_here(self):
        """The training thread has a batch: what it queues from now on is the step."""
        now = _now()
        if self._begin is None and now >= self.due:
            try:
                begin = self._record()
                if begin is None:
                    self.due = now + _NOT_YET_NS
                else:
                    self._begin = (begin, _now())
            except Exception:
                self.due = now + _NOT_YET_NS

    def pass_is_over(self):
        """What comes until the next batch belongs to no step."""
        self._begin = None

    def step_is_queued(self):
        """The optimizer's step is queued: the end of the step, unless the user queues more."""
        if self._begin is None:
            return
        begin, queued_from = self._begin
        self._begin = None
        try:
            cuda = _cuda()
            if cuda is not None and cuda.is_current_stream_capturing():
                return  # nothing may be asked of the device while it records a graph
            now = _now()
            ahead = not begin.query()
            end = self._record()
            if end is not None:
                self._pending.append((begin, end, now - queued_from, ahead))
            self._collect()
            self.due = now + min(_RAREST_NS, max(EVERY_NS, TIMES_COST * (_now() - now)))
        except Exception:
            self._pending = []
            self.due = _now() + _NOT_YET_NS

    def _record(self):
        cuda = _cuda()
        if cuda is None or cuda.is_current_stream_capturing():
            return None
        event = cuda.Event(enable_timing=True)
        event.record()
        return event

    def _collect(self):
        writer = events.current
        while self._pending and (self._pending[0][1].query() or len(self._pending) > _MOST_PENDING):
            begin, end, queued, ahead = self._pending.pop(0)
            if writer is not None and end.query():
                flags = events.HOST_AHEAD if ahead else 0
                took = int(begin.elapsed_time(end) * 1e6)
                writer.write(events.DEVICE_STEP, flags, 0, took, queued)


def _cuda():
    """PyTorch's CUDA, once it is in use."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda if cuda is not None and cuda.is_initialized() else None
