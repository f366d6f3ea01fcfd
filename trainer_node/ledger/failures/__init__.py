"""Failures of jobs: rejected results, and leases that come back for the job's own fault."""
