# Loaded by every Python interpreter of a monitored command, of any version: it must be cheap, use
# old syntax, and never fail. It installs the import hook, and then runs the sitecustomize that it
# shadows, if there is one.
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_OLDEST = (3, 7)


def _begin():
    from _frozen_importlib_external import SourceFileLoader

    path = os.path.join(os.path.dirname(_HERE), "finder.py")
    finder = type(sys)("_stepscope_finder")
    finder.__file__ = path
    exec(SourceFileLoader("_stepscope_finder", path).get_code("_stepscope_finder"), finder.__dict__)
    finder.install(os.environ["STEPSCOPE_EVENTS"])


def _run_shadowed_sitecustomize():
    from importlib.machinery import PathFinder

    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = type(sys)("sitecustomize")
        module.__spec__ = spec
        module.__file__ = spec.origin
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]
if sys.version_info >= _OLDEST:
    try:
        if os.environ.get("STEPSCOPE_EVENTS"):
            _begin()
    except Exception:
        pass
    _run_shadowed_sitecustomize()
