"""The run's page in a browser: a small document of a run's state, and the server of it."""
