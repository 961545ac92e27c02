"""Which sensors work here, what each costs, and whether they tell the truth."""
