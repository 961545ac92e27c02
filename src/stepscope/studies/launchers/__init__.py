"""Who starts the trials of a study: one after the other here, later on other machines."""
