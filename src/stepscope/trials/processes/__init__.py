"""The processes of a trial: found, guarded, ended, and what is left of them."""
