"""Sees batches, steps and epochs in a script that knows nothing of us.

Loaded by path, under the name `_stepscope_hook`, when a framework is imported. What it attaches
takes some ten microseconds per step, and whatever goes wrong in it stays in it.
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
_told_loaders = set()
_next_number = itertools.count(1)


def attach(name, module):
    patch = _PATCHES.get(name)
    if patch is None:
        writer = events.current
        if writer is not None:
            writer.seen(name, getattr(module, "__version__", "unknown"))
        return
    what = patch(module)
    writer = events.current
    if writer is not None and what:
        writer.write_named(events.ATTACHED, what)


def _number_of(thing):
    """A small number for a loader or an optimizer, the same as long as it lives."""
    try:
        number = _numbers.get(thing)
        if number is None:
            number = _numbers[thing] = next(_next_number)
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
            _tell_end(writer, self, _now() - started)
            raise
        _tell_batch(writer, self, _now() - started, batch)
        return batch

    def timed_iter(self):
        writer = events.current
        if writer is None:
            return make_iterator(self)
        started = _now()
        iterator = make_iterator(self)
        _tell_begin(writer, iterator, _now() - started, self)
        return iterator

    def noted_init(self, *args, **kwargs):
        make_loader(self, *args, **kwargs)
        if events.current is not None:
            try:  # which line of code made it is told with the first pass over it
                _made_at[self] = stack_samples.line_of_caller(2)
            except Exception:
                pass

    timed_next._stepscope = True
    base.__next__ = functools.update_wrapper(timed_next, next_batch)
    module.DataLoader.__iter__ = functools.update_wrapper(timed_iter, make_iterator)
    module.DataLoader.__init__ = functools.update_wrapper(noted_init, make_loader)
    try:  # for those who look at the parameters without following `__wrapped__`
        noted_init.__signature__ = sys.modules["inspect"].signature(make_loader)
    except Exception:
        pass
    return "DataLoader"


def _tell_begin(writer, iterator, spent, loader):
    try:
        number = _number_of(loader)
        if number not in _told_loaders:
            _told_loaders.add(number)
            _tell_loader(writer, loader, number)
        iterator._stepscope = _Pass(number, _size_of_batches(loader))
        writer.write(events.LOADER_BEGIN, 0, number, spent, _length_of(loader))
        _device.pass_is_over()
    except Exception:
        pass


def _tell_batch(writer, iterator, waited, batch):
    try:
        current = getattr(iterator, "_stepscope", None)
        if current is None:  # a loader with an __iter__ of its own: its pass begins here
            current = iterator._stepscope = _Pass(next(_next_number), None)
            writer.write(events.LOADER_BEGIN, 0, current.number, 0, -1)
        writer.write(events.BATCH, 0, current.number, waited, current.samples_in(batch))
    except Exception:
        pass
    _device.batch_is_here()


def _tell_end(writer, iterator, waited):
    try:
        current = getattr(iterator, "_stepscope", None)
        if current is not None:
            writer.write(events.LOADER_END, 0, current.number, waited)
            _device.pass_is_over()
            _allocator.tell(writer)
    except Exception:
        pass


def _tell_loader(writer, loader, number):
    """What a loader was told to do, and where."""
    workers = int(getattr(loader, "num_workers", 0) or 0)
    ahead = int(getattr(loader, "prefetch_factor", 0) or 0)
    flags = events.LOADER_PINS if getattr(loader, "pin_memory", False) else 0
    flags |= events.LOADER_PERSISTS if getattr(loader, "persistent_workers", False) else 0
    size = _size_of_batches(loader)
    writer.write(events.LOADER, flags, number, workers | ahead << 16, -1 if size is None else size)
    line = _made_at.get(loader)
    if line:
        writer.write_named(events.LOADER_MADE, line, number=number)


class _Pass:
    """One pass over a loader: which loader, and how its samples are counted."""

    __slots__ = ("by_length", "number", "size")

    def __init__(self, number, size):
        self.number = number
        self.size = size
        self.by_length = None

    def samples_in(self, batch):
        """Samples in a batch, -1 where it does not show.

        It is the first dimension of the first tensor, or, where samples differ in shape and come as
        lists (detection), the length of the list: whichever fits the loader's batch size.
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


def _size_of_batches(loader):
    size = getattr(loader, "batch_size", None)
    if size is None:
        size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None


def _length_of(loader):
    """Batches in an epoch; not asked of iterable data sets, which then warn their user."""
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
                writer.learn_rank()
                _tell_settings(writer, optimizer)
            _device.step_is_queued()
            writer.write(step, 0, _number_of(optimizer), 1)
            stack_samples.begin(threading.get_ident())
            if _now() >= _allocator.due:
                _allocator.tell(writer)

    after_step._torchdynamo_disable = True
    register(after_step)
    atexit.register(_allocator.tell_last)
    return "optimizer"


def _tell_settings(writer, optimizer):
    """What PyTorch is set to that decides how fast it is: asked once, after the first step."""
    try:
        torch = sys.modules["torch"]
        group = optimizer.param_groups[0]
        told = {
            "threads": torch.get_num_threads(),
            "optimizer": type(optimizer).__name__,
            "dtype": str(group["params"][0].dtype).replace("torch.", ""),
            "device": group["params"][0].device.type,
            "matmul_precision": torch.get_float32_matmul_precision(),
            "parameters": sum(p.numel() for g in optimizer.param_groups for p in g["params"]),
            "cudnn_benchmark": bool(torch.backends.cudnn.benchmark),
            "fused": bool(group.get("fused")) or bool(group.get("foreach")),
        }
        writer.write_named(events.SETTINGS, json.dumps(told))
    except Exception:
        pass


def _patch_keras(module):
    """The list of callbacks is told of epochs, batches and evaluations as they happen; a callback
    of our own would be told later, from other threads, and would show in the user's list."""
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
        """With `steps_per_execution` a call stands for several steps: `batch` is the last."""
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

    _tell_first(callback_list, "on_epoch_begin", epoch_begins)
    _tell_first(callback_list, "on_epoch_end", epoch_ends)
    _tell_first(callback_list, "on_train_batch_end", batch_ends)
    _tell_first(callback_list, "on_test_begin", test_begins)
    _tell_first(callback_list, "on_test_end", test_ends)
    return "Keras fit"


def _tell_first(cls, name, tell):
    """Have a method tell us that it was called before it does what it does."""
    original = getattr(cls, name)

    def told(self, *args, **kwargs):
        try:
            tell(self, *args, **kwargs)
        except Exception:
            pass
        return original(self, *args, **kwargs)

    told._stepscope = True
    setattr(cls, name, functools.update_wrapper(told, original))


_PATCHES = {
    "torch.utils.data._utils.fetch": batch_timing.patch,
    "torch.utils.data.dataloader": _patch_dataloader,
    "torch.optim.optimizer": _patch_optimizer,
    "keras.src.callbacks.callback_list": _patch_keras,
}
