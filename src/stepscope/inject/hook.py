"""Report batches, steps and epochs of an unmodified script.

Loaded by path, as the module `_stepscope_hook`, when a framework is imported. It takes about ten
microseconds per step, and its own errors never reach the script.
"""

import atexit
import functools
import itertools
import json
import sys
import threading
import time
import weakref

events = sys.modules["_stepscope_events"]
stack_samples = sys.modules["_stepscope_stack_samples"]
batch_timing = sys.modules["_stepscope_batch_timing"]
_device = sys.modules["_stepscope_cuda_timing"].DeviceTimer()
_allocator = sys.modules["_stepscope_allocator"].Allocator()

_now = time.monotonic_ns
_numbers = weakref.WeakKeyDictionary()
_made_at = weakref.WeakKeyDictionary()
_reported_loaders = set()
_next_number = itertools.count(1)


def attach(name, module):
    patch = _PATCHES.get(name)
    if patch is None:
        writer = events.current
        if writer is not None:
            writer.seen(name, getattr(module, "__version__", "unknown"))
        return
    target = patch(module)
    writer = events.current
    if writer is not None and target:
        writer.write_named(events.ATTACHED, target)


def _number_of(instance):
    """Return a small number that identifies a loader or an optimizer."""
    try:
        number = _numbers.get(instance)
        if number is None:
            number = _numbers[instance] = next(_next_number)
        return number
    except Exception:  # a subclass that cannot be hashed
        return 0


def _patch_dataloader(module):
    base = module._BaseDataLoaderIter
    if getattr(base.__next__, "_stepscope", False):
        return "DataLoader"
    next_batch, make_iterator = base.__next__, module.DataLoader.__iter__
    make_loader = module.DataLoader.__init__

    def timed_next(self):
        writer = events.current
        if writer is None:
            return next_batch(self)
        started = _now()
        try:
            batch = next_batch(self)
        except StopIteration:
            _report_end(writer, self, _now() - started)
            raise
        _report_batch(writer, self, _now() - started, batch)
        return batch

    def timed_iter(self):
        writer = events.current
        if writer is None:
            return make_iterator(self)
        started = _now()
        iterator = make_iterator(self)
        _report_begin(writer, iterator, _now() - started, self)
        return iterator

    def located_init(self, *args, **kwargs):
        make_loader(self, *args, **kwargs)
        if events.current is not None:
            try:  # the line of code is reported with the first pass over the loader
                _made_at[self] = stack_samples.line_of_caller(2)
            except Exception:
                pass

    timed_next._stepscope = True
    base.__next__ = functools.update_wrapper(timed_next, next_batch)
    module.DataLoader.__iter__ = functools.update_wrapper(timed_iter, make_iterator)
    module.DataLoader.__init__ = functools.update_wrapper(located_init, make_loader)
    try:  # for code that reads the signature without following `__wrapped__`
        located_init.__signature__ = sys.modules["inspect"].signature(make_loader)
    except Exception:
        pass
    return "DataLoader"


def _report_begin(writer, iterator, spent, loader):
    try:
        number = _number_of(loader)
        if number not in _reported_loaders:
            _reported_loaders.add(number)
            _report_loader(writer, loader, number)
        iterator._stepscope = _Pass(number, _batch_size_of(loader))
        writer.write(events.LOADER_BEGIN, 0, number, spent, _length_of(loader))
        _device.pass_ended()
    except Exception:
        pass


def _report_batch(writer, iterator, waited, batch):
    try:
        current = getattr(iterator, "_stepscope", None)
        if current is None:  # a subclass with its own __iter__: the pass starts here
            current = iterator._stepscope = _Pass(next(_next_number), None)
            writer.write(events.LOADER_BEGIN, 0, current.number, 0, -1)
        writer.write(events.BATCH, 0, current.number, waited, current.samples_in(batch))
    except Exception:
        pass
    _device.batch_received()


def _report_end(writer, iterator, waited):
    try:
        current = getattr(iterator, "_stepscope", None)
        if current is not None:
            writer.write(events.LOADER_END, 0, current.number, waited)
            _device.pass_ended()
            _allocator.report(writer)
    except Exception:
        pass


def _report_loader(writer, loader, number):
    """Report the settings of a loader and the line of code that created it."""
    workers = int(getattr(loader, "num_workers", 0) or 0)
    prefetch = int(getattr(loader, "prefetch_factor", 0) or 0)
    flags = events.LOADER_PINS if getattr(loader, "pin_memory", False) else 0
    flags |= events.LOADER_PERSISTS if getattr(loader, "persistent_workers", False) else 0
    size = _batch_size_of(loader)
    packed = workers | prefetch << 16
    writer.write(events.LOADER, flags, number, packed, -1 if size is None else size)
    line = _made_at.get(loader)
    if line:
        writer.write_named(events.LOADER_MADE, line, number=number)


class _Pass:
    """One pass over a loader: the number of the loader, and how its samples are counted."""

    __slots__ = ("by_length", "number", "size")

    def __init__(self, number, size):
        self.number = number
        self.size = size
        self.by_length = None

    def samples_in(self, batch):
        """Return the number of samples in a batch, or -1 if it is unknown.

        It is the first dimension of the first tensor, or the length of the list if samples differ
        in shape and come as lists (detection): whichever matches the batch size of the loader.
        """
        first = _first_dimension(batch)
        if not isinstance(batch, (list, tuple)) or not isinstance(batch[0], (list, tuple)):
            return first
        if self.by_length is None:
            self.by_length = first < 0 or (self.size is not None and first != self.size)
            if self.by_length and self.size is not None and len(batch[0]) > self.size:
                self.by_length = False
        return len(batch[0]) if self.by_length else first


def _first_dimension(batch):
    for _ in range(8):
        if isinstance(batch, (list, tuple)):
            if isinstance(batch[0], (str, bytes, int, float)):
                return len(batch)
            batch = batch[0]
        elif hasattr(batch, "shape"):
            return int(batch.shape[0]) if len(batch.shape) else -1
        elif hasattr(batch, "values"):
            batch = next(iter(batch.values()))
        else:
            return -1
    return -1


def _batch_size_of(loader):
    size = getattr(loader, "batch_size", None)
    if size is None:
        size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None


def _length_of(loader):
    """Return the number of batches per epoch, or -1 if it is unknown. `len` is not called for
    iterable datasets, because it would later cause a warning."""
    try:
        return len(loader) if loader._dataset_kind == 0 else -1
    except Exception:
        return -1


def _patch_optimizer(module):
    register = getattr(module, "register_optimizer_step_post_hook", None)
    if register is None or getattr(module, "_stepscope_attached", False):
        return "optimizer" if register is not None else ""
    module._stepscope_attached = True
    step = events.STEP
    first = [True]

    def after_step(optimizer, args, kwargs):
        writer = events.current
        if writer is not None:
            if first:
                first.clear()
                writer.update_rank()
                _report_settings(writer, optimizer)
            _device.step_queued()
            writer.write(step, 0, _number_of(optimizer), 1)
            stack_samples.begin(threading.get_ident())
            if _now() >= _allocator.due:
                _allocator.report(writer)

    after_step._torchdynamo_disable = True
    register(after_step)
    atexit.register(_allocator.report_at_exit)
    return "optimizer"


def _report_settings(writer, optimizer):
    """Report the settings of PyTorch that affect its speed, once, after the first step."""
    try:
        torch = sys.modules["torch"]
        group = optimizer.param_groups[0]
        settings = {
            "threads": torch.get_num_threads(),
            "optimizer": type(optimizer).__name__,
            "dtype": str(group["params"][0].dtype).replace("torch.", ""),
            "device": group["params"][0].device.type,
            "matmul_precision": torch.get_float32_matmul_precision(),
            "parameters": sum(p.numel() for g in optimizer.param_groups for p in g["params"]),
            "cudnn_benchmark": bool(torch.backends.cudnn.benchmark),
            "fused": bool(group.get("fused")) or bool(group.get("foreach")),
        }
        writer.write_named(events.SETTINGS, json.dumps(settings))
    except Exception:
        pass


def _patch_keras(module):
    """Patch the callback list, which is called at once. A callback of our own would be called
    later, from other threads, and would be visible in the user's list."""
    callback_list = module.CallbackList
    if getattr(callback_list.on_epoch_begin, "_stepscope", False):
        return "Keras fit"

    def mark(kind, name, value=None):
        writer = events.current
        if writer is not None:
            writer.mark(kind, name, value, events.FROM_FIT)

    def epoch_begins(self, epoch, logs=None):
        self._stepscope_last = -1
        mark(events.PHASE_BEGIN, "epoch", epoch)

    def epoch_ends(self, epoch, logs=None):
        mark(events.PHASE_END, "epoch", epoch)

    def batch_ends(self, batch, logs=None):
        """With `steps_per_execution` one call covers several steps: `batch` is the last."""
        steps = max(1, batch - getattr(self, "_stepscope_last", batch - 1))
        self._stepscope_last = batch
        writer = events.current
        if writer is not None:
            writer.write(events.STEP, events.FROM_FIT, 0, steps)
            stack_samples.begin(threading.get_ident())

    def test_begins(self, logs=None):
        mark(events.PHASE_BEGIN, "evaluation")

    def test_ends(self, logs=None):
        mark(events.PHASE_END, "evaluation")

    _report_first(callback_list, "on_epoch_begin", epoch_begins)
    _report_first(callback_list, "on_epoch_end", epoch_ends)
    _report_first(callback_list, "on_train_batch_end", batch_ends)
    _report_first(callback_list, "on_test_begin", test_begins)
    _report_first(callback_list, "on_test_end", test_ends)
    return "Keras fit"


def _report_first(cls, name, report):
    """Call `report` before a method."""
    original = getattr(cls, name)

    def reported(self, *args, **kwargs):
        try:
            report(self, *args, **kwargs)
        except Exception:
            pass
        return original(self, *args, **kwargs)

    reported._stepscope = True
    setattr(cls, name, functools.update_wrapper(reported, original))


_PATCHES = {
    "torch.utils.data._utils.fetch": batch_timing.patch,
    "torch.utils.data.dataloader": _patch_dataloader,
    "torch.optim.optimizer": _patch_optimizer,
    "keras.src.callbacks.callback_list": _patch_keras,
}
