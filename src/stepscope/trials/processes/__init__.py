"""The processes of a trial: identification, guard, stack dumps and leftovers."""
