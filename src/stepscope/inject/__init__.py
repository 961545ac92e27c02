"""Code that is injected into unmodified scripts. Standard library only, no other stepscope code.

`site/` is added to the PYTHONPATH of a monitored command. Its `sitecustomize.py` installs an import
hook that loads `hook.py`, by path, when a framework is imported; `events.py` writes the events. The
interpreter of the script does not need stepscope.
"""
