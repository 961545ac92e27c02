"""What goes into an unmodified script. Standard library only; imports nothing of ours.

`site/` is put on PYTHONPATH of a watched command. Its `sitecustomize.py` installs an import hook
that loads `hook.py`, by path, when a framework is imported; `events.py` writes what it sees. The
interpreter that runs the script need not have stepscope installed.
"""
