"""One id for each version and each job, in the logs and traces of all daemons."""
