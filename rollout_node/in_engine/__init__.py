"""Code that runs inside any engine's workers: mapping, staging, evidence, audits. It imports no engine."""
