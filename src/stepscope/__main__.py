"""`python -m stepscope`."""

from stepscope.cli.app import main

main()
