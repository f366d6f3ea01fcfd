"""Which peers take part: admission, sessions, reports, the plan, and each version's progress in the fleet."""
