"""The run's page in a browser: a small document of the run's state, and the routes that serve it."""
