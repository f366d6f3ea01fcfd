"""The run's page in a browser: what is seen of a run, as one small document, and the server of it."""
