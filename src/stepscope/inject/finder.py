"""Waits for a framework to be imported, and has the hook look at it once it has run.

Standard library only, and little of it: every Python process of a watched command loads this file.
"""

import os
import struct
import sys
import time
from _frozen_importlib_external import SourceFileLoader

_HERE = os.path.dirname(os.path.abspath(__file__))

WATCHED = (
    "torch.utils.data._utils.fetch",
    "torch.utils.data.dataloader",
    "torch.optim.optimizer",
    "keras.src.callbacks.callback_list",
    "torch",
    "tensorflow",
    "keras",
    "jax",
    "lightning",
    "transformers",
)


class StepscopeFinder(object):
    """Lets the other finders find a watched module, and attaches the hook after it ran."""

    def __init__(self):
        self.waiting = set(WATCHED)

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
        """The loader stays the one that was found, and is as it was once the module has run."""
        if loader is None or isinstance(loader, type):
            return
        try:
            run = loader.exec_module

            def exec_module(module):
                if module.__name__ != name:  # a loader that many modules share
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
    """Begin to wait, once per process, and say so in a file that all processes share."""
    if not any(type(finder).__name__ == "StepscopeFinder" for finder in sys.meta_path):
        sys.meta_path.insert(0, StepscopeFinder())
    start = (time.monotonic_ns(), 1, 0, os.getpid(), -1, sys.hexversion)  # as in events.py
    fd = os.open(os.path.join(folder, "hello.bin"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(fd, struct.pack("<qHHIqq", *start))
    finally:
        os.close(fd)


def attach_to_imported():
    """For a process that imported its framework before it was watched (`stepscope.watch`)."""
    for name in WATCHED:
        if name in sys.modules:
            _attach(name, sys.modules[name])


def _attach(name, module):
    """A framework that is not as the hook expects it must still work."""
    try:
        load_hook().attach(name, module)
    except Exception:
        pass


def load_hook():
    """The hook, and what it needs, loaded by path: stepscope need not be installed here."""
    for part in ("events", "stack_samples", "cuda_timing", "allocator", "batch_timing", "hook"):
        name = "_stepscope_" + part
        if name not in sys.modules:
            load(name, os.path.join(_HERE, part + ".py"))
    return sys.modules["_stepscope_hook"]


def load(name, path):
    """Import a file under a name of our own."""
    code = SourceFileLoader(name, path).get_code(name)
    module = type(sys)(name)
    module.__file__ = path
    sys.modules[name] = module
    exec(code, module.__dict__)
    return module
