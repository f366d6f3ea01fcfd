"""Which peers take part: admission, sessions, reports, the plan, and what the fleet makes of a version."""
