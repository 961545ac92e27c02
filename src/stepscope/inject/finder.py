"""The import hook: attach to a framework after it was imported.

Every Python process of a monitored command loads this file, so it imports as little as possible.
Standard library only.
"""

import os
import struct
import sys
import time
from _frozen_importlib_external import SourceFileLoader

_HERE = os.path.dirname(os.path.abspath(__file__))

HOOKED_MODULES = (
    "torch.utils.data._utils.fetch",
    "torch.utils.data.dataloader",
    "torch.optim.optimizer",
    "keras.src.callbacks.callback_list",
    "torch",
    "tensorflow",
    "keras",
    "jax",
    "lightning",
    "pytorch_lightning",
    "transformers",
)


class StepscopeFinder(object):
    """Lets the other finders find a hooked module, and attaches to it after its execution."""

    def __init__(self):
        self.waiting = set(HOOKED_MODULES)

    def find_spec(self, name, path=None, target=None):
        if name not in self.waiting:
            return None
        for finder in list(sys.meta_path):
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                self._attach_after(spec.loader, name)
                return spec
        return None

    def _attach_after(self, loader, name):
        """Patch the loader temporarily: it is restored when the module is executed."""
        if loader is None or isinstance(loader, type):
            return
        try:
            run = loader.exec_module

            def exec_module(module):
                if module.__name__ != name:  # a loader that several modules share
                    return run(module)
                loader.__dict__.pop("exec_module", None)
                self.waiting.discard(name)
                run(module)
                _attach(name, module)

            if "exec_module" not in vars(loader):
                loader.exec_module = exec_module
        except Exception:
            pass


def install(folder):
    """Install the import hook, once per process, and record it in a file of all processes."""
    if not any(type(finder).__name__ == "StepscopeFinder" for finder in sys.meta_path):
        sys.meta_path.insert(0, StepscopeFinder())
    start = (time.monotonic_ns(), 1, 0, os.getpid(), -1, sys.hexversion)  # as in events.py
    path = os.path.join(folder, "interpreters.bin")
    # The folder may belong to another user: never write to a link or wait for a FIFO.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = os.open(path, flags, 0o644)
    try:
        if os.fstat(fd).st_nlink == 1:
            os.write(fd, struct.pack("<qHHIqq", *start))
    finally:
        os.close(fd)


def attach_to_imported():
    """Attach to modules that were imported before monitoring started (`stepscope.watch`)."""
    for name in HOOKED_MODULES:
        if name in sys.modules:
            _attach(name, sys.modules[name])


def _attach(name, module):
    try:  # an unknown version of a framework must still work
        load_hook().attach(name, module)
    except Exception:
        pass


def load_hook():
    """Load the hook and its modules by path: stepscope may not be installed in this Python."""
    for part in ("events", "stack_samples", "cuda_timing", "allocator", "batch_timing", "hook"):
        name = "_stepscope_" + part
        if name not in sys.modules:
            load(name, os.path.join(_HERE, part + ".py"))
    return sys.modules["_stepscope_hook"]


def load(name, path):
    """Import a file as a module with this name."""
    code = SourceFileLoader(name, path).get_code(name)
    module = type(sys)(name)
    module.__file__ = path
    sys.modules[name] = module
    exec(code, module.__dict__)
    return module
