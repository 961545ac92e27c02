"""Time steps on a CUDA device, from the batch to the end of the step, with CUDA events.

Nothing is synchronized: events are recorded, and read after they have completed. Only some steps
are measured, so that it takes at most a thousandth of the time. Standard library only, never
raises.
"""

import sys
import time

events = sys.modules["_stepscope_events"]

_now = time.monotonic_ns
MIN_INTERVAL_NS = 20_000_000
COST_FACTOR = 1000
_RETRY_NS = 500_000_000
_MAX_INTERVAL_NS = 250_000_000
"""Upper bound: with a full queue, recording an event blocks like any launch. This is not a cost."""
_MAX_PENDING = 16


class DeviceTimer:
    """Is called for every batch and step, and reports the time on the device for some of them."""

    def __init__(self):
        self.due = 0
        self._begin = None
        self._pending = []

    def batch_received(self):
        """Start a step: the training thread has a batch."""
        now = _now()
        if self._begin is None and now >= self.due:
            try:
                begin = self._record()
                if begin is None:
                    self.due = now + _RETRY_NS
                else:
                    self._begin = (begin, _now())
            except Exception:
                self.due = now + _RETRY_NS

    def pass_ended(self):
        """Discard the current step: work until the next batch does not belong to a step."""
        self._begin = None

    def step_queued(self):
        """End a step: the work of the optimizer is queued on the device."""
        if self._begin is None:
            return
        begin, queued_from = self._begin
        self._begin = None
        try:
            cuda = _cuda()
            if cuda is not None and cuda.is_current_stream_capturing():
                return  # events must not be queried during graph capture
            now = _now()
            ahead = not begin.query()
            end = self._record()
            if end is not None:
                self._pending.append((begin, end, now - queued_from, ahead))
            self._collect()
            interval = max(MIN_INTERVAL_NS, COST_FACTOR * (_now() - now))
            self.due = now + min(_MAX_INTERVAL_NS, interval)
        except Exception:
            self._pending = []
            self.due = _now() + _RETRY_NS

    def _record(self):
        cuda = _cuda()
        if cuda is None or cuda.is_current_stream_capturing():
            return None
        event = cuda.Event(enable_timing=True)
        event.record()
        return event

    def _collect(self):
        writer = events.current
        while self._pending and (self._pending[0][1].query() or len(self._pending) > _MAX_PENDING):
            begin, end, queued, ahead = self._pending.pop(0)
            if writer is not None and end.query():
                flags = events.HOST_AHEAD if ahead else 0
                elapsed = int(begin.elapsed_time(end) * 1e6)
                writer.write(events.DEVICE_STEP, flags, 0, elapsed, queued)


def _cuda():
    """Return `torch.cuda` if it is initialized."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda if cuda is not None and cuda.is_initialized() else None
