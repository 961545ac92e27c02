"""What is trained: a specification, models and data by name, a user's own, one adapter for each
framework. Nothing here imports a framework before it is asked to train."""
